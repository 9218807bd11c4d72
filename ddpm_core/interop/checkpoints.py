"""Checkpoints of ours from diffusers' folders, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ddpm_core import __version__
from ddpm_core.checkpoint import SETTINGS, WEIGHTS, open_checkpoint
from ddpm_core.config import Config, Diffusion
from ddpm_core.config import load as params
from ddpm_core.errors import UserError
from ddpm_core.interop.diffusers import Imported, export_folder, import_folder
from ddpm_core.storage import LocalStorage
from ddpm_core.storage.files import save_tensors
from ddpm_core.storage.workspace import SNAPSHOTS, Workspace, fingerprint


def import_checkpoint(folder: Path, output: Path, process: Mapping[str, Any] | None = None) -> str:
    """Write a checkpoint folder with a network of diffusers, and return what to do with it.

    `process` is settings of the section `diffusion`, for a network without a scheduler.
    """
    if output.exists():
        raise UserError(f"{output} exists already; give a new folder.")
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
    settings = {
        "ddpm": __version__,
        "step": 0,
        "params": params.validate(given).dump(),
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
    drawn = f" and sample {found.sample}" if found.sample else ""
    return (
        f"{output} holds the network of {found.part}, {model} with diffusion {diffusion}{drawn}. "
        "To train it further, set train.init to this folder, with these settings."
    )


def _diffusion(found: Imported, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the section `diffusion`: the scheduler's, else those given."""
    if missing := [
        name for name in Diffusion.model_fields if name not in {**found.diffusion, **given}
    ]:
        raise UserError(
            f"{found.part} has no scheduler, which says what its network predicts. Give "
            f"{', '.join(f'--{name}' for name in missing)} as the network was trained; the "
            "training example of diffusers has linear, 1000 and noise as its defaults."
        )
    for name, value in given.items():
        if value != found.diffusion.get(name, value):
            raise UserError(
                f"--{name} is {value}; the scheduler of {found.part} says "
                f"{found.diffusion[name]}. Leave the option out, or correct the scheduler."
            )
    return {**given, **found.diffusion}


def export_checkpoint(config: Config, workspace: Workspace, step: int | None, output: Path) -> str:
    """Write a checkpoint of the workspace as a folder for diffusers.DDPMPipeline."""
    steps = workspace.steps(SNAPSHOTS)
    if not steps:
        raise UserError(f"{workspace.uri} has no checkpoint to export: run `ddpm train` first.")
    checkpoint = open_checkpoint(workspace, steps[-1] if step is None else step)
    model = checkpoint.load(config.sample.ema, torch.device("cpu"))
    diffusion = checkpoint.params.diffusion
    process = diffusion.schedule, diffusion.timesteps, diffusion.prediction
    notes = export_folder(model, *process, output, config.sample.variance)
    return "\n".join([f"Step {checkpoint.step} is in {output}.", *notes])
