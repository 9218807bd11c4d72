"""Which snapshots are kept: the newest, and milestones as weights alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from ddpm_core.checkpoint import SETTINGS
from ddpm_core.config import Train
from ddpm_core.console import warn
from ddpm_core.storage import MANIFEST
from ddpm_core.storage.files import Schema
from ddpm_core.storage.manifest import Manifest
from ddpm_core.storage.workspace import SNAPSHOTS, Workspace, snapshot_key
from ddpm_core.training.snapshot import OPTIMIZER


class MadeTrain(Schema):
    milestone_every: Annotated[int, Field(ge=1)]


class MadeParams(Schema):
    train: MadeTrain


class Made(Schema):
    """What config.json tells of how a snapshot was to be kept."""

    params: MadeParams


def prunable(steps: Iterable[int], train: Train) -> tuple[list[int], list[int]]:
    """Which steps to remove, and which milestones to keep as weights alone.

    The newest `train.keep` stay as they are; older ones stay only as milestones.
    """
    older = sorted(steps)[: -train.keep]
    milestones = [step for step in older if train.is_milestone(step)]
    return [step for step in older if step not in milestones], milestones


def prune(workspace: Workspace, train: Train) -> None:
    """Delete what `prunable` names. A deletion that fails is a warning: training goes on.

    Milestones of an earlier `milestone_every` stay: who gives another one asks for no deletion.
    """
    remove, slim = prunable(workspace.steps(SNAPSHOTS), train)
    for step in sorted([*remove, *slim]):
        try:
            if step in slim or _was_milestone(workspace, step):
                _drop_optimizer(workspace, step)
            else:
                workspace.storage.remove(snapshot_key(step))
        except OSError as error:
            warn(f"Cannot tidy the snapshot of step {step}: {error.strerror}.")


def _was_milestone(workspace: Workspace, step: int) -> bool:
    """By the settings that it was made with, or kept as one since."""
    key = snapshot_key(step)
    files = workspace.read_json(f"{key}/{MANIFEST}", Manifest).get("files", {OPTIMIZER: None})
    made = workspace.read_json(f"{key}/{SETTINGS}", Made)
    milestone = bool(made) and step % made["params"]["train"]["milestone_every"] == 0
    return milestone or OPTIMIZER not in files


def _drop_optimizer(workspace: Workspace, step: int) -> None:
    """Take the optimizer out of a snapshot: first out of its manifest, so that it stays whole."""
    key = snapshot_key(step)
    manifest = workspace.read_json(f"{key}/{MANIFEST}")
    if OPTIMIZER in manifest.get("files", {}):
        del manifest["files"][OPTIMIZER]
        workspace.write_json(f"{key}/{MANIFEST}", manifest)
    workspace.storage.remove(f"{key}/{OPTIMIZER}")
