"""Rows of results.json: one a checkpoint, each score with its evidence; and which of them compare.

A checkpoint that could not be scored is a row too, with `problem` in place of scores.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable
from typing import Any

from pydantic import Field

from ddpm_core.evaluation.extractors import Extractor
from ddpm_core.evaluation.metrics import metric_name
from ddpm_core.reading import Count, Shape

Row = dict[str, Any]


class Evidence(Shape):
    """What is read of a row's `evidence`."""

    count: Count
    data: str
    extractor_fingerprint: str
    sampler: dict[str, Any]
    space: str = ""
    seed: int = 0
    extractor_accuracy: float | None = None


class Memorisation(Shape):
    """What is read of a row's `memorisation`."""

    verdict: str
    count: Count = 0
    copies: Count = 0
    share_below: float | None = None
    p_value: float | None = None


class Scored(Shape):
    """A row of a checkpoint that was measured."""

    step: Count
    score_name: str
    score: float
    evidence: Evidence
    memorisation: Memorisation | None = None
    floor: dict[str, float | None] | None = None
    at_floor: dict[str, float | None] | None = None
    floor_count: Count | None = None
    problem: None = None
    key: str | None = None


class Unscored(Shape):
    """A row of a checkpoint that was not."""

    step: Count
    score_name: None = None
    score: None = None
    problem: str


class Extracted(Shape):
    """What is read of results.json's `extractor`."""

    fingerprint: str
    space: str
    accuracy: float | None = None
    task: str = ""


class Rows(Shape):
    """The rows of results.json."""

    rows: list[Scored | Unscored]


class Results(Rows):
    """What is read of results.json."""

    extractor: Extracted
    settings: dict[str, Any] = Field(default_factory=dict)


# Scores compare when these are equal; another sampling seed is noise, not another measurement.
SAME = ("data", "extractor_fingerprint", "sampler", "count")

METRICS = (
    "fd",
    "fd_pixel_pca",
    "kid_mean",
    "kid_std",
    "is_mean",
    "is_std",
    "precision",
    "recall",
    "density",
    "coverage",
)
_EVIDENCE = (
    "count",
    "data",
    "holdout_data",
    "reference_count",
    "extractor",
    "extractor_fingerprint",
    "extractor_accuracy",
    "sampler",
    "seed",
    "weights",
    "samples",
    "train",
)
_MEMORISATION = ("verdict", "share_below", "p_value", "copies", "count")


def problem_row(step: int, problem: str) -> Row:
    """A checkpoint without a score, and why."""
    return {"step": step, "score_name": None, "score": None, "problem": problem}


def evidence(
    samples: dict[str, Any], data: str, holdout: str, reference_count: int, extractor: Extractor
) -> dict[str, Any]:
    """All that a score depends on. `samples` is the manifest of the samples."""
    return {
        "data": data,
        "holdout_data": holdout,
        "reference_count": reference_count,
        "extractor": extractor.name,
        "extractor_fingerprint": extractor.fingerprint,
        "extractor_accuracy": extractor.accuracy,
        "space": extractor.space,
        "count": samples["count"],
        "sampler": samples["sampler"],
        "seed": samples["seed"],
        "weights": samples["weights"],
        "samples": samples["samples_fingerprint"],
        "train": samples["train_fingerprint"],
    }


def differences(a: Row, b: Row) -> list[str]:
    """What differs between two rows so that their scores don't compare: of SAME, or `score`."""
    first, second = a["evidence"], b["evidence"]
    found = [name for name in SAME if first.get(name) != second.get(name)]
    # A name says the features and the number too: where these are equal, it is another score.
    return found or ["score"] * (a["score_name"] != b["score_name"])


def is_scored(row: Row) -> bool:
    return row.get("score") is not None and math.isfinite(row["score"])


def ranked(rows: Iterable[Row]) -> list[Row]:
    """The rows that may stand in one list, by step: the largest set whose scores compare.

    Of equally large sets, the one with more images, then the later one.
    """
    groups: list[list[Row]] = []
    for row in sorted(filter(is_scored, rows), key=lambda row: int(row["step"])):
        for group in groups:
            if not differences(group[0], row):
                group.append(row)
                break
        else:
            groups.append([row])
    return max(groups, key=_weight, default=[])


def _weight(group: list[Row]) -> tuple[int, int, int]:
    return len(group), group[0]["evidence"]["count"], group[-1]["step"]


def best(rows: Iterable[Row]) -> Row | None:
    """The row with the lowest score among those that compare; of equal ones the earliest."""
    return min(ranked(rows), key=lambda row: row["score"], default=None)


def best_inception(rows: Iterable[Row]) -> Row | None:
    """The row with the highest inception score among those that compare."""
    measured = [row for row in ranked(rows) if row.get("is_mean") is not None]
    return max(measured, key=lambda row: row["is_mean"], default=None)


def named_metrics(row: Row) -> dict[str, float]:
    """A row's numbers under names that say feature space and N: for MLflow and DVC."""
    space, count = row["evidence"]["space"], row["evidence"]["count"]
    named = {}
    for metric in METRICS:
        value = row.get(metric)
        if value is not None:
            pixels = metric == "fd_pixel_pca"
            name = metric_name("fd" if pixels else metric, "pixel_pca" if pixels else space, count)
            named[name] = float(value)
    for key in ("share_below", "p_value"):
        value = (row.get("memorisation") or {}).get(key)
        if value is not None:
            named[f"memorisation_{key}"] = float(value)
    return named


def flat(rows: list[Row]) -> dict[str, float]:
    """What metrics.json holds: the numbers of the best checkpoint, which it is, and its floor."""
    row = best(rows)
    if row is None:
        return {"checkpoints": 0}
    facts = {"checkpoints": len(ranked(rows)), "best_step": row["step"], **named_metrics(row)}
    floor = (row.get("floor") or {}).get("fd")
    if floor is not None:
        at_floor = row["at_floor"]["fd"]
        space, count = row["evidence"]["space"], row["floor_count"]
        facts[metric_name("fd", space, count)] = at_floor
        facts["floor_" + metric_name("fd", space, count)] = floor
    accuracy = row["evidence"]["extractor_accuracy"]
    return facts if accuracy is None else {**facts, "extractor_accuracy": accuracy}


def results_csv(rows: list[Row]) -> str:
    """evaluation_results.csv: a line per checkpoint, scored or not, with all its evidence."""
    lines = []
    for row in sorted(rows, key=lambda row: int(row["step"])):
        facts, memory = row.get("evidence") or {}, row.get("memorisation") or {}
        floor, same = row.get("floor") or {}, row.get("at_floor") or {}
        lines.append(
            {name: row.get(name) for name in ("step", "score_name", "score", *METRICS)}
            | {"floor_count": row.get("floor_count")}
            | {"fd_at_floor_count": same.get("fd"), "floor_fd": floor.get("fd")}
            | {f"memorisation_{name}": memory.get(name) for name in _MEMORISATION}
            | {name: _cell(facts.get(name)) for name in _EVIDENCE}
            | {"problem": row.get("problem")}
        )
    return _csv(lines)


def best_csv(rows: list[Row]) -> str:
    """best_scores.csv: the best Fréchet distance (or what stands for it) and inception score."""
    lines = []
    if row := best(rows):
        lines.append(_best_line("lowest distance", row["score_name"], row, row["score"], None))
    if row := best_inception(rows):
        name = metric_name("is", row["evidence"]["space"], row["evidence"]["count"])
        lines.append(_best_line("highest IS", name, row, row["is_mean"], row["is_std"]))
    return _csv(lines) if lines else "best,name,step,value,std,count,extractor\n"


def _best_line(best: str, name: str, row: Row, value: float, std: float | None) -> Row:
    facts = row["evidence"]
    return {
        "best": best,
        "name": name,
        "step": row["step"],
        "value": value,
        "std": std,
        "count": facts["count"],
        "extractor": facts["extractor"],
    }


def _cell(value: Any) -> Any:
    return json.dumps(value, sort_keys=True) if isinstance(value, dict | list) else value


def _csv(lines: list[Row]) -> str:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fieldnames=list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return stream.getvalue()
