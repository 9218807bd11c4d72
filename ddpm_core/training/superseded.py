"""Move a run with different settings to superseded/, and take it back later.

superseded/NNN contains a run's snapshots, its log, and its run.json, which holds its settings. A
folder without run.json contains single snapshots that were discarded; it is never taken back.

A move may be interrupted at any moment, so run.json is the first file that is written to
superseded/NNN and the last one that is removed from there. In the workspace, run.json names the run
that the log belongs to. So the next start finds both parts of a run that was being moved. If it has
the settings of that run, it moves all parts to the workspace, otherwise to superseded/NNN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddpm_core.checkpoint import SETTINGS
from ddpm_core.console import say, warn
from ddpm_core.storage.workspace import (
    LOG,
    RUN,
    SNAPSHOTS,
    SUPERSEDED,
    Workspace,
    snapshot_key,
    step_name,
)
from ddpm_core.training.identity import Identified, differences


@dataclass(frozen=True)
class OtherRun:
    """A run in the workspace with different settings or data."""

    identity: dict[str, Any]  # its settings
    steps: list[int]  # of its snapshots
    fields: list[str]  # how its settings differ, one line each

    def listed(self) -> str:
        """Return the differences as indented lines."""
        return "\n".join(f"  {field}" for field in self.fields)


def find_other_run(workspace: Workspace, wanted: dict[str, Any]) -> OtherRun | None:
    """Return the run in the workspace whose identity is not `wanted`; None if there is none.

    A run that ended before its first snapshot has only a log, and its settings in run.json.
    """
    found: dict[int, tuple[dict[str, Any], list[str]]] = {}
    for at in workspace.steps(SNAPSHOTS):
        identity = _identity(workspace, f"{snapshot_key(at)}/{SETTINGS}")
        if identity is not None and (fields := differences(identity, wanted)):
            found[at] = identity, fields
    if found:
        identity, fields = found[max(found)]
        return OtherRun(identity, list(found), fields)
    begun = _identity(workspace, RUN)
    if begun is not None and workspace.storage.exists(LOG):
        fields = differences(begun, wanted)
        return OtherRun(begun, [], fields) if fields else None
    return None


def supersede(workspace: Workspace, found: OtherRun) -> None:
    """Move a run to superseded/, and print how its settings differ."""
    place = find_superseded(workspace, found.identity) or _new_place(workspace)
    run = workspace.read_json(RUN)
    workspace.write_json(f"{place}/{RUN}", {**run, "identity": found.identity})
    for step in found.steps:
        _move_snapshot(workspace, step, place)
    if workspace.storage.exists(LOG):
        workspace.storage.move(LOG, f"{place}/{LOG}")
    workspace.storage.remove(RUN)
    warn(
        f"This workspace contained a run with different settings. Moved it to {place}; `ddpm "
        f"train` with its settings takes it back. What differs:\n{found.listed()}"
    )


def find_superseded(workspace: Workspace, wanted: dict[str, Any]) -> str | None:
    """Return the key of the newest superseded run with these settings; None if there is none."""
    for name in sorted(_numbers(workspace), reverse=True):
        place = f"{SUPERSEDED}/{name:03d}"
        identity = _identity(workspace, f"{place}/{RUN}")
        if identity is not None and not differences(identity, wanted):
            return place
    return None


def take_back(workspace: Workspace, place: str, wanted: dict[str, Any]) -> None:
    """Move a superseded run into the workspace, which has no snapshot with other settings.

    Snapshots that an interrupted move has left in the workspace stay there.
    """
    begun = _identity(workspace, RUN)
    if begun is None or differences(begun, wanted):
        workspace.write_json(RUN, workspace.read_json(f"{place}/{RUN}"))
    present = workspace.steps(SNAPSHOTS)
    for step in workspace.steps(f"{place}/{SNAPSHOTS}"):
        key = f"{place}/{SNAPSHOTS}/{step_name(step)}"
        identity = _identity(workspace, f"{key}/{SETTINGS}")
        if step not in present and identity is not None and not differences(identity, wanted):
            workspace.storage.move(key, snapshot_key(step))
    if workspace.storage.exists(f"{place}/{LOG}"):  # on S3 some of its parts may be moved already
        workspace.storage.move(f"{place}/{LOG}", LOG)
    workspace.storage.remove(f"{place}/{RUN}")
    if not workspace.storage.names(f"{place}/{SNAPSHOTS}"):
        workspace.storage.remove(place)
    say(f"train: took back the run with these settings from {place}.")


def discard(workspace: Workspace, steps: list[int]) -> str:
    """Move single snapshots to a new folder in superseded/, and return its key."""
    place = _new_place(workspace)
    for step in steps:
        _move_snapshot(workspace, step, place)
    return place


def _identity(workspace: Workspace, key: str) -> dict[str, Any] | None:
    """Return the identity of a run from its JSON file; None if the file has none."""
    found = workspace.read_model(key, Identified)
    return found.identity if found else None


def _numbers(workspace: Workspace) -> list[int]:
    return [int(name) for name in workspace.storage.names(SUPERSEDED) if name.isdecimal()]


def _new_place(workspace: Workspace) -> str:
    return f"{SUPERSEDED}/{1 + max(_numbers(workspace), default=0):03d}"


def _move_snapshot(workspace: Workspace, step: int, place: str) -> None:
    workspace.storage.move(snapshot_key(step), f"{place}/{SNAPSHOTS}/{step_name(step)}")
