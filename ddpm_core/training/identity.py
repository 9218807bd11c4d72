"""Which settings make a trained model what it is, and how two sets of them differ."""

from __future__ import annotations

from functools import cache
from typing import Any

from ddpm_core.config import Config
from ddpm_core.config.identity import flat, non_defaults, relevant
from ddpm_core.config.paths import input_path
from ddpm_core.errors import UserError
from ddpm_core.storage import MANIFEST
from ddpm_core.storage.files import LARGEST_JSON, read_bytes
from ddpm_core.storage.sealing import listed
from ddpm_core.storage.workspace import fingerprint

# Settings of `train` that change speed, memory, checks or what is kept, never the weights.
_FREE = {
    "init_diffusion",
    "microbatches",
    "processes",
    "worker_timeout",
    "restarts",
    "log_every",
    "snapshot_every",
    "keep",
    "milestone_every",
    "grid",
}

INITIAL = "weights of train.init"


def identity(config: Config, data_fingerprint: str) -> dict[str, Any]:
    """The settings that a model depends on, by dotted name."""
    settings = relevant(_settings(config))
    return {"seed": config.seed, "data": data_fingerprint, **settings, **_initial(config)}


def train_fingerprint(config: Config, data_fingerprint: str) -> str:
    """Of the settings alone: it stays when the folder of train.init is gone."""
    settings = identity(config, data_fingerprint)
    settings.pop(INITIAL, None)
    return fingerprint(non_defaults(settings, _defaults()))


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """`name: old -> new` for every setting that is not the same; an absent one is its default."""
    before, after = (relevant({**_defaults(), **side}) for side in (old, new))
    # What a method of one side alone uses differs with the method, which is told.
    both = {*_defaults(), INITIAL}
    return [
        f"{name}: {before.get(name)} -> {after.get(name)}"
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
        and (name not in both or (name in before and name in after))
    ]


def _settings(config: Config) -> dict[str, Any]:
    """The settings of a network and its training, by dotted name."""
    given = config.dump()
    train = {name: value for name, value in given["train"].items() if name not in _FREE}
    return flat({"model": given["model"], "diffusion": given["diffusion"], "train": train})


@cache
def _defaults() -> dict[str, Any]:
    return _settings(Config())


def _initial(config: Config) -> dict[str, str]:
    """A fingerprint of the weights of train.init, where that is a folder whose manifest tells.

    It is compared where both sides know it: who has trained may remove what training began with.
    """
    if config.train.init is None or config.train.init.startswith("models:/"):
        return {}
    try:
        folder = input_path(config.train.init)
        files = listed(read_bytes(folder / MANIFEST, MANIFEST, LARGEST_JSON), folder.name)
    except (OSError, RuntimeError, UserError):
        return {}
    weights = {n: sum_ for n, (_, sum_) in files.items() if n.startswith(("model.", "ema-"))}
    return {INITIAL: fingerprint(weights)}
