"""What a training has left in its workspace, for the one who started it."""

from __future__ import annotations

from dataclasses import dataclass

from ddpm_core.errors import UserError
from ddpm_core.storage.workspace import LOG, SNAPSHOTS, Workspace
from ddpm_core.training.log import read_rows


@dataclass(frozen=True)
class Outcome:
    """The facts of a finished job. Of a workspace that can't be seen from here `step` is None.

    `worlds` are the numbers of processes that made the rows of the log, in order.
    """

    job: str
    seconds: float
    step: int | None = None
    snapshots: tuple[int, ...] = ()
    worlds: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.step is None:
            return f"The job {self.job} succeeded after {self.seconds:.0f} s."
        return (
            f"The job {self.job} succeeded after {self.seconds:.0f} s, at step {self.step}, by "
            f"{', then '.join(str(world) for world in self.worlds)} processes; snapshots of "
            f"{', '.join(str(step) for step in self.snapshots)}."
        )


def outcome(job: str, seconds: float, uri: str) -> Outcome:
    """Read the workspace, if it can be read here: a job that succeeded has succeeded."""
    try:
        workspace = Workspace.open(uri)
        snapshots = workspace.steps(SNAPSHOTS)
        rows = list(read_rows(workspace.path(LOG))) if snapshots else []
    except (UserError, OSError):
        return Outcome(job, seconds)
    if not snapshots:
        return Outcome(job, seconds)
    worlds: list[int] = []
    for row in rows:
        size = row.get("world_size")
        if isinstance(size, int) and worlds[-1:] != [size]:
            worlds.append(size)
    return Outcome(job, seconds, snapshots[-1], tuple(snapshots), tuple(worlds))
