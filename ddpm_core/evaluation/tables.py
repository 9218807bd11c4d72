"""The tables of an evaluation: two of comma-separated values, and metrics.json for DVC."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

from ddpm_core.evaluation.metrics import metric_name
from ddpm_core.evaluation.rows import MEASURES, named_metrics
from ddpm_core.scores import Row, best, best_inception

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


def flat(ranked: list[Row]) -> dict[str, float]:
    """What metrics.json holds: the numbers of the best checkpoint, which it is, and its floor."""
    row = best(ranked)
    if row is None:
        return {"checkpoints": 0}
    facts = {"checkpoints": len(ranked), "best_step": row["step"], **named_metrics(row)}
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
        collapse = row.get("collapse") or {}
        floor, same = row.get("floor") or {}, row.get("at_floor") or {}
        lines.append(
            {name: row.get(name) for name in ("step", "score_name", "score", *MEASURES)}
            | {name: row.get(name) for name in ("floor_count", "kid_count", "prdc_count")}
            | {"fd_at_floor_count": same.get("fd"), "floor_fd": floor.get("fd")}
            | {f"memorisation_{name}": memory.get(name) for name in _MEMORISATION}
            | {f"collapse_{name}": collapse.get(name) for name in _COLLAPSE}
            | {name: _cell(facts.get(name)) for name in _EVIDENCE}
            | {"problem": row.get("problem")}
        )
    return _csv(lines)


def best_csv(ranked: list[Row]) -> str:
    """best_scores.csv: the best Fréchet distance (or what stands for it) and inception score."""
    lines = []
    if row := best(ranked):
        lines.append(_best_line("lowest distance", row["score_name"], row, row["score"], None))
    if row := best_inception(ranked):
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
