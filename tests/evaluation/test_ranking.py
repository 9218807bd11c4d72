"""Which rows can be compared, and which one is the best."""

from __future__ import annotations

from typing import Any

import pytest
from support.results import (
    SAMPLER,
    results,
    row,
    sampled,
)

from ddpm_core.config import Sample
from ddpm_core.evaluation import verdict
from ddpm_core.evaluation.verdict import caveats
from ddpm_core.scores import (
    Rows,
    Unscored,
    best,
    best_inception,
    best_to_sample,
    differences,
    ranked,
)


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
    # Two checkpoints with 1,000 images each, and the latest with 5,000.
    rows = [row(200, 9.0, count=1000), row(400, 8.0, count=1000), row(600, 5.0, count=5000)]
    assert best(rows).step == 400  # type: ignore[union-attr]
    assert best(rows[1:]).step == 600  # type: ignore[union-attr]


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
    # One of three checkpoints is sampled with different settings.
    rows = [row(10, 990.0), row(20, 950.0), row(30, 970.0, **{field: value})]
    assert [r.step for r in ranked(rows, sampled(**settings))] == [30]
    assert [r.step for r in ranked(rows, sampled())] == [10, 20]
    assert [r.step for r in ranked(rows, sampled(count=7))] == [10, 20]  # no row matches
    found = results(rows, sample=sampled(**settings))
    assert (
        verdict.find_verdict(found).headline
        == "Step 30 is not comparable with any other checkpoint."
    )
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
