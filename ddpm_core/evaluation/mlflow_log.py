"""What MLflow is told of an evaluation; and of the training before it, where it knows nothing."""

from __future__ import annotations

from ddpm_core.config import Config
from ddpm_core.evaluation.rows import named_metrics
from ddpm_core.ranking import Row, Rows, is_scored
from ddpm_core.tracking import Tracker
from ddpm_core.workspace import EVALUATION, RESULTS, Workspace

FILES = ("report.html", "evaluation_results.csv", "results.json")


def open_tracker(config: Config, workspace: Workspace, row: Row) -> Tracker:
    """MLflow's run of the training that the checkpoint of a scored row is of.

    Where another server is told, or the run was deleted, a new one gets settings, scores and report
    too, which were told to the old one.
    """

    def record(tracker: Tracker) -> None:
        tracker.params(workspace.read_json(RESULTS).get("run") or {})
        tell(tracker, workspace)

    return Tracker.open(config, workspace, str(row["evidence"]["train"]), record)


def tell(tracker: Tracker, workspace: Workspace) -> None:
    """Each score at the step of its checkpoint, once, and the report."""
    rows = workspace.read_json(RESULTS, Rows).get("rows", [])
    for row in sorted(filter(is_scored, rows), key=lambda row: int(row["step"])):
        tracker.metrics(int(row["step"]), named_metrics(row))
    for name in FILES:
        tracker.artifact(workspace.path(f"{EVALUATION}/{name}"), EVALUATION)
