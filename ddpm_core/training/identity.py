"""Which settings make a trained model what it is, and how two sets of them differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ddpm_core.config import Config
from ddpm_core.errors import UserError
from ddpm_core.reading import LARGEST_JSON, read_bytes
from ddpm_core.storage import MANIFEST
from ddpm_core.storage.sealing import listed
from ddpm_core.workspace import fingerprint

# Settings of `train` that change speed, memory or what is kept, never the weights.
_FREE = {
    "microbatches",
    "processes",
    "worker_timeout",
    "restarts",
    "log_every",
    "snapshot_every",
    "keep",
    "milestone_every",
    "steps",
    "grid",
}

INITIAL = "weights of train.init"


def identity(config: Config, data_fingerprint: str) -> dict[str, Any]:
    """The settings that a model depends on, by dotted name."""
    given = config.dump()
    train = {name: value for name, value in given["train"].items() if name not in _FREE}
    if config.train.optimizer.schedule == "cosine":
        train["steps"] = config.train.steps
    parts = {"model": given["model"], "diffusion": given["diffusion"], "train": train}
    return {"seed": config.seed, "data": data_fingerprint, **_flat(parts), **_initial(config)}


def train_fingerprint(config: Config, data_fingerprint: str) -> str:
    """Of the settings alone: it stays when the folder of train.init is gone."""
    settings = identity(config, data_fingerprint)
    settings.pop(INITIAL, None)
    return fingerprint(settings)


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """`name: old -> new` for every setting that is not the same."""
    return [
        f"{name}: {old.get(name)} -> {new.get(name)}"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name) and (name != INITIAL or (name in old and name in new))
    ]


def _initial(config: Config) -> dict[str, str]:
    """A fingerprint of the weights of train.init, where that is a folder whose manifest tells.

    It is compared where both sides know it: who has trained may remove what training began with.
    """
    if config.train.init is None or config.train.init.startswith("models:/"):
        return {}
    try:
        folder = Path(config.train.init).expanduser()
        files = listed(read_bytes(folder / MANIFEST, MANIFEST, LARGEST_JSON), folder.name)
    except (OSError, RuntimeError, UserError):
        return {}
    weights = {n: sum_ for n, (_, sum_) in files.items() if n.startswith(("model.", "ema-"))}
    return {INITIAL: fingerprint(weights)}


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, item in value.items():
        flat |= _flat(item, f"{prefix}{name}.") if isinstance(item, dict) else {prefix + name: item}
    return flat
