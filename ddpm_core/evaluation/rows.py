"""What evaluate writes into results.json: a row a checkpoint, each score with its evidence.

A checkpoint that could not be scored is a row too, with `problem` in place of scores.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from ddpm_core.evaluation.features import Extractor
from ddpm_core.evaluation.metrics import metric_name
from ddpm_core.scores import Row, Rows
from ddpm_core.storage.files import Count, Schema


class Extracted(Schema):
    """What is read of results.json's `extractor`."""

    fingerprint: str
    space: str
    accuracy: float | None = None
    task: str = ""


class Results(Rows):
    """What is read of results.json."""

    extractor: Extracted
    settings: dict[str, Any] = Field(default_factory=dict)
    sizes: dict[str, Count | None] = Field(default_factory=dict)  # of the files beside it


MEASURES = (
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


# A metric that looks at the kept features alone has a count of its own, of samples.
_PRDC = ("precision", "recall", "density", "coverage")
COUNTS = {"kid_mean": "kid_count", "kid_std": "kid_count", **dict.fromkeys(_PRDC, "prdc_count")}


def samples_of(row: Row, metric: str) -> int:
    """How many samples a row's metric was measured on."""
    return int(row.get(COUNTS.get(metric, "")) or row["evidence"]["count"])


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


def named_metrics(row: Row) -> dict[str, float]:
    """A row's numbers under names that say feature space and N: for MLflow and DVC."""
    named = {}
    for metric in MEASURES:
        value = row.get(metric)
        if value is not None:
            pixels = metric == "fd_pixel_pca"
            space = "pixel_pca" if pixels else row["evidence"]["space"]
            name = metric_name("fd" if pixels else metric, space, samples_of(row, metric))
            named[name] = float(value)
    for key in ("share_below", "p_value"):
        value = (row.get("memorisation") or {}).get(key)
        if value is not None:
            named[f"memorisation_{key}"] = float(value)
    collapse = row.get("collapse") or {}
    if collapse.get("repeats") is not None:
        named["repeats_share"] = collapse["repeats"] / collapse["count"]
    return named
