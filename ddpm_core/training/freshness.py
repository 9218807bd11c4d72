"""Whether training is done with these settings; reads files, imports no torch."""

from __future__ import annotations

from typing import Any

from ddpm_core.checkpoint import SETTINGS
from ddpm_core.config import Config
from ddpm_core.data.dataset import data_fingerprint
from ddpm_core.storage.files import Schema
from ddpm_core.storage.workspace import SNAPSHOTS, Workspace, snapshot_key
from ddpm_core.training.identity import differences, identity


class Identified(Schema):
    """Settings with what makes a model what it is."""

    identity: dict[str, Any]


def stale(config: Config, workspace: Workspace) -> str | None:
    """Why `train` has work to do; None where it is up to date."""
    data = data_fingerprint(workspace)
    steps = workspace.steps(SNAPSHOTS)
    if not steps:
        return "nothing is trained yet"
    newest = f"{snapshot_key(steps[-1])}/{SETTINGS}"
    found = workspace.read_json(newest, Identified).get("identity")
    if found is None:
        return f"the snapshot of step {steps[-1]} is damaged"
    if damage := workspace.damage(snapshot_key(steps[-1])):
        return damage.rstrip(".")
    if fields := differences(found, identity(config, data)):
        return "settings differ: " + "; ".join(fields)
    if steps[-1] != config.train.steps:
        return f"at step {steps[-1]} of {config.train.steps}"
    return None
