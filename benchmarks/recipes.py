"""The recipes of the speedrun, as settings of ddpm. Change the winning one here."""

from __future__ import annotations

from typing import Any

from benchmarks import reference
from ddpm_core.comparison.experiment import merged

Settings = dict[str, Any]

# Of all recipes.
COMMON: Settings = {
    "model": {"channels": 32, "multipliers": [1, 2, 2], "blocks": 1},
    "train": {"batch_size": 64, "flip": True, "snapshot_every": "2m"},
    "tracking": {"uri": ""},
}

# The best static recipe: known methods, nothing learned from the data.
STATIC: Settings = {
    "diffusion": {"schedule": "cosine", "prediction": "v"},
    "train": {
        "optimizer": {"lr": 1e-3, "warmup": 100, "schedule": "cosine"},
        "ema": [0.999],
        "ema_warmup": True,
        "loss": {"weighting": "min_snr"},
    },
}

# From the reference's recipe to everything that won, in three changes.
THEIRS: Settings = {
    "diffusion": {"schedule": "linear", "prediction": "noise"},
    "train": {
        "optimizer": {
            "name": "adamw",
            "lr": reference.LEARNING_RATE,
            "betas": list(reference.BETAS),
            "weight_decay": reference.WEIGHT_DECAY,
            "warmup": reference.WARMUP,
            "schedule": "cosine",
        },
        "ema": [reference.MAX_DECAY],
        "ema_warmup": True,
        "loss": {"weighting": "uniform"},
    },
}
PARAMETRIZATION: Settings = {"diffusion": {"schedule": "cosine", "prediction": "wiener"}}
OBJECTIVE: Settings = {"train": {"loss": {"weighting": "min_snr"}}}
REST: Settings = {
    "train": {
        "optimizer": {
            "name": "adam",
            "lr": 1e-3,
            "betas": [0.9, 0.999],
            "weight_decay": 0.0,
            "warmup": 100,
            "schedule": "cosine",
        },
        "ema": ["power:0.05"],
        "ema_warmup": False,
    },
}


# The recipes from the reference's, in ddpm, to everything that won. Each one adds a change.
THEIR_RECIPE, ALL = "theirs", "all"
CHAIN = (THEIR_RECIPE, "parametrization", "objective", ALL)
# The factors of the speed-up: two for the reference's recipe in ddpm, then one for each change.
FACTORS = ("throughput", "network", "parametrization", "objective", "rest")


def recipes() -> dict[str, Settings]:
    """Return all recipes by name; each one of CHAIN adds a change to the one before."""
    found: dict[str, Settings] = {"static": STATIC}
    settings: Settings = {}
    changes = (THEIRS, PARAMETRIZATION, OBJECTIVE, REST)
    for name, change in zip(CHAIN, changes, strict=True):
        settings = merged(settings, change)
        found[name] = settings
    return found
