"""Which rows of results.json compare, in what order, and the best of them; imports no torch.

A row is a checkpoint's: its score and what that depends on, or a `problem` in their place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import Field

from ddpm_core.config import Sample
from ddpm_core.config.results import as_sampled
from ddpm_core.errors import UserError
from ddpm_core.storage.files import Count, Schema
from ddpm_core.storage.workspace import fingerprint

Row = dict[str, Any]


# Scores compare when these are equal; another sampling seed is noise, not another measurement.
SAME = ("data", "extractor_fingerprint", "sampler", "count")

NOTHING: Mapping[str, Any] = {}  # no settings to rank by


class Evidence(Schema):
    """What is read of a row's `evidence`."""

    count: Count
    data: str
    extractor_fingerprint: str
    sampler: dict[str, Any]
    space: str = ""
    seed: int = 0
    extractor_accuracy: float | None = None


class Memorisation(Schema):
    """What is read of a row's `memorisation`."""

    verdict: str
    count: Count = 0
    copies: Count = 0
    share_below: float | None = None
    expected_below: float | None = None
    p_value: float | None = None


class Collapse(Schema):
    """What is read of a row's `collapse`."""

    verdict: str
    count: Count = 0
    exact: Count = 0
    repeats: Count = 0
    real_repeats: Count = 0


class Scored(Schema):
    """A row of a checkpoint that was measured."""

    step: Count
    score_name: str
    score: float
    evidence: Evidence
    memorisation: Memorisation | None = None
    collapse: Collapse | None = None
    floor: dict[str, float | None] | None = None
    at_floor: dict[str, float | None] | None = None
    floor_count: Count | None = None
    kid_count: Count | None = None
    prdc_count: Count | None = None
    problem: None = None
    key: str | None = None
    checksum: str | None = None


class Unscored(Schema):
    """A row of a checkpoint that was not."""

    step: Count
    score_name: None = None
    score: None = None
    problem: str


class Rows(Schema):
    """The rows of results.json, and the settings of `sample` that they were ranked for."""

    rows: list[Scored | Unscored]
    sample: dict[str, Any] = Field(default_factory=dict)


def differences(a: Row, b: Row) -> list[str]:
    """What differs between two rows so that their scores don't compare: of SAME, or `score`."""
    first, second = a["evidence"], b["evidence"]
    found = [name for name in SAME if _meant(first, name) != _meant(second, name)]
    # A name says the features and the number too: where these are equal, it is another score.
    return found or ["score"] * (a["score_name"] != b["score_name"])


def _meant(evidence: Mapping[str, Any], name: str) -> Any:
    """A part of SAME; a sampler's settings as they would be told today."""
    value = evidence.get(name)
    return as_sampled(value) if name == "sampler" and isinstance(value, dict) else value


def is_scored(row: Row) -> bool:
    return row.get("score") is not None and math.isfinite(row["score"])


def with_checksum(row: Row) -> Row:
    """A row with the checksum of its content."""
    content = {name: value for name, value in row.items() if name != "checksum"}
    return {**content, "checksum": fingerprint(content)}


def is_as_measured(row: Row) -> bool:
    """Whether a row is as evaluate has written it: changed by nobody, and not damaged."""
    return bool(with_checksum(row)["checksum"] == row.get("checksum"))


def must_be_as_measured(rows: Iterable[Row]) -> None:
    """Raise UserError for the first row with a score that is not as evaluate has written it."""
    for row in filter(is_scored, rows):
        if not is_as_measured(row):
            raise UserError(
                f"The score of step {row['step']} was changed or damaged since it was measured, or "
                "is of an older version: run `ddpm evaluate`."
            )


def wanted(settings: Sample, results: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `sample` to rank by; `precision: auto` is what it was for these results."""
    given = settings.model_dump(mode="json")
    if given["precision"] == "auto":
        given["precision"] = results.get("sample", {}).get("precision", "auto")
    return given


def ranked(rows: Iterable[Row], sample: Mapping[str, Any] = NOTHING) -> list[Row]:
    """The rows that may stand in one list, by step: a set whose scores compare.

    It is the set that was sampled by the settings `sample`; the largest set where none was, or
    without settings. So images of another number or by another sampler, drawn of one checkpoint,
    don't leave a list to the others in which it lacks. Of equally large sets it is the one with
    more images, then the later one.
    """
    groups: list[list[Row]] = []
    for row in sorted(filter(is_scored, rows), key=lambda row: int(row["step"])):
        for group in groups:
            if not differences(group[0], row):
                group.append(row)
                break
        else:
            groups.append([row])
    return max(groups, key=lambda group: _weight(group, sample), default=[])


def _weight(group: list[Row], sample: Mapping[str, Any]) -> tuple[tuple[bool, bool], int, int, int]:
    size, count = len(group), group[0]["evidence"]["count"]
    return _fit(group[0], sample), size, count, group[-1]["step"]


def _fit(row: Row, sample: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether a row was sampled by these settings but for precision and seed; and precision too."""
    facts = row["evidence"]
    differing = {k for k, v in facts["sampler"].items() if k in sample and sample[k] != v}
    fits = facts["count"] == sample.get("count") and differing <= {"precision"}
    return fits, fits and not differing


def best(rows: Iterable[Row], sample: Mapping[str, Any] = NOTHING) -> Row | None:
    """The row with the lowest score among those that compare; of equal ones the earliest."""
    return min(ranked(rows, sample), key=lambda row: row["score"], default=None)


def best_to_sample(results: Mapping[str, Any], settings: Sample) -> Row | None:
    """The row of the checkpoint that `sample.checkpoints: best` means, of results.json.

    What was sampled by these very settings, seed and all, goes first: once the best checkpoint
    has been, it stays the one that is meant, whatever its new score.
    """
    sample = wanted(settings, results)
    listed = ranked(results.get("rows", []), sample)
    same = [row for row in listed if all(_fit(row, sample))]
    same = [row for row in same if row["evidence"].get("seed") == sample["seed"]]
    return best(same or listed)


def best_inception(rows: Iterable[Row]) -> Row | None:
    """The row with the highest inception score among those that compare."""
    measured = [row for row in ranked(rows) if row.get("is_mean") is not None]
    return max(measured, key=lambda row: row["is_mean"], default=None)
