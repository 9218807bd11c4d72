"""What an evaluation leaves behind: results.json, tables, metrics.json, plots and the report."""

from __future__ import annotations

from typing import Any

from ddpm_core.config import Config
from ddpm_core.evaluation import memorisation, pictures, plots
from ddpm_core.evaluation.features import chosen
from ddpm_core.evaluation.freshness import OUTPUTS
from ddpm_core.evaluation.report import render_report
from ddpm_core.evaluation.scorer import Scorer
from ddpm_core.evaluation.tables import best_csv, flat, results_csv
from ddpm_core.masking import masked, throughout
from ddpm_core.runtime.precision import choose
from ddpm_core.scores import Row, best, is_scored, ranked
from ddpm_core.storage.workspace import EVALUATION, METRICS, RESULTS, TABLE, Workspace, snapshot_key

SECTIONS = ("model", "diffusion", "train", "sample", "prepare")
LISTED = 20  # straddling images that are named


def write_outputs(
    config: Config, workspace: Workspace, scorer: Scorer, rows: list[Row]
) -> Row | None:
    """All files, from rows that are measured, the report last; the best row."""
    pictures.write_real(workspace, scorer.train)
    results = _results(config, workspace, scorer, rows)
    listed = ranked(rows, results["sample"])
    workspace.write_json(RESULTS, results)
    workspace.storage.write(TABLE, results_csv(rows).encode())
    workspace.storage.write(f"{EVALUATION}/best_scores.csv", best_csv(listed).encode())
    workspace.write_json(METRICS, flat(listed))
    for name, picture in plots.draw(listed).items():
        workspace.storage.write(f"{EVALUATION}/{name}", picture)
    render_report(workspace)
    # Last: results without sizes are of an evaluation that did not end.
    sizes = {name: workspace.storage.size(name) for name in OUTPUTS}
    workspace.write_json(RESULTS, {**results, "sizes": sizes})
    return best(listed)


def _results(config: Config, workspace: Workspace, scorer: Scorer, rows: list[Row]) -> Row:
    """All that the report needs, and what others read of an evaluation."""
    precision = choose(config.sample.precision, scorer.device)
    sample = config.sample.model_dump(mode="json") | {"precision": precision}
    row = best(rows, sample)
    return {
        "rows": rows,
        "sample": sample,
        "best": row and {key: row[key] for key in ("step", "score_name", "score")},
        "settings": config.record()["evaluate"],
        "data": _data(scorer),
        "extractor": _extractor(scorer, rows),
        "straddling": _straddling(workspace, scorer) if scorer.remembers else None,
        "run": _run(config, workspace, row),
    }


def _extractor(scorer: Scorer, rows: list[Row]) -> dict[str, Any]:
    """Return the facts of the extractor; without scores only its name, so that none is trained."""
    if not any(map(is_scored, rows)):
        name = chosen(scorer.settings)
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
    """Held-out images that training nearly has, of those looked at."""
    images, held = scorer.held_out
    if not len(images):
        return None
    pictures.write_neighbours(workspace, "held-out", images, held, scorer.train)
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
    """The settings that made the best checkpoint: its own, where it is still there."""
    saved = workspace.read_json(f"{snapshot_key(row['step'])}/config.json") if row else {}
    given = saved.get("params")
    if not isinstance(given, dict):
        given = config.dump()
    chosen = {name: given[name] for name in SECTIONS if name in given} | {"seed": given.get("seed")}
    return dict(throughout(masked, chosen))
