"""Scores depend on the right images, and edits, damage and failures do not go unnoticed."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from support.evaluated import Run, in_haste

from ddpm_core.errors import UserError
from ddpm_core.evaluation import metrics
from ddpm_core.evaluation.features import Extractor, flatten
from ddpm_core.evaluation.freshness import EXTRACTOR, OUTPUTS
from ddpm_core.evaluation.in_domain import load_extractor
from ddpm_core.evaluation.report import render_report
from ddpm_core.evaluation.scorer import Scorer
from ddpm_core.evaluation.shared import ACCURACY
from ddpm_core.registry.freshness import best_row
from ddpm_core.storage import LocalStorage, Unreachable
from ddpm_core.storage.workspace import METRICS, REPORT, RESULTS, Workspace, samples_key

HELD_OUT, TRAINED = 20, 60


@pytest.fixture(autouse=True)
def hasty() -> Iterator[None]:
    with in_haste():
        yield


def small(root: Path) -> Run:
    """A run whose prepared data are 60 training and 20 held-out images."""
    run = Run(root)
    put(run, run.images[:HELD_OUT], run.labels[:HELD_OUT])
    return run


def put(run: Run, held_out: np.ndarray, labels: np.ndarray) -> None:
    """Prepare the 60 training images again, with other held-out ones."""
    trained = slice(HELD_OUT, HELD_OUT + TRAINED)
    run.put_data(
        images=np.concatenate([held_out, run.images[trained]]),
        labels=np.concatenate([labels, run.labels[trained]]),
        held_out=len(held_out),
    )


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run with two scored checkpoints, to be copied."""
    with in_haste():
        run = small(tmp_path_factory.mktemp("scored"))
        run.put_samples(200, 60)
        run.put_samples(400, 5)
        run.evaluate()
    return Path(run.config.workspace).parent


@pytest.fixture
def run(scored: Path, tmp_path: Path) -> Run:
    shutil.copytree(scored, tmp_path, dirs_exist_ok=True)
    return Run(tmp_path)


def test_metric_names_contain_their_sample_count(run: Run) -> None:
    row = run.results()["rows"][0]
    assert (row["evidence"]["count"], row["prdc_count"], row["kid_count"]) == (100, TRAINED, 100)
    named = run.workspace.read_json(METRICS)
    for name in ("fd", "kid_mean", "is_mean"):
        assert f"{name}_in_domain_100" in named, name
    for name in ("precision", "recall", "density", "coverage"):
        assert f"{name}_in_domain_60" in named and f"{name}_in_domain_100" not in named, name
    report = run.workspace.path(REPORT).read_text()
    assert "coverage use the first 60 samples and as many training images" in report
    assert "precision and recall, in-domain features, 60 images" in report


def test_held_out_training_images_are_not_in_the_floor(tmp_path: Path) -> None:
    run = small(tmp_path)
    copies = slice(HELD_OUT, HELD_OUT + 12)
    put(
        run,
        np.concatenate([run.images[copies], run.images[:8]]),
        np.concatenate([run.labels[copies], run.labels[:8]]),
    )
    run.put_samples(200, 5)
    row = run.evaluate()[200]
    assert row["floor_count"] == 8 and row["memorisation"]["holdout_count"] == 8
    scorer = Scorer(run.config, run.workspace)
    alone = small(tmp_path / "clean")
    put(alone, run.images[:8], run.labels[:8])
    clean = Scorer(alone.config, alone.workspace)
    clean.__dict__["extractor"] = scorer.extractor
    assert row["floor"]["fd"] == pytest.approx(clean.floor(8)["fd"])


def test_accuracy_is_measured_on_the_current_held_out_images(run: Run) -> None:
    before = run.results()["rows"][0]["evidence"]
    others = run.images[200 : 200 + HELD_OUT]
    trained, fingerprint = load_extractor(run.workspace.path(EXTRACTOR))
    _, logits = trained.extractor(fingerprint, torch.device("cpu"))(torch.from_numpy(others))
    assert logits is not None
    put(run, others, logits.argmax(1).numpy())  # every prediction becomes correct
    after = run.evaluate()[200]["evidence"]
    assert before["extractor_accuracy"] < 1.0 == after["extractor_accuracy"]
    assert before["extractor_fingerprint"] == after["extractor_fingerprint"]
    assert run.results()["extractor"]["accuracy"] == 1.0
    kept = run.workspace.path(ACCURACY).stat().st_mtime_ns
    run.evaluate()
    assert run.workspace.path(ACCURACY).stat().st_mtime_ns == kept


class Failing(LocalStorage):
    """A storage that fails to return the samples of step 400."""

    error: OSError

    def local(self, key: str) -> Path:
        if key == samples_key(400):
            raise self.error
        return super().local(key)


@pytest.mark.parametrize(
    "error", [Unreachable("S3 failed at samples: 503."), OSError(errno.ENOSPC, "No space left")]
)
def test_storage_errors_end_the_run_and_keep_the_ranking(run: Run, error: OSError) -> None:
    before = run.results()
    run.workspace.storage.remove("evaluation/rows/step-00000400.json")
    failing = Failing(Path(run.config.workspace))
    failing.error = error
    intact, run.workspace = run.workspace, Workspace(failing)
    with pytest.raises(type(error)) as caught:
        run.evaluate()
    assert caught.value is error and intact.read_json(RESULTS) == before
    run.workspace = intact
    assert run.evaluate()[400].plain() == before["rows"][1]


def test_edited_score_is_measured_again(run: Run) -> None:
    before = run.results()
    path = run.workspace.path("evaluation/rows/step-00000200.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"score": 0.001}))
    run.evaluate()
    assert run.results() == before


def test_edited_score_is_not_registered(run: Run) -> None:
    before = run.results()
    assert best_row(run.workspace)["step"] == 400
    run.workspace.write_json(
        RESULTS, {**before, "rows": [before["rows"][0] | {"score": 0.001}, before["rows"][1]]}
    )
    assert run.stale() == "the score of step 200 was edited"
    with pytest.raises(UserError, match=r"step 200 was edited or damaged.* Run `ddpm evaluate`"):
        best_row(run.workspace)
    run.evaluate()
    assert run.results() == before and best_row(run.workspace)["step"] == 400


@pytest.mark.parametrize("name", OUTPUTS)
def test_truncated_output_is_written_again(run: Run, name: str) -> None:
    path, times = run.workspace.path(name), run.row_times()
    before = path.read_bytes()
    path.write_bytes(before[: len(before) // 2])
    assert str(run.stale()).startswith(
        f"{name} has {len(before) // 2} bytes, expected {len(before)}"
    )
    run.evaluate()
    assert path.read_bytes() == before and run.row_times() == times
    assert run.stale() is None


def test_rebuilt_report_is_up_to_date(run: Run) -> None:
    before = run.workspace.storage.size(REPORT)
    shutil.rmtree(run.workspace.path("evaluation/pictures"))
    render_report(run.workspace)
    assert run.workspace.storage.size(REPORT) != before and run.stale() is None


def test_identical_training_images_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path)
    same = run.images[:1].repeat(50, axis=0)
    run.put_data(images=same, labels=run.labels[:1].repeat(50), held_out=10)
    run.put_samples(200, 5, count=30)
    capsys.readouterr()
    with pytest.raises(UserError, match="The training images are all the same"):
        run.evaluate()
    assert "classifier" not in capsys.readouterr().err  # the error comes before any training
    scorer = Scorer(run.config, run.workspace)
    scorer.__dict__["extractor"] = Extractor("x", "x", "x", lambda x: (flatten(x, 8), None))
    scores = scorer.score([run.images[100:130]])
    assert scores["fd"] > 0 and scores["fd_pixel_pca"] is None


def test_unscorable_samples_train_no_classifier(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path)
    run.put_data()
    run.put_samples(200, 5, count=1)
    for _ in range(2):
        with pytest.raises(UserError, match="No checkpoint could be scored"):
            run.evaluate()
        assert run.stale() == "step 200 could not be scored"
    assert "classifier" not in capsys.readouterr().err
    assert not run.workspace.storage.exists("evaluation/extractor")
    assert "No checkpoint could be scored" in run.workspace.path(REPORT).read_text()
    run.put_samples(200, 5)
    assert run.evaluate()[200]["score"] > 0 and run.stale() is None


def test_fewer_than_twenty_images_have_no_inception_score(run: Run) -> None:
    for step in (200, 400):
        run.put_samples(step, 5, count=19)
    row = run.evaluate()[200]
    assert row["is_mean"] is None and row["is_std"] is None and row["fd"] is not None
    assert (
        "An inception score requires 20 images; there are 19."
        in run.workspace.path(REPORT).read_text()
    )


def test_out_of_memory_error_names_what_helps(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.put_samples(400, 7)
    monkeypatch.setattr(metrics, "density_coverage", lambda *_: torch.empty(2**50))
    with pytest.raises(UserError, match=r"Out of memory with evaluate.metrics .*remove prdc"):
        run.evaluate()
    assert run.results()["rows"][1]["score"] is not None
