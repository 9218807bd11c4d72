"""The files of an evaluation that hold numbers."""

from __future__ import annotations

import csv
import io
import json

from support.results import (
    RUN,
    SAMPLER,
    row,
)

from ddpm_core.evaluation.tables import best_csv, metrics, results_csv
from ddpm_core.scores import (
    Unscored,
    named_metrics,
)


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
