"""Checkpoints of ours from diffusers' folders, and back."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch

from ddpm_core import __version__, params
from ddpm_core.checkpoint import SETTINGS, WEIGHTS, open_checkpoint
from ddpm_core.config import Config
from ddpm_core.errors import UserError
from ddpm_core.interop.diffusers import export_folder, import_folder
from ddpm_core.reading import save_tensors
from ddpm_core.storage import LocalStorage
from ddpm_core.workspace import SNAPSHOTS, Workspace, fingerprint


def import_checkpoint(folder: Path, output: Path) -> str:
    """Write a checkpoint folder with the network of a diffusers pipeline; what it is good for."""
    if output.exists():
        raise UserError(f"{output} exists already; give a new folder.")
    network, weights, diffusion = import_folder(folder)
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
        save_tensors({n: tensor.contiguous() for n, tensor in weights.items()}, place / WEIGHTS)
        (place / SETTINGS).write_text(json.dumps(settings, indent=1), encoding="utf-8")
    return (
        f"{output} holds the network, {model} with diffusion {diffusion}. Give it as train.init "
        "with these settings to go on training."
    )


def export_checkpoint(config: Config, workspace: Workspace, step: int | None, output: Path) -> str:
    """Write a checkpoint of the workspace as a folder for diffusers.DDPMPipeline."""
    steps = workspace.steps(SNAPSHOTS)
    if not steps:
        raise UserError(f"{workspace.uri} has no checkpoint to export: run `ddpm train` first.")
    checkpoint = open_checkpoint(workspace, steps[-1] if step is None else step)
    model = checkpoint.load(config.sample.ema, torch.device("cpu"))
    diffusion = checkpoint.params.diffusion
    notes = export_folder(
        model, diffusion.schedule, diffusion.timesteps, diffusion.prediction, output
    )
    return "\n".join([f"Step {checkpoint.step} is in {output}.", *notes])
