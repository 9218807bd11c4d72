"""What a run leaves as it goes: its log, its snapshots, and MLflow's copy of both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ddpm_core.config import Config
from ddpm_core.console import warn
from ddpm_core.errors import Interrupted
from ddpm_core.storage import Mirror
from ddpm_core.storage.lease import Lease
from ddpm_core.storage.workspace import GRID, LOG, Workspace, snapshot_key, step_name
from ddpm_core.tracking.tracker import Tracker
from ddpm_core.training import snapshot
from ddpm_core.training.log import RunLog
from ddpm_core.training.pruning import prune


@contextmanager
def keeping_records(
    config: Config,
    workspace: Workspace,
    lease: Lease | None,
    settings: dict[str, Any],
    begun: int,
) -> Iterator[tuple[RunLog, snapshot.Writer]]:
    """The log, the writer of snapshots, and on the first worker MLflow, which follows both.

    `begun` is the step of the snapshot that the run resumes from; 0: none.
    """
    log = RunLog(workspace.storage.scratch() / LOG)
    mirror = tracker = None
    if lease:
        mirror = workspace.storage.mirror(LOG, lease.fence)
        log = RunLog(mirror.path)
        log.recover(config.train.steps)
        mirror.start()
        identity = settings["train_fingerprint"]
        tracker = Tracker.open(config, workspace, identity, log=log.path)
        tracker.params(config.record())

    def may_write() -> None:
        """The rows of the log come first: a run that resumes does not make them again."""
        if lease and mirror:
            lease.check(patient=True)
            log.flush()
            mirror.push()

    def written(step: int) -> None:
        tidy(config, workspace)
        grid = workspace.path(f"{snapshot_key(step)}/{GRID}")
        if tracker and grid.exists():
            tracker.artifact(grid, f"training/{step_name(step)}")

    writer = snapshot.Writer(workspace, may_write, written, begun or None)
    status = "FAILED"
    try:
        yield log, writer
        status = "FINISHED"
    except Interrupted:
        status = "KILLED"
        raise
    finally:
        writer.close()
        if mirror:
            end(log, mirror)
        if tracker:
            tracker.close(status=status)


def end(log: RunLog, mirror: Mirror) -> None:
    """What the last snapshot stands on was written before it: a failure here loses nothing."""
    for action in (log.flush, mirror.close):
        try:
            action()
        except OSError as error:
            warn(f"The last rows of the log could not be stored: {error.strerror}.")


def tidy(config: Config, workspace: Workspace) -> None:
    prune(workspace, config.train)
