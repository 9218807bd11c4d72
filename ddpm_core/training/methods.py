"""The selectable methods by params key and name, with formula and source: `ddpm methods`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from ddpm_core.config.identity import USES
from ddpm_core.diffusion.losses import LOSSES
from ddpm_core.diffusion.objective import ADAPTIVE_METHODS
from ddpm_core.diffusion.predictions import PREDICTIONS
from ddpm_core.diffusion.process import SCHEDULES
from ddpm_core.diffusion.samplers import SAMPLERS
from ddpm_core.diffusion.spacings import SPACINGS
from ddpm_core.diffusion.timestep_samplers import TIMESTEP_SAMPLERS
from ddpm_core.diffusion.weightings import WEIGHTINGS
from ddpm_core.training.augment import AUGMENTATIONS
from ddpm_core.training.optim import OPTIMIZERS, RATE_SCHEDULES
from ddpm_core.training.reduction import REDUCTIONS

METHODS: dict[str, Mapping[str, Any]] = {
    "diffusion.schedule": SCHEDULES,
    "diffusion.prediction": PREDICTIONS,
    "train.optimizer.name": OPTIMIZERS,
    "train.optimizer.schedule": RATE_SCHEDULES,
    "train.augment": AUGMENTATIONS,
    "train.loss.kind": LOSSES,
    "train.loss.weighting": WEIGHTINGS,
    "train.timesteps.sampler": TIMESTEP_SAMPLERS,
    "train.timesteps.adaptive": ADAPTIVE_METHODS,
    "train.reduction": REDUCTIONS,
    "sample.sampler": SAMPLERS,
    "sample.spacing": SPACINGS,
}


def overview() -> str:
    """Return all methods as text: each params key, then one line per name."""
    parts = []
    for key, choices in METHODS.items():
        width = max(map(len, choices))
        lines = (
            f"  {name:{width}}  {_text(choices[name]).partition(chr(10))[0]}" for name in choices
        )
        parts += [key, *lines, ""]
    return "\n".join(parts) + "\nFormulas, sources and settings: ddpm methods -v"


def describe() -> str:
    """Return all methods as text: each params key, then each name with docstring and settings."""
    parts = []
    for key, choices in METHODS.items():
        parts.append(key)
        for name, method in choices.items():
            text = _text(method)
            if used := USES.get(key, {}).get(name):
                text += f"\n\nUses {' and '.join(used)}."
            indented = "\n".join(f"      {line}".rstrip() for line in text.splitlines())
            parts.append(f"  {name}\n{indented}")
        parts.append("")
    return "\n".join(parts).rstrip()


def _text(method: Any) -> str:
    return (inspect.getdoc(method) or "").strip()
