"""What a person reads of an evaluation: the ranking, the tables, the plots and the report."""

from __future__ import annotations

import csv
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.font_manager import findfont
from PIL import Image, ImageColor, ImageFont

from ddpm_core.config import Sample
from ddpm_core.errors import UserError
from ddpm_core.evaluation import plots, verdict
from ddpm_core.evaluation.chart import chart
from ddpm_core.evaluation.curves import Curve, Line, Reference, log_ticks, tick_labels, ticks
from ddpm_core.evaluation.grids import FOLDER, shrink
from ddpm_core.evaluation.report import render_report
from ddpm_core.evaluation.tables import best_csv, metrics, results_csv
from ddpm_core.evaluation.verdict import caveats
from ddpm_core.sampling.images import png
from ddpm_core.scores import (
    AnyRow,
    Results,
    Row,
    Rows,
    Unscored,
    best,
    best_inception,
    best_to_sample,
    differences,
    named_metrics,
    ranked,
)
from ddpm_core.storage.workspace import Workspace
from ddpm_core.text import shown as escaped

SAMPLER = {"sampler": "dpmpp", "steps": 20, "precision": "fp32"}
HOSTILE = (
    '"><script>alert(1)</script>',
    "{{ 7 * 7 }}{% raw %}",
    "</style><img src=http://example.org/x.png onerror=alert(1)>",
    "smørrebrød 🥪 ' ` \\ \n\t",
    "red \x1b[31m and back \u202e to front",
)


def row(step: int, score: float, **changes: Any) -> Row:
    """A scored checkpoint; `changes` to its evidence, or to itself where it has such a key."""
    scores = {
        "fd": score,
        "fd_pixel_pca": score / 2,
        "kid_mean": score / 100,
        "kid_std": 0.01,
        "is_mean": 9 - score / 20,
        "is_std": 0.2,
        "precision": 0.8,
        "recall": 0.7,
        "density": 1.1,
        "coverage": 0.9,
    }
    made: dict[str, Any] = {
        "step": step,
        "score_name": "fd_in_domain_500",
        "score": score,
        **scores,
        "floor_count": 180,
        "floor": {**scores, "fd": 4.0},
        "at_floor": {**scores, "fd": score + 2},
        "memorisation": memory("none"),
        "evidence": {
            "data": "0123456789abcdef",
            "holdout_data": "fedcba9876543210",
            "reference_count": 1617,
            "extractor": "in_domain",
            "extractor_fingerprint": "aaaaaaaaaaaaaaaa",
            "extractor_accuracy": 0.98,
            "space": "in_domain",
            "count": 500,
            "sampler": SAMPLER,
            "seed": 1,
            "weights": "b" * 64,
            "samples": "cccccccccccccccc",
            "train": "dddddddddddddddd",
        },
        "problem": None,
    }
    for key, value in changes.items():
        (made if key in made else made["evidence"])[key] = value
    return Row.model_validate(made)


def memory(kind: str, copies: int = 0, share: float = 0.011, verbatim: int = 0) -> dict[str, Any]:
    return {
        "verdict": kind,
        "count": 180,
        "holdout_count": 180,
        "median": 0.1,
        "holdout_median": 0.11,
        "threshold": 0.05,
        "share_below": share,
        "share_p_value": 0.6,
        "p_value": 0.4,
        "nearer": 0.5,
        "copies": copies,
        "holdout_copies": 1,
        "verbatim": verbatim,
    }


def results(rows: list[AnyRow], classes: tuple[str, ...] = ("a", "b"), **changes: Any) -> Results:
    found = {
        "rows": rows,
        "best": None,
        "settings": {"neighbours": 5},
        "data": {
            "fingerprint": "0123456789abcdef",
            "holdout_fingerprint": "fedcba9876543210",
            "count": 1617,
            "holdout_count": 180,
            "classes": list(classes),
            "class_counts": [100] * len(classes),
            "image_size": 16,
            "channels": 1,
            "source": {"uri": classes[0] if classes else "digits"},
        },
        "extractor": {
            "name": "in_domain",
            "space": "in_domain",
            "task": "classes",
            "fingerprint": "aaaaaaaaaaaaaaaa",
            "accuracy": 0.98,
        },
        "straddling": {"examined": 180, "count": 2, "exact": 1, "pairs": []},
        "run": {"train": {"steps": 800, "ema": [0.99]}, "prepare": {"source": HOSTILE[0]}},
    }
    return Results.model_validate({**found, **changes})


def workspace_of(root: Path, found: Results, side: int = 60) -> Workspace:
    """A workspace with results and a picture of noise for everything that has one."""
    workspace = Workspace.open(str(root))
    workspace.write_json("evaluation/results.json", found.plain())
    picture = png(np.random.default_rng(0).integers(0, 256, (side, side, 1)).astype(np.uint8))
    names = [f"{kind}-{r.step:08d}" for r in found.rows for kind in ("grid", "neighbours")]
    for name in [*names, "real", "neighbours-held-out"]:
        workspace.storage.write(f"{FOLDER}/{name}.png", picture)
    return workspace


class Page(HTMLParser):
    """The tags of a page with their attributes, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def page(root: Path, found: Results) -> Page:
    return Page(render_report(workspace_of(root, found)).read_text(encoding="utf-8"))


def curve(*scores: float, first: int = 200, every: int = 200) -> list[Row]:
    """Checkpoints `every` so many steps."""
    return [row(first + every * i, score) for i, score in enumerate(scores)]


RUN = [row(200, 30.0), row(400, 12.0), row(600, 9.0), row(800, 6.0)]


def test_best_is_the_lowest_score_then_the_earliest() -> None:
    rows = [row(600, 5.0), row(200, 7.0), row(400, 5.0)]
    assert best(rows) == rows[2]
    assert [r.step for r in ranked(rows)] == [200, 400, 600]


def test_unscored_rows_are_not_ranked() -> None:
    rows = [Unscored.because(100, "no samples"), row(200, float("nan")), row(300, 4.0)]
    assert ranked(rows) == rows[2:] and best(rows) == rows[2]
    assert best(rows[:2]) is None and best([]) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("count", 1000),
        ("data", "another"),
        ("extractor_fingerprint", "another"),
        ("sampler", {"sampler": "ddim"}),
    ],
)
def test_scores_with_different_evidence_do_not_compare(field: str, value: Any) -> None:
    odd = row(800, 0.1, **{field: value})
    assert differences(odd, row(1, 1.0)) == [field]
    assert best([row(200, 9.0), row(400, 8.0), odd]).step == 400  # type: ignore[union-attr]


def test_scores_with_another_seed_compare() -> None:
    assert differences(row(1, 1.0, seed=2), row(1, 1.0)) == []


def test_different_metrics_of_the_same_evidence_do_not_compare() -> None:
    odd = row(800, 0.1, score_name="kid_in_domain_500")
    assert differences(odd, row(1, 1.0)) == ["score"]
    assert best([row(200, 9.0), row(400, 8.0), odd]).step == 400  # type: ignore[union-attr]


def test_of_equally_large_sets_more_images_are_ranked() -> None:
    # A list of checkpoints with 1,000 images each, and 5,000 of the latest.
    rows = [row(200, 9.0, count=1000), row(400, 8.0, count=1000), row(600, 5.0, count=5000)]
    assert best(rows).step == 400  # type: ignore[union-attr]
    assert best(rows[1:]).step == 600  # type: ignore[union-attr]


def sampled(**settings: Any) -> dict[str, Any]:
    """The settings of `sample` as results.json has them; by default those of `row`."""
    given = {"count": 500, "precision": "fp32", **settings}
    return Sample.model_validate(given).model_dump(mode="json")


@pytest.mark.parametrize(
    ("field", "value", "settings"),
    [
        ("count", 50, {"count": 50}),
        ("sampler", {**SAMPLER, "sampler": "ddim"}, {"sampler": "ddim"}),
        ("sampler", {**SAMPLER, "precision": "bf16"}, {"precision": "bf16"}),
    ],
)
def test_rows_sampled_with_current_settings_are_ranked(
    field: str, value: Any, settings: dict[str, Any]
) -> None:
    # The best of three is sampled otherwise: it doesn't make the second best the best.
    rows = [row(10, 990.0), row(20, 950.0), row(30, 970.0, **{field: value})]
    assert [r.step for r in ranked(rows, sampled(**settings))] == [30]
    assert [r.step for r in ranked(rows, sampled())] == [10, 20]
    assert [r.step for r in ranked(rows, sampled(count=7))] == [10, 20]  # nothing is of these
    found = results(rows, sample=sampled(**settings))
    assert verdict.judge(found).headline == "Step 30 is not comparable with any other checkpoint."
    assert "Step 10, 20: measured with a different" in " ".join(caveats(found))


def test_rows_with_another_seed_are_ranked_together() -> None:
    rows = [row(10, 990.0), row(20, 950.0, seed=9)]
    assert ranked(rows, sampled(seed=9)) == ranked(rows, sampled()) == rows


@pytest.mark.parametrize("new", [90.0, 970.0, 5000.0])
@pytest.mark.parametrize(
    ("settings", "evidence"),
    [
        ({"count": 50}, {"count": 50}),
        ({"seed": 9}, {"seed": 9}),
        ({"sampler": "ddim"}, {"sampler": {**SAMPLER, "sampler": "ddim"}}),
        ({"precision": "bf16"}, {"sampler": {**SAMPLER, "precision": "bf16"}}),
    ],
)
def test_best_to_sample_stays_the_same_once_sampled(
    settings: dict[str, Any], evidence: dict[str, Any], new: float
) -> None:
    rows = [row(10, 990.0), row(20, 950.0), row(30, 800.0)]
    asked = Sample.model_validate({"count": 500, **settings})
    before = results(rows, sample=sampled())
    assert best_to_sample(before, asked).step == 30  # type: ignore[union-attr]
    after = results([*rows[:2], row(30, new, **evidence)], sample=sampled(**settings))
    assert best_to_sample(after, asked).step == 30  # type: ignore[union-attr]


def test_best_to_sample_ignores_rows_of_third_settings() -> None:
    rows = [row(10, 990.0), row(20, 800.0), row(30, 900.0, sampler={**SAMPLER, "sampler": "ddim"})]
    found = results(rows, sample=sampled(sampler="ddim"))
    assert best_to_sample(found, Sample(count=50)).step == 20  # type: ignore[union-attr]
    assert best_to_sample(Rows(rows=[]), Sample()) is None


def test_the_best_inception_score_is_the_highest() -> None:
    rows = [row(200, 9.0, is_mean=3.0), row(400, 8.0, is_mean=5.0), row(600, 7.0, is_mean=None)]
    assert best_inception(rows) == rows[1]
    assert best_inception([rows[2]]) is None


def test_numbers_are_named_with_their_features_and_count() -> None:
    names = set(named_metrics(row(200, 9.0)))
    assert {"fd_in_domain_500", "fd_pixel_pca_500", "precision_in_domain_500"} <= names
    standard = named_metrics(row(200, 9.0, space="", count=50_000))
    assert standard["fid_50k"] == 9.0 and "kid_mean_50k" in standard


def test_metrics_json_holds_the_best_and_its_floor() -> None:
    found = metrics(RUN)
    assert found["best_step"] == 800 and found["fd_in_domain_500"] == 6.0
    assert (found["fd_in_domain_180"], found["floor_fd_in_domain_180"]) == (8.0, 4.0)
    assert metrics([]) == {"checkpoints": 0}


def test_table_has_a_line_per_checkpoint() -> None:
    text = results_csv([row(400, 8.0), Unscored.because(200, 'no "samples",\nof it')])
    lines = list(csv.DictReader(io.StringIO(text)))
    assert [line["step"] for line in lines] == ["200", "400"]
    assert lines[0]["problem"] == 'no "samples",\nof it' and lines[0]["score"] == ""
    assert json.loads(lines[1]["sampler"]) == SAMPLER
    assert lines[1]["memorisation_verdict"] == "none" and lines[1]["floor_fd"] == "4.0"


def test_best_scores_table_is_valid_without_rows() -> None:
    lines = list(csv.DictReader(io.StringIO(best_csv(RUN))))
    assert [(line["name"], line["step"]) for line in lines] == [
        ("fd_in_domain_500", "800"),
        ("is_in_domain_500", "800"),
    ]
    assert list(csv.DictReader(io.StringIO(best_csv([])))) == []


def test_the_verdict_comes_first_and_in_plain_words(tmp_path: Path) -> None:
    found = page(tmp_path, results(RUN))
    text = " ".join(found.text.split())
    headline = text.index("Step 800 is the best of 4 checkpoints.", text.index("Evaluation of"))
    assert headline < text.index("2 times as far from the data as real images.")
    assert headline < text.index("There is no sign of memorised images.")
    assert headline < text.index("It still improves") < text.index("Scores against training steps")


@pytest.mark.parametrize(
    ("rows", "word", "sentence"),
    [
        (RUN, "likely", "Step 800 is 33\N{NO-BREAK SPACE}% better than step 600, the best of"),
        (RUN[:1], "unknown", "One checkpoint shows no trend."),
        (curve(6.0, 5.9), "little", "Step 400 is only 1.7\N{NO-BREAK SPACE}% better than step 200"),
        (curve(6.0, 6.0, 6.1), "little", "None of the 2 later checkpoints is better."),
        (curve(6.0, 9.0), "no", "The last checkpoint is 50\N{NO-BREAK SPACE}% worse."),
        (
            curve(6.0, 9.0, 8.0),
            "no",
            "The 2 later checkpoints are at least 33\N{NO-BREAK SPACE}%",
        ),
        (curve(9.0, 8.9, first=1600), "unknown", "are from the last quarter of the training"),
        (
            curve(9.0, 8.0, first=1600),
            "likely",
            "better than step 1,600, the first one with a score.",
        ),
        (
            curve(-0.01, -0.02),
            "little",
            "Step 400 is only 0\N{NO-BREAK SPACE}% better",
        ),  # a KID may be
    ],
)
def test_trend_is_described(rows: list[dict[str, Any]], word: str, sentence: str) -> None:
    trend = verdict.judge(results(rows)).trend
    assert trend is not None and trend.word == word and sentence in trend.detail


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.03])
@pytest.mark.parametrize(("power", "word"), [(-0.5, "likely"), (0.0, "little"), (0.5, "no")])
def test_dense_checkpoints_show_the_trend_of_the_whole_curve(
    noise: float, power: float, word: str
) -> None:
    deviations = np.random.default_rng(0).uniform(-noise, noise, 75)
    scores = [1800 * (i + 1) ** power * (1 + deviations[i]) for i in range(75)]
    trend = verdict.judge(results(curve(*scores, every=1))).trend
    assert trend is not None and trend.word == word, trend.detail


@pytest.mark.parametrize(
    ("facts", "level", "sentence"),
    [
        (
            memory("none"),
            "good",
            "1.1\N{NO-BREAK SPACE}% of 180 samples are nearer to a training image",
        ),
        (memory("near", share=0.2), "caution", "20\N{NO-BREAK SPACE}% of 180 samples"),
        (memory("copies", 9), "bad", "5\N{NO-BREAK SPACE}% of 180 samples are nearly the same"),
        (
            memory("copies", 9, verbatim=4),
            "bad",
            "training image (4 of them except for noise)",
        ),
        ({"verdict": "unknown", "count": 3}, "unknown", "no held-out images"),
        (None, "unknown", "was not measured"),
    ],
)
def test_memorisation_is_described(facts: Any, level: str, sentence: str) -> None:
    found = verdict.judge(results([row(200, 6.0, memorisation=facts)]))
    assert found.memorisation is not None and found.memorisation.level == level
    assert sentence in found.memorisation.detail
    assert ("copies training images" in found.headline) == (level == "bad")


def test_a_score_at_the_floor_is_called_near() -> None:
    near = verdict.judge(results([row(200, 2.1)])).quality
    assert near is not None and near.summary.startswith("Its samples are about as near")


def test_unmeasured_and_missing_floors_differ_in_words() -> None:
    lacking = {"fd": None, "score_name": "kid_in_domain_500"}
    scores = [
        row(200, 2.1, floor=floor, at_floor=floor, **lacking)
        for floor in ({"fd": None, "kid_mean": 0.1}, None)
    ]
    answers = [verdict.judge(results([score])).quality for score in scores]
    details = [answer.detail for answer in answers if answer is not None]
    assert len(details) == 2
    assert "the Fréchet distance was not measured" in details[0]
    assert "no held-out images" not in details[0]
    assert "there are no held-out images" in details[1]


def test_caveats_name_small_counts_features_and_unranked_rows() -> None:
    rows = [*RUN, row(900, 1.0, count=1000)]
    text = " ".join(caveats(results(rows)))
    assert "with 500 images is biased upwards" in text and "are not FID" in text
    assert "98\N{NO-BREAK SPACE}% of held-out images correctly" in text
    assert "Step 900: measured with a different number of images" in text


def test_unscored_checkpoints_are_in_caveats_and_page(tmp_path: Path) -> None:
    lacking = [
        Unscored.because(900, "Its samples are damaged."),
        Unscored.because(1000, "It has none."),
    ]
    told = caveats(results([*RUN, *lacking]))[0]
    assert told == "Steps 900, 1,000 could not be scored. Step 900: Its samples are damaged."
    one = caveats(results([*RUN, lacking[1]]))[0]
    assert one == "Step 1,000 could not be scored: It has none."
    many = [Unscored.because(1000 + i, "It has none.") for i in range(25)]
    assert "1,009 and 15 more could not" in caveats(results([*RUN, *many]))[0]
    assert not any("could not be scored" in text for text in caveats(results(RUN)))
    assert told in page(tmp_path, results([*RUN, *lacking])).text


def test_page_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    html = render_report(workspace_of(tmp_path, results(RUN))).read_text()
    found = Page(html)
    for tag, attributes in found.tags:
        assert tag not in {"script", "iframe", "object", "embed", "base"}
        for name in ("src", "href", "srcset", "poster", "action"):
            assert (attributes.get(name) or "data:").startswith("data:"), (tag, attributes)
    assert "url(" not in html and "@import" not in html
    policy = next(m["content"] for m in found.all("meta") if "http-equiv" in m)
    assert policy is not None and policy.startswith("default-src 'none'")


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_escaped(name: str, tmp_path: Path) -> None:
    rows = [*RUN, Unscored.because(900, name)]
    rows[0] = row(200, 30.0, sampler={"prompts": [name]})
    plain = page(tmp_path / "plain", results([*RUN, Unscored.because(900, "x")], ("a", "b")))
    found = page(tmp_path / "hostile", results(rows, (name, "b")))
    assert len(found.all("img")) == len(plain.all("img"))
    assert not [a for _, attributes in found.tags for a in attributes if a.startswith("on")]
    assert found.text.count(escaped(name)) >= 2  # as class and as problem, as it was given


def test_near_copies_are_shown_with_the_number_examined(tmp_path: Path) -> None:
    facts = {**memory("copies", 9), "count": 1500}
    found = page(tmp_path, results([row(200, 6.0, memorisation=facts)]))
    text = " ".join(found.text.split())
    assert text.count("9 of 1,500") == 2 and text.count("1 of 180") == 2  # captions and table


def test_equal_precision_and_recall_are_both_visible(tmp_path: Path) -> None:
    found = page(tmp_path, results([row(200, 30.0, recall=0.8), row(400, 12.0, recall=0.8)]))
    groups = [str(group["class"]) for group in found.all("g")]
    assert ["s0", "s1 dashed"] in [groups[i : i + 2] for i in range(len(groups))]
    levels = [str(line["class"]) for line in found.all("line")]
    assert "floor s0" in levels and "floor s1" in levels
    assert "180 held-out real images, precision: 0.8" in " ".join(found.text.split())

    rows = [row(step, 9.0, recall=0.8, floor=None) for step in (200, 400)]
    with Image.open(io.BytesIO(plots.draw(rows)["PrecisionRecall_vs_TrainingSteps.png"])) as drawn:
        line = np.asarray(drawn.convert("RGB"))[138:152].reshape(-1, 3)
    for color in (plots.BLUE, plots.ORANGE):
        assert (line == ImageColor.getrgb(color)).all(axis=1).sum() > 100


def test_source_is_labelled_and_its_checksums_are_folded(tmp_path: Path) -> None:
    found = results(RUN)
    state = {"files": 184, "sha256": "a" * 64}
    found.data["source"] = {"uri": "photos/", "listing_sha256": "b" * 64, "state": state}
    html = render_report(workspace_of(tmp_path, found)).read_text(encoding="utf-8")
    seen, folded = html.split("<summary>Checksums of the source</summary>")
    assert "files examined" in Page(seen).text and "184" in Page(seen).text
    assert not re.search("[ab]{64}", seen) and "a" * 64 in folded and "b" * 64 in folded
    assert not re.search("listing_sha256|state\\.", html)


def test_every_image_has_an_alternative_text(tmp_path: Path) -> None:
    found = page(tmp_path, results(RUN))
    alternatives = [image.get("alt") or "" for image in found.all("img")]
    assert len(alternatives) == len(set(alternatives)) == 7 and all(alternatives)
    drawings = found.all("svg")
    assert len(drawings) == 4
    for drawing in drawings:
        assert drawing["role"] == "img" and re.search(r"at step 800", drawing["aria-label"] or "")


def test_pairs_of_an_earlier_evaluation_are_not_shown(tmp_path: Path) -> None:
    """Pictures of an earlier one, of other samples or data, may lie there still."""
    found = results([row(200, 6.0, memorisation=None)], straddling=None)
    assert "Nearest training images" not in page(tmp_path / "none", found).text
    held_out = "The held-out real images nearest"
    for straddling, shown in ((None, False), (results([]).straddling, True)):
        found = results([row(200, 6.0)], straddling=straddling)
        drawn = page(tmp_path / str(shown), found)
        assert "Nearest training images" in drawn.text
        alternatives = [image["alt"] for image in drawn.all("img")]
        assert any(str(alt).startswith(held_out) for alt in alternatives) == shown


def test_page_of_75_checkpoints_is_bounded(tmp_path: Path) -> None:
    rows = [row(1000 * (i + 1), 100 / (i + 1)) for i in range(75)]
    rows[40] = row(41_000, 0.5)  # the best is in the middle
    workspace = workspace_of(tmp_path, results(rows), side=600)
    page = render_report(workspace).read_text()
    found = Page(page)
    shown = [image["alt"] for image in found.all("img") if "first samples" in (image["alt"] or "")]
    assert len(shown) <= 25
    for step in (1000, 41_000, 75_000):
        assert f"The first samples of the checkpoint of step {step}" in shown
    assert len(re.findall("webp", page)) > 20
    assert found.text.count("75,000") >= 2


def test_rendering_again_gives_the_same_bytes(tmp_path: Path) -> None:
    workspace = workspace_of(tmp_path, results(RUN))
    first = render_report(workspace).read_bytes()
    assert render_report(workspace).read_bytes() == first


def test_page_without_scores_or_images_is_rendered(tmp_path: Path) -> None:
    workspace = Workspace.open(str(tmp_path))
    with pytest.raises(UserError, match="run `ddpm evaluate` first"):
        render_report(workspace)
    found = results([Unscored.because(200, "no samples")])
    workspace.write_json("evaluation/results.json", found.plain())
    text = Page(render_report(workspace).read_text()).text
    assert "No checkpoint could be scored." in text and "Step 200: no samples" in text


def test_page_with_one_checkpoint_and_one_metric_is_rendered(tmp_path: Path) -> None:
    absent = {"fd": None, "is_mean": None, "precision": None, "recall": None, "density": None}
    one = row(200, 0.3, floor=None, at_floor=None, floor_count=0, memorisation=None)
    absent |= {"score_name": "kid_in_domain_500", "coverage": None, "fd_pixel_pca": None}
    one = one.model_copy(update=absent)
    found = page(tmp_path, results([one], ()))
    assert len(found.all("svg")) == 1 and "Step 200 is the only checkpoint" in found.text


def test_every_plot_is_written_whatever_was_measured() -> None:
    absent = [row(200, 6.0, fd=None, is_mean=None, precision=None, recall=None, kid_mean=None)]
    drawings = [plots.draw(rows) for rows in (RUN, RUN[:1], absent, [])]
    for drawn in drawings:
        assert len(drawn) == 6
        for name, data in drawn.items():
            with Image.open(io.BytesIO(data)) as picture:
                assert picture.format == "PNG" and picture.size == (960, 576), name
    assert plots.draw(list(RUN)) == drawings[0]


def test_kid_without_deviation_has_no_band_but_a_note(tmp_path: Path) -> None:
    rows = [row(200, 30.0, kid_std=None), row(400, 12.0, kid_std=None)]
    name, drawn = "KID_vs_TrainingSteps.png", []
    for some in (rows, [r.model_copy(update={"kid_std": 0.0}) for r in rows]):
        with Image.open(io.BytesIO(plots.draw(some)[name])) as picture:
            drawn.append(np.asarray(picture.convert("L")))
    differing = np.flatnonzero((drawn[0] != drawn[1]).any(0))
    assert len(differing) > 0 and differing.max() < 60  # the caption, and nothing of the curve
    assert "KID with 500 images has no deviation" in " ".join(caveats(results(rows)))
    assert "KID with" not in " ".join(caveats(results(RUN)))
    lines = list(csv.DictReader(io.StringIO(results_csv(rows))))
    assert [line["kid_std"] for line in lines] == ["", ""]
    assert "kid_std_in_domain_500" not in named_metrics(rows[0])


def test_the_first_25_are_the_first_25() -> None:
    rows = [row(100 * (i + 1), 50.0 - i) for i in range(30)]
    name = "FID_vs_TrainingSteps_First25.png"
    drawn = plots.draw(rows)
    assert drawn[name] == plots.draw(rows[:27])[name]
    assert drawn[name] != drawn["FID_vs_TrainingSteps.png"]


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0, 175.2), (-0.003, 0.6), (0, 1e-4), (3, 3), (200, 800), (0, 7e5)]
)
def test_ticks_are_round_few_and_enclose(low: float, high: float) -> None:
    found = ticks(low, high)
    assert found[0] <= low and found[-1] >= high and 2 <= len(found) <= 7
    np.testing.assert_allclose(np.diff(found), found[1] - found[0], rtol=1e-6)


@pytest.mark.parametrize(("low", "high"), [(0.01, 6), (2.7, 134), (1, 20), (1e-5, 1e3)])
def test_logarithmic_ticks_enclose(low: float, high: float) -> None:
    found = log_ticks(low, high)
    assert found[0] <= low and found[-1] >= high and 2 <= len(found) <= 12


def test_chart_keeps_its_lines_inside() -> None:
    lines = [Line("a", [(200, 134.0), (400, 3.0)]), Line("b", [(200, 140.0), (400, 5.0)])]
    references = [Reference("real", 2.0)]
    drawn = chart(Curve("fd", "lower is better", lines, references, mark=(400, 3.0)))
    assert drawn.remark.endswith("logarithmic") and drawn.mark is not None
    for dot in [dot for line in drawn.lines for dot in line.dots]:
        assert drawn.edges["left"] <= dot.x <= drawn.edges["right"]
        assert drawn.edges["top"] <= dot.y <= drawn.edges["bottom"]
    assert drawn.description == "fd: 134 at step 200, 3 at step 400."


@pytest.mark.parametrize(
    ("values", "steps"),
    [
        ((175e3, 81e3), (100_000, 600_000)),
        ((-0.00025, 0.0004), (300, 1800)),
        ((3e-5, 2e6), (1_000, 12_345_000)),
        ((9_990.0, 1.0), (9_500, 9_500)),
    ],
)
def test_axis_labels_fit_into_the_chart(
    values: tuple[float, float], steps: tuple[int, int]
) -> None:
    """In the widest of usual fonts, at the size of a narrow page."""
    font = ImageFont.truetype(findfont("DejaVu Sans"), 14.5)
    drawn = chart(Curve("fd", "", [Line("a", list(zip(steps, values, strict=True)))]))
    for _, text in drawn.y_ticks:
        assert font.getlength(text) <= drawn.edges["left"] - 6, text
    for x, text in drawn.x_ticks:
        assert font.getlength(text) / 2 <= min(x, drawn.width - x), text


def test_large_tick_labels_are_in_thousands() -> None:
    assert tick_labels([0, 2500, 5000]) == ["0", "2,500", "5,000"]
    assert tick_labels([0, 5000, 10_000]) == ["0", "5k", "10k"]
    assert tick_labels([0.1, 100, 2.5e6]) == ["0.1", "100", "2.5M"]
    assert tick_labels([12_345]) == ["12.345k"]


def test_large_images_are_shrunk() -> None:
    images = np.random.default_rng(0).integers(0, 256, (2, 256, 128, 3)).astype(np.uint8)
    assert shrink(images).shape == (2, 96, 48, 3)
    assert shrink(images[:, :16, :16]).shape == (2, 16, 16, 3)
