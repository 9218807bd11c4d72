"""Which settings make a trained model what it is, and how two sets of them differ."""

from __future__ import annotations

from typing import Any

from ddpm_core.config import Config
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


def identity(config: Config, data_fingerprint: str) -> dict[str, Any]:
    """The settings that a model depends on, by dotted name."""
    given = config.dump()
    train = {name: value for name, value in given["train"].items() if name not in _FREE}
    if config.train.optimizer.schedule == "cosine":
        train["steps"] = config.train.steps
    parts = {"model": given["model"], "diffusion": given["diffusion"], "train": train}
    return {"seed": config.seed, "data": data_fingerprint, **_flat(parts)}


def train_fingerprint(config: Config, data_fingerprint: str) -> str:
    return fingerprint(identity(config, data_fingerprint))


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """`name: old -> new` for every setting that is not the same."""
    return [
        f"{name}: {old.get(name)} -> {new.get(name)}"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, item in value.items():
        flat |= _flat(item, f"{prefix}{name}.") if isinstance(item, dict) else {prefix + name: item}
    return flat
