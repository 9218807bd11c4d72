"""The verdict in plain words, and the caveats."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.results import (
    RUN,
    curve,
    memory,
    results,
    row,
)

from ddpm_core.evaluation import verdict
from ddpm_core.evaluation.verdict import caveats
from ddpm_core.scores import Row


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
def test_trend_is_described(rows: list[Row], word: str, sentence: str) -> None:
    trend = verdict.find_verdict(results(rows)).trend
    assert trend is not None and trend.word == word and sentence in trend.detail


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.03])
@pytest.mark.parametrize(("power", "word"), [(-0.5, "likely"), (0.0, "little"), (0.5, "no")])
def test_dense_checkpoints_show_the_trend_of_the_whole_curve(
    noise: float, power: float, word: str
) -> None:
    deviations = np.random.default_rng(0).uniform(-noise, noise, 75)
    scores = [1800 * (i + 1) ** power * (1 + deviations[i]) for i in range(75)]
    trend = verdict.find_verdict(results(curve(*scores, every=1))).trend
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
            "training image (4 of them identical except for noise)",
        ),
        ({"verdict": "unknown", "count": 3}, "unknown", "no held-out images"),
        (None, "unknown", "was not measured"),
    ],
)
def test_memorisation_is_described(facts: Any, level: str, sentence: str) -> None:
    found = verdict.find_verdict(results([row(200, 6.0, memorisation=facts)]))
    assert found.memorisation is not None and found.memorisation.level == level
    assert sentence in found.memorisation.detail
    assert ("copies training images" in found.headline) == (level == "bad")


def test_a_score_at_the_floor_is_called_near() -> None:
    near = verdict.find_verdict(results([row(200, 2.1)])).quality
    assert near is not None and near.summary.startswith("Its samples are about as near")


def test_unmeasured_and_missing_floors_differ_in_words() -> None:
    lacking = {"fd": None, "score_name": "kid_in_domain_500"}
    scores = [
        row(200, 2.1, floor=floor, at_floor=floor, **lacking)
        for floor in ({"fd": None, "kid_mean": 0.1}, None)
    ]
    answers = [verdict.find_verdict(results([score])).quality for score in scores]
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
