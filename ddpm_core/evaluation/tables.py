"""The files of an evaluation that hold numbers: results.json, two CSV tables and metrics.json."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from ddpm_core.config import Config
from ddpm_core.evaluation import grids, memorisation
from ddpm_core.evaluation.scorer import Scorer
from ddpm_core.evaluation.weights import extractor_name
from ddpm_core.runtime.device import choose_precision
from ddpm_core.scores import (
    MEASURES,
    AnyRow,
    Row,
    best,
    best_inception,
    is_scored,
    metric_name,
    named_metrics,
)
from ddpm_core.storage.workspace import Workspace, snapshot_key
from ddpm_core.text import masked, throughout
from ddpm_core.tracking.validation import measurements

SECTIONS = ("model", "diffusion", "train", "sample", "prepare")  # of the config, in results.json
LISTED = 20  # straddling images in results.json

# Columns of evaluation_results.csv.
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
_COLLAPSE = ("verdict", "repeats", "real_repeats", "count")


def results(
    config: Config, workspace: Workspace, scorer: Scorer, rows: Sequence[AnyRow]
) -> dict[str, Any]:
    """Return the content of results.json except for `sizes`; see `scores.Results`."""
    precision = choose_precision(config.sample.precision, scorer.device)
    sample = config.sample.model_dump(mode="json") | {"precision": precision}
    row = best(rows, sample)
    return {
        "rows": [row.plain() for row in rows],
        "sample": sample,
        "best": row and {key: row[key] for key in ("step", "score_name", "score")},
        "settings": config.record()["evaluate"],
        "data": _data(scorer),
        "extractor": _extractor(scorer, rows),
        "straddling": _straddling(workspace, scorer) if scorer.checks_memorisation else None,
        "run": _run(config, workspace, row),
        "validation": measurements(workspace),
    }


def _extractor(scorer: Scorer, rows: Sequence[AnyRow]) -> dict[str, Any]:
    """Return the facts of the extractor. Without scores only its name, so that none is trained."""
    if not any(map(is_scored, rows)):
        name = extractor_name(scorer.settings)
        return {"name": name, "space": name, "fingerprint": "", "accuracy": None}
    extractor = scorer.extractor
    return {
        **extractor.facts,
        "name": extractor.name,
        "space": extractor.space,
        "fingerprint": extractor.fingerprint,
        "accuracy": extractor.accuracy,
    }


def _data(scorer: Scorer) -> dict[str, Any]:
    train, holdout = scorer.train, scorer.holdout
    return {
        "fingerprint": train.fingerprint,
        "holdout_fingerprint": holdout.fingerprint,
        "count": len(train),
        "holdout_count": len(holdout),
        "classes": train.classes,
        "class_counts": train.class_counts,
        "image_size": train.image_size,
        "channels": train.channels,
        "source": throughout(masked, train.source),
    }


def _straddling(workspace: Workspace, scorer: Scorer) -> dict[str, Any] | None:
    """Return how many held-out images are nearly training images, and write the nearest pairs."""
    images, held = scorer.held_out
    if not len(images):
        return None
    grids.write_neighbours(workspace, "held-out", images, held, scorer.train)
    near = memorisation.straddling(held)
    return {
        "examined": len(images),
        "count": len(near),
        "exact": int((held.distance == 0).sum()),
        "pairs": [
            {"train": int(held.index[i]), "distance": float(held.distance[i])}
            for i in near[:LISTED]
        ],
    }


def _run(config: Config, workspace: Workspace, row: Row | None) -> dict[str, Any]:
    """Return the settings of the best checkpoint's run, otherwise the current ones."""
    saved = workspace.read_json(f"{snapshot_key(row.step)}/config.json") if row else {}
    given = saved.get("params")
    if not isinstance(given, dict):
        given = config.dump()
    chosen = {name: given[name] for name in SECTIONS if name in given} | {"seed": given.get("seed")}
    return dict(throughout(masked, chosen))


def metrics(ranked: Sequence[Row]) -> dict[str, float]:
    """Return the content of metrics.json, for DVC: the best checkpoint's numbers and its floor."""
    row = best(ranked)
    if row is None:
        return {"checkpoints": 0}
    facts = {"checkpoints": len(ranked), "best_step": row.step, **named_metrics(row)}
    if row.floor and row.at_floor and row.floor.fd is not None and row.at_floor.fd is not None:
        name = metric_name("fd", row.evidence.space, row.floor_count or 0)
        facts[name] = row.at_floor.fd
        facts[f"floor_{name}"] = row.floor.fd
    accuracy = row.evidence.extractor_accuracy
    return facts if accuracy is None else {**facts, "extractor_accuracy": accuracy}


def results_csv(rows: Sequence[AnyRow]) -> str:
    """Return evaluation_results.csv: a line per checkpoint, scored or not, with all evidence."""
    lines = []
    for row in sorted(rows, key=lambda row: row.step):
        facts = row.plain()
        evidence, floor = facts.get("evidence") or {}, facts.get("floor") or {}
        memory, collapse = facts.get("memorisation") or {}, facts.get("collapse") or {}
        lines.append(
            {name: facts.get(name) for name in ("step", "score_name", "score", *MEASURES)}
            | {name: facts.get(name) for name in ("floor_count", "kid_count", "prdc_count")}
            | {"fd_at_floor_count": (facts.get("at_floor") or {}).get("fd")}
            | {"floor_fd": floor.get("fd")}
            | {f"memorisation_{name}": memory.get(name) for name in _MEMORISATION}
            | {f"collapse_{name}": collapse.get(name) for name in _COLLAPSE}
            | {name: _cell(evidence.get(name)) for name in _EVIDENCE}
            | {"problem": row.problem}
        )
    return _csv(lines)


def best_csv(ranked: Sequence[Row]) -> str:
    """Return best_scores.csv: the checkpoints with the best distance and inception score."""
    lines = []
    if row := best(ranked):
        lines.append(_best_line("lowest distance", row.score_name, row, row.score, None))
    if row := best_inception(ranked):
        name = metric_name("is", row.evidence.space, row.evidence.count)
        lines.append(_best_line("highest IS", name, row, row.is_mean, row.is_std))
    return _csv(lines) if lines else "best,name,step,value,std,count,extractor\n"


def _best_line(
    best: str, name: str, row: Row, value: float | None, std: float | None
) -> dict[str, Any]:
    return {
        "best": best,
        "name": name,
        "step": row.step,
        "value": value,
        "std": std,
        "count": row.evidence.count,
        "extractor": row.evidence.extractor,
    }


def _cell(value: Any) -> Any:
    return json.dumps(value, sort_keys=True) if isinstance(value, dict | list) else value


def _csv(lines: list[dict[str, Any]]) -> str:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fieldnames=list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return stream.getvalue()
