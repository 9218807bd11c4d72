"""The settings that determine a trained model, and whether training with them is up to date.

Nothing here imports torch, so that a process that waits for training stays small.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from ddpm_core.checkpoint import SETTINGS
from ddpm_core.config import Config
from ddpm_core.config.identity import flat, non_defaults, relevant
from ddpm_core.config.paths import input_path
from ddpm_core.data.dataset import data_fingerprint
from ddpm_core.errors import UserError
from ddpm_core.storage import MANIFEST, sha256_of
from ddpm_core.storage.files import LARGEST_JSON, Schema, read_bytes
from ddpm_core.storage.manifest import parse_manifest
from ddpm_core.storage.workspace import SNAPSHOTS, Workspace, fingerprint, snapshot_key

# Settings of `train` that change speed, memory, checks or what is kept, but never the weights.
_IRRELEVANT = {
    "init_diffusion",
    "microbatches",
    "processes",
    "worker_timeout",
    "restarts",
    "log_every",
    "validate_every",
    "snapshot_every",
    "keep",
    "milestone_every",
    "grid",
}

INITIAL_WEIGHTS = "weights of train.init"
# Recorded tables are identified by their content. Earlier versions used the path.
TABLES = "content of train.timesteps.tables"
_TABLES_PATH = "train.timesteps.tables"
_OPTIONAL = {INITIAL_WEIGHTS, TABLES, _TABLES_PATH}  # compared only if both sides have them


def identity(config: Config, data_fingerprint: str) -> dict[str, Any]:
    """Return everything that a model depends on, by dotted name of the setting."""
    settings = relevant(_settings(config))
    contents = {**_initial_weights(config), **_tables(config)}
    return {"seed": config.seed, "data": data_fingerprint, **settings, **contents}


def train_fingerprint(config: Config, data_fingerprint: str) -> str:
    """Return a hash of the identity without the content of files.

    It does not change when the folder of train.init, or the file of recorded tables, is removed.
    """
    settings = identity(config, data_fingerprint)
    kept = {name: value for name, value in settings.items() if name not in _OPTIONAL}
    return fingerprint(non_defaults(kept, _defaults()))


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return `name: old -> new` for each setting in which two identities differ.

    A missing setting has its default. The settings of a method that only one side uses are left
    out, since the method itself is listed.
    """
    before, after = (relevant({**_defaults(), **side}) for side in (old, new))
    only_if_both = {*_defaults(), *_OPTIONAL}
    return [
        f"{name}: {before.get(name)} -> {after.get(name)}"
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
        and (name not in only_if_both or (name in before and name in after))
    ]


def _settings(config: Config) -> dict[str, Any]:
    """Return the settings of a network and its training, by dotted name."""
    given = config.dump()
    train = {name: value for name, value in given["train"].items() if name not in _IRRELEVANT}
    settings = flat({"model": given["model"], "diffusion": given["diffusion"], "train": train})
    settings.pop(_TABLES_PATH)
    return settings


@cache
def _defaults() -> dict[str, Any]:
    return _settings(Config())


def _initial_weights(config: Config) -> dict[str, str]:
    """Return a hash of the weights of train.init if that is a folder with a manifest, else {}.

    It is compared only if both sides have it, so that the folder may be removed after training.
    """
    if config.train.init is None or config.train.init.startswith("models:/"):
        return {}
    try:
        folder = input_path(config.train.init)
        data = read_bytes(folder / MANIFEST, MANIFEST, LARGEST_JSON)
        files = parse_manifest(data, folder.name).files
    except (OSError, RuntimeError, UserError):
        return {}
    weights = {n: file.sha256 for n, file in files.items() if n.startswith(("model.", "ema-"))}
    return {INITIAL_WEIGHTS: fingerprint(weights)}


def _tables(config: Config) -> dict[str, str]:
    """Return a hash of the recorded tables that `replay` follows; {} without it.

    It is compared only if both sides have it, so that the file may be removed after training.
    """
    timesteps = config.train.timesteps
    if timesteps.adaptive != "replay" or timesteps.tables is None:
        return {}
    try:
        return {TABLES: sha256_of(input_path(timesteps.tables))}
    except (OSError, RuntimeError):  # RuntimeError: ~ of a user without a home
        return {}


class Identified(Schema):
    """The part of config.json and run.json that names the run they belong to."""

    identity: dict[str, Any]


def stale(config: Config, workspace: Workspace) -> str | None:
    """Return why `ddpm train` has work to do; None if it is up to date."""
    data = data_fingerprint(workspace)
    steps = workspace.steps(SNAPSHOTS)
    if not steps:
        return "nothing is trained yet"
    newest = f"{snapshot_key(steps[-1])}/{SETTINGS}"
    found = workspace.read_model(newest, Identified)
    if found is None:
        return f"the snapshot of step {steps[-1]} is damaged"
    if damage := workspace.damage(snapshot_key(steps[-1])):
        return damage.rstrip(".")
    if fields := differences(found.identity, identity(config, data)):
        return "settings differ: " + "; ".join(fields)
    if steps[-1] != config.train.steps:
        return f"at step {steps[-1]} of {config.train.steps}"
    return None
