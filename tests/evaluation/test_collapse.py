"""Row, report and gate show samples that repeat one another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.digits_workspace import Pixels, digits, put_samples, put_snapshot
from support.evaluated import Run, in_haste, noisy

from ddpm_core.evaluation import memorisation
from ddpm_core.evaluation.memorisation import compare_repeats, nearest_other
from ddpm_core.evaluation.scorer import Scorer
from ddpm_core.registry.gate import decide
from ddpm_core.storage.workspace import REPORT, TABLE

PLAIN = {"sampler": "dpmpp", "steps": 20, "guidance": 1.0, "classes": None}


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Scorer:
    run = Run(tmp_path_factory.mktemp("collapse"))
    run.put_data()
    return Scorer(run.config, run.workspace)


def real(count: int = 180) -> Pixels:
    """Return held-out digits."""
    return digits(8)[0][:count]


def judged(scorer: Scorer, samples: Pixels, **sampler: Any) -> dict[str, Any]:
    return scorer.collapse(samples, {**PLAIN, **sampler})


def test_the_nearest_other_image_is_that_of_a_full_search(monkeypatch: pytest.MonkeyPatch) -> None:
    images = real(60)
    images[7], images[9] = images[3], images[4, :, ::-1]
    monkeypatch.setattr(memorisation, "CHUNK", 17)
    found = nearest_other(images)
    plain = images.reshape(60, -1) / 255
    for row, image in enumerate(images):
        both = [image.reshape(1, -1) / 255, image[:, ::-1].reshape(1, -1) / 255]
        distances = [np.sqrt(np.square(plain - one).mean(1)) / (image / 255).std() for one in both]
        least = np.delete(np.minimum(*distances), row).min()
        assert found.distance[row] == pytest.approx(least, abs=1e-6)
        assert found.index[row] != row
    assert found.distance[[3, 7, 4, 9]].tolist() == [0, 0, 0, 0]
    assert found.index[[3, 7, 4, 9]].tolist() == [7, 3, 9, 4] and found.mirrored[9]


def test_real_images_and_clean_samples_are_not_collapsed(scorer: Scorer) -> None:
    for samples in (real(), noisy(real(), 20)):
        facts = judged(scorer, samples)
        assert (facts["count"], facts["verdict"]) == (180, "none")


def prototypes() -> Pixels:
    return noisy(real(12)[np.arange(180) % 12], 8)


def with_black(count: int) -> Pixels:
    images = real().copy()
    images[:count] = 0
    return images


@pytest.mark.parametrize(
    ("samples", "verdict", "repeats"),
    [
        (real(1).repeat(180, axis=0), "collapsed", 180),
        (prototypes(), "collapsed", 180),
        (with_black(60), "collapsed", 60),
        (with_black(20), "repeats", 20),
        (with_black(2), "none", 2),
    ],
    ids=["one image", "twelve images", "a third black", "a ninth black", "two black"],
)
def test_repeating_samples_are_found(
    scorer: Scorer, samples: Pixels, verdict: str, repeats: int
) -> None:
    facts = judged(scorer, samples)
    assert facts["verdict"] == verdict
    assert facts["repeats"] - facts["real_repeats"] == pytest.approx(repeats, abs=6)
    assert (facts["p_value"] < 0.01) == (verdict != "none")


def test_as_many_repeats_as_in_real_images_are_no_collapse() -> None:
    draw = np.random.default_rng(0)

    def distances(share: float) -> Any:
        return np.where(draw.random(500) < share, 0.0, draw.gamma(20, 0.05, 500))

    verdicts = [
        compare_repeats(distances(share), distances(share))["verdict"] for share in (0.1, 0.6) * 20
    ]
    assert verdicts.count("none") >= 39
    assert compare_repeats(distances(0.6), distances(0.1))["verdict"] == "collapsed"
    assert compare_repeats(distances(0.0), distances(1.0))["verdict"] == "unknown"


def test_collapse_compares_with_real_images_of_the_same_class(tmp_path: Path) -> None:
    run = Run(tmp_path)
    blank = run.labels == 0
    run.images = run.images.copy()
    run.images[blank] = 0  # a class whose images are all the same
    run.put_data()
    scorer = Scorer(run.config, run.workspace)
    samples = np.zeros((100, 8, 8, 1), np.uint8)
    assert judged(scorer, samples)["verdict"] == "collapsed"
    assert judged(scorer, samples, classes=["0"])["verdict"] == "unknown"
    assert judged(scorer, samples, classes=["0", "1"])["verdict"] != "unknown"
    assert judged(scorer, samples, prompts=["a zero"])["verdict"] == "unknown"
    assert judged(scorer, samples[:4])["verdict"] == "unknown"


def test_a_collapsed_checkpoint_is_not_called_good(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path)
    data = run.put_data()
    for step, samples in ((200, run.images[400:430]), (400, run.images[:1].repeat(30, axis=0))):
        put_snapshot(run.workspace, step)
        put_samples(run.workspace, step, samples, data)
    with in_haste():
        rows = run.evaluate()
    assert [row["collapse"]["verdict"] for row in rows.values()] == ["none", "collapsed"]
    assert {key: rows[400]["collapse"][key] for key in ("exact", "repeats", "real_repeats")} == {
        "exact": 30,
        "repeats": 30,
        "real_repeats": 0,
    }
    table = run.workspace.path(TABLE).read_text()
    assert "collapse_verdict,collapse_repeats,collapse_real_repeats,collapse_count" in table
    assert "collapsed,30,0,30" in table
    for page in (run.workspace.path(REPORT).read_text(), capsys.readouterr().err):
        assert "nearly the same as another sample (30 of them exactly)" not in page  # not the best
    (tmp_path / "run/samples/step-00000200/manifest.json").unlink()
    with in_haste():
        rows = run.evaluate()
    page = run.workspace.path(REPORT).read_text()
    assert "but it has collapsed: its samples repeat one another" in page
    assert page.index("Do not use it") < page.index("as far from the data")
    assert "nearly the same as another sample (30 of them exactly)" in capsys.readouterr().err
    assert run.workspace.read_json("metrics.json")["repeats_share"] == 1
    decision = decide(rows[400], None, dict)
    assert not decision.promote and "draws the same images repeatedly" in decision.why
