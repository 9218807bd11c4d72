"""What MLflow is told of an evaluation; and of the training before it, where it knows nothing."""

from __future__ import annotations

from typing import Any

from ddpm_core.config import Config
from ddpm_core.evaluation.rows import named_metrics
from ddpm_core.scores import SAME, Row, Rows, is_scored, ranked
from ddpm_core.storage.workspace import EVALUATION, RESULTS, Workspace
from ddpm_core.tracking.tracker import Tracker

FILES = ("report.html", "evaluation_results.csv", "results.json")


def open_tracker(config: Config, workspace: Workspace, row: Row, quiet: bool = False) -> Tracker:
    """MLflow's run of the training that the checkpoint of a scored row is of.

    Where another server is told, or the run was deleted, a new one gets settings, scores and report
    too, which were told to the old one.
    """

    def record(tracker: Tracker) -> None:
        tracker.params(workspace.read_json(RESULTS).get("run") or {})
        tell(tracker, workspace)

    identity = str(row["evidence"]["train"])
    return Tracker.open(config, workspace, identity, record, quiet=quiet)


def tell(tracker: Tracker, workspace: Workspace) -> None:
    """Each score at the step of its checkpoint, once, and the report, beside those it ranks."""
    results = workspace.read_json(RESULTS, Rows)
    rows = results.get("rows", [])
    for row in sorted(filter(is_scored, rows), key=lambda row: int(row["step"])):
        tracker.scores(_evidence(row), int(row["step"]), named_metrics(row))
    for row in ranked(rows, results.get("sample", {}))[-1:]:
        for name in FILES:
            tracker.report(workspace.path(f"{EVALUATION}/{name}"), EVALUATION, _evidence(row))


def _evidence(row: Row) -> dict[str, Any]:
    """What the scores of one curve have in common."""
    return {name: row["evidence"].get(name) for name in (*SAME, "seed")}
