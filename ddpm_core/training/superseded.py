"""Runs with other settings than the present ones: moved to superseded/, and taken back.

A run lies in superseded/NNN with its snapshots, its log, and its run.json, which says what run it
is. A folder there without run.json holds single snapshots that were discarded: it is never taken
back.

Both ways can be cut short at any moment. run.json is written to superseded/NNN before anything is
moved there and removed last of all; in the workspace itself it names the owner of the log. So the
next start finds both halves of a run: one with the same settings joins them, and one with other
settings moves the rest to the same folder.
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
from ddpm_core.training.freshness import Identified
from ddpm_core.training.identity import differences


@dataclass(frozen=True)
class Others:
    """What a workspace holds of a run with other settings or data."""

    identity: dict[str, Any]  # the settings of that run
    steps: list[int]  # its snapshots
    fields: list[str]  # what differs

    def listed(self) -> str:
        return "\n".join(f"  {field}" for field in self.fields)


def find_others(workspace: Workspace, wanted: dict[str, Any]) -> Others | None:
    """Return what was made with other settings than `wanted`, an identity; None: nothing.

    A run that ended before its first snapshot has left a log; run.json says of which settings.
    """
    found: dict[int, tuple[dict[str, Any], list[str]]] = {}
    for at in workspace.steps(SNAPSHOTS):
        theirs = _identity(workspace, f"{snapshot_key(at)}/{SETTINGS}")
        if theirs is not None and (fields := differences(theirs, wanted)):
            found[at] = theirs, fields
    if found:
        theirs, fields = found[max(found)]
        return Others(theirs, list(found), fields)
    begun = _identity(workspace, RUN)
    if begun is not None and workspace.storage.exists(LOG):
        fields = differences(begun, wanted)
        return Others(begun, [], fields) if fields else None
    return None


def set_aside(workspace: Workspace, found: Others) -> None:
    """Move a run to superseded/, and print what differs."""
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
    """Return the key of the superseded run with these settings, the newest one; None: none."""
    for name in sorted(_numbers(workspace), reverse=True):
        place = f"{SUPERSEDED}/{name:03d}"
        identity = _identity(workspace, f"{place}/{RUN}")
        if identity is not None and not differences(identity, wanted):
            return place
    return None


def take_back(workspace: Workspace, place: str, wanted: dict[str, Any]) -> None:
    """Move a superseded run into the workspace, which holds no snapshot of other settings.

    Snapshots that are there already, after a move that was cut short, stay as they are.
    """
    begun = _identity(workspace, RUN)
    if begun is None or differences(begun, wanted):
        workspace.write_json(RUN, workspace.read_json(f"{place}/{RUN}"))
    there = workspace.steps(SNAPSHOTS)
    for step in workspace.steps(f"{place}/{SNAPSHOTS}"):
        key = f"{place}/{SNAPSHOTS}/{step_name(step)}"
        theirs = _identity(workspace, f"{key}/{SETTINGS}")
        if step not in there and theirs is not None and not differences(theirs, wanted):
            workspace.storage.move(key, snapshot_key(step))
    if workspace.storage.exists(f"{place}/{LOG}"):  # in S3, maybe with some of its parts here
        workspace.storage.move(f"{place}/{LOG}", LOG)
    workspace.storage.remove(f"{place}/{RUN}")
    if not workspace.storage.names(f"{place}/{SNAPSHOTS}"):
        workspace.storage.remove(place)
    say(f"train: took back the run with these settings from {place}.")


def discard(workspace: Workspace, steps: list[int]) -> str:
    """Move single snapshots to a new folder of superseded/; its key."""
    place = _new_place(workspace)
    for step in steps:
        _move_snapshot(workspace, step, place)
    return place


def _identity(workspace: Workspace, key: str) -> dict[str, Any] | None:
    """The settings that a JSON file names as those of a run; None where it names none."""
    found: dict[str, Any] | None = workspace.read_json(key, Identified).get("identity")
    return found


def _numbers(workspace: Workspace) -> list[int]:
    return [int(name) for name in workspace.storage.names(SUPERSEDED) if name.isdecimal()]


def _new_place(workspace: Workspace) -> str:
    return f"{SUPERSEDED}/{1 + max(_numbers(workspace), default=0):03d}"


def _move_snapshot(workspace: Workspace, step: int, place: str) -> None:
    workspace.storage.move(snapshot_key(step), f"{place}/{SNAPSHOTS}/{step_name(step)}")
