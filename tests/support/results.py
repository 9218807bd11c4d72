"""Rows and results of an evaluation, made up for tests of the ranking and the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ddpm_core.config import Sample
from ddpm_core.sampling.images import png
from ddpm_core.scores import (
    AnyRow,
    Results,
    Row,
)
from ddpm_core.storage.workspace import PICTURES, Workspace

SAMPLER = {"sampler": "dpmpp", "steps": 20, "precision": "fp32"}


HOSTILE = (
    '"><script>alert(1)</script>',
    "{{ 7 * 7 }}{% raw %}",
    "</style><img src=http://example.org/x.png onerror=alert(1)>",
    "smørrebrød 🥪 ' ` \\ \n\t",
    "red \x1b[31m and back \u202e to front",
)


def row(step: int, score: float, **changes: Any) -> Row:
    """Return a scored row; `changes` replace its fields, or those of its evidence."""
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
    """Return a workspace with results, and noise for each image of the report."""
    workspace = Workspace.open(str(root))
    workspace.write_json("evaluation/results.json", found.plain())
    image = png(np.random.default_rng(0).integers(0, 256, (side, side, 1)).astype(np.uint8))
    names = [f"{kind}-{r.step:08d}" for r in found.rows for kind in ("grid", "neighbours")]
    for name in [*names, "real", "neighbours-held-out"]:
        workspace.storage.write(f"{PICTURES}/{name}.png", image)
    return workspace


def curve(*scores: float, first: int = 200, every: int = 200) -> list[Row]:
    """Return rows with these scores, one for `every` so many steps."""
    return [row(first + every * i, score) for i, score in enumerate(scores)]


def sampled(**settings: Any) -> dict[str, Any]:
    """Return settings of `sample` as in results.json; by default those of `row`."""
    given = {"count": 500, "precision": "fp32", **settings}
    return Sample.model_validate(given).model_dump(mode="json")


RUN = [row(200, 30.0), row(400, 12.0), row(600, 9.0), row(800, 6.0)]
