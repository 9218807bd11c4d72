"""The formats that a model can be written in: folders with its card, scores and images."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from ddpm_core.diffusion.predictions import make_prediction
from ddpm_core.diffusion.process import make_schedule
from ddpm_core.interop import diffusers, onnx
from ddpm_core.registry.package import CARD, SCORES, write_checkpoint
from ddpm_core.registry.readme import Model, write_readme
from ddpm_core.sampling.loading import load_moments
from ddpm_core.storage.workspace import GRID
from ddpm_core.text import masked, throughout

NETWORK = "model.onnx"


def write(model: Model, kind: str, folder: Path) -> list[str]:
    """Write a model into an empty folder in the format `kind`, a name in FORMATS.

    Returns:
        Notes for the user of the folder.

    Raises:
        UserError: The format cannot represent the model, or a package is missing.
        OSError: The folder cannot be written.
    """
    notes = FORMATS[kind](model, folder)
    (folder / CARD).write_text(write_readme(model, kind), encoding="utf-8")
    write_evidence(model, folder)
    return notes


def write_evidence(model: Model, folder: Path) -> None:
    """Write the scores with their evidence, and the grid, as far as the model has them."""
    if model.row is not None:
        scores = throughout(masked, model.row.plain())
        (folder / SCORES).write_text(json.dumps(scores, indent=1) + "\n", encoding="utf-8")
    if model.grid is not None:
        (folder / GRID).write_bytes(model.grid)


def _write_diffusers(model: Model, folder: Path) -> list[str]:
    """Write a pipeline of diffusers."""
    params = model.checkpoint.params
    variance = str(model.sampled.get("variance", params.sample.variance))
    unet = model.checkpoint.load(model.sampled["ema"], torch.device("cpu"))
    return diffusers.export_folder(unet, params.diffusion, folder, variance)


def _write_safetensors(model: Model, folder: Path) -> list[str]:
    """Write a checkpoint of ddpm: a file of weights, and the settings as JSON."""
    write_checkpoint(model.checkpoint, model.sampled, folder)
    return []


def _write_onnx(model: Model, folder: Path) -> list[str]:
    """Write the network, and what drawing with it requires as JSON."""
    params, data = model.checkpoint.params, model.checkpoint.training_data
    diffusion = params.diffusion
    schedule = make_schedule(diffusion.schedule, diffusion.timesteps, diffusion.zero_terminal_snr)
    described = {
        "step": model.checkpoint.step,
        "image_size": data.image_size,
        "channels": data.channels,
        "conditioning": params.model.conditioning,
        "classes": data.classes if params.model.conditioning == "class" else [],
        "prediction": onnx.output_of(diffusion),
        "alphas_cumprod": schedule.alphas_bar.tolist(),
    }
    unet = model.checkpoint.load(model.sampled["ema"], torch.device("cpu"))
    network: nn.Module = unet
    if moments := load_moments(model.checkpoint):
        prediction = make_prediction(diffusion.prediction, moments)
        network = onnx.X0Network(unet, prediction, schedule.alphas_bar)
    onnx.export_network(network, unet.config, folder / NETWORK)
    (folder / "config.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    return []


FORMATS: dict[str, Callable[[Model, Path], list[str]]] = {
    "diffusers": _write_diffusers,
    "safetensors": _write_safetensors,
    "onnx": _write_onnx,
}
