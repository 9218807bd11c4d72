"""Convert folders of diffusers to checkpoints of ddpm."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddpm_core import __version__
from ddpm_core.checkpoint import SETTINGS, WEIGHTS
from ddpm_core.config import load as params
from ddpm_core.errors import UserError
from ddpm_core.interop.diffusers import Imported, import_folder
from ddpm_core.storage import LocalStorage
from ddpm_core.storage.files import save_tensors
from ddpm_core.storage.workspace import fingerprint

_REQUIRED = ("schedule", "timesteps", "prediction")  # settings of `diffusion` that weights imply


def import_checkpoint(folder: Path, output: Path, process: Mapping[str, Any] | None = None) -> str:
    """Write a network of diffusers as a checkpoint folder, and return a message on how to use it.

    `process` has settings of the section `diffusion`, for a network without a scheduler. Raises
    UserError if the network cannot be imported or `output` exists.
    """
    if output.exists():
        raise UserError(f"{output} already exists. Give a new folder.")
    found = import_folder(folder)
    network, diffusion = found.network, _diffusion(found, process or {})
    model = {
        "channels": network.channels,
        "multipliers": list(network.multipliers),
        "blocks": network.blocks,
        "attention": list(network.attention),
        "heads": network.heads,
        "dropout": network.dropout,
        "conditioning": network.conditioning,
    }
    given = {
        "prepare": {"image_size": network.image_size},
        "model": model,
        "diffusion": diffusion,
        "train": {"ema": []},
        "sample": found.sample,
    }
    config = params.validate(given)
    if config.diffusion.uses_moments:
        raise UserError(
            f"--prediction: got {config.diffusion.prediction}; must be noise, x0 or v, because a "
            "network of diffusers has no moments of the images."
        )
    settings = {
        "ddpm": __version__,
        "step": 0,
        "params": config.dump(),
        "network": asdict(network),
        "data": {
            "fingerprint": "",
            "classes": [str(number) for number in range(network.classes)],
            "class_counts": [1] * network.classes,
            "captions": [],
            "image_size": network.image_size,
            "channels": network.in_channels,
            "source": {"uri": folder.name},
        },
        "train_fingerprint": fingerprint({"imported": folder.name}),
    }
    with LocalStorage(output.absolute().parent).new_folder(output.name) as place:
        weights = {name: tensor.contiguous() for name, tensor in found.weights.items()}
        save_tensors(weights, place / WEIGHTS)
        (place / SETTINGS).write_text(json.dumps(settings, indent=1), encoding="utf-8")
    sampling = f" and sample {found.sample}" if found.sample else ""
    return (
        f"Imported {found.part} into {output}: model {model}, diffusion {diffusion}{sampling}. "
        "To train it further, use these settings and set train.init to this folder."
    )


def _diffusion(found: Imported, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the section `diffusion`, from the scheduler or from the user.

    Raises UserError if a setting is missing or both contradict each other.
    """
    if missing := [name for name in _REQUIRED if name not in {**found.diffusion, **given}]:
        raise UserError(
            f"{found.part} has no scheduler, which would define the diffusion process. Give "
            f"{', '.join(f'--{name}' for name in missing)} as the network was trained; the "
            "defaults of diffusers' training example are linear, 1000 and noise."
        )
    for name, value in given.items():
        if value != found.diffusion.get(name, value):
            raise UserError(
                f"--{name}: got {value}; the scheduler of {found.part} has "
                f"{found.diffusion[name]}. Omit the option, or correct the scheduler."
            )
    return {**given, **found.diffusion}
