"""Folders of the diffusers package: a UNet2DModel with its DDPMScheduler.

JSON and safetensors are read and written directly, so the package itself isn't needed, and nothing
that is read can run code.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddpm_core.checkpoint import outline
from ddpm_core.errors import Corrupt, UserError
from ddpm_core.interop import folders, scheduler, tensors, unet2d
from ddpm_core.interop.folders import WEIGHTS
from ddpm_core.models.config import UNetConfig
from ddpm_core.models.unet import UNet
from ddpm_core.storage.files import read_object, save_tensors

# What a field or a tensor of another type than was written makes of arithmetic.
_DAMAGE = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError)
_NULL_CLASS = "null_class"  # in the metadata of weights that we exported


@dataclass(frozen=True)
class Imported:
    """A network of diffusers: its weights in float32, and settings of `diffusion` and `sample`.

    The settings are empty where there is no scheduler. `part` is the folder with the weights.
    """

    network: UNetConfig
    weights: dict[str, Tensor]
    diffusion: dict[str, Any]
    sample: dict[str, Any]
    part: Path


def import_folder(folder: Path | str) -> Imported:
    """Read a pipeline, a UNet2DModel or a checkpoint of diffusers' training example.

    A network conditioned on classes that was not exported from here has no vector for "no class";
    it gets the mean of the others. Raises UserError where the folder holds another network or
    process than ours can be.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}. Give that of a pipeline saved by diffusers.")
    part, described = folders.network_part(folder)
    process = folders.scheduler_config(folder)
    network = read_object(described, str(described))
    try:
        config = unet2d.to_config(network)
        diffusion, sample = ({}, {}) if process is None else scheduler.to_settings(process)
    except _DAMAGE as error:
        raise Corrupt(f"A config of the network in {folder} is damaged: {error!r:.300}") from error
    given, metadata = folders.read_weights(part)
    try:
        config, given = _with_null_class(config, given, _NULL_CLASS in metadata)
        weights = tensors.to_weights(outline(config, given, str(part)), given)
    except _DAMAGE as error:
        raise Corrupt(f"The weights in {part} are damaged: {error!r:.300}") from error
    return Imported(config, weights, diffusion, sample, part)


def export_folder(
    unet: UNet,
    schedule_name: str,
    timesteps: int,
    prediction: str,
    folder: Path | str,
    variance: str = "auto",
) -> list[str]:
    """Write a folder that `diffusers.DDPMPipeline.from_pretrained` loads.

    Returns sentences on what its user must know. The folder must be new or empty. Raises UserError
    where diffusers can't express the network.
    """
    described = unet2d.from_unet(unet)
    process = scheduler.from_settings(schedule_name, timesteps, prediction, variance)
    folder = Path(folder).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists already and is not empty; give a new folder.")
    building = folder.with_name(f".{folder.name}-{os.getpid()}")
    try:
        _write(unet, described, process, building)
        if folder.exists():
            folder.rmdir()
        building.rename(folder)
    except OSError as error:
        raise UserError(f"Cannot write {folder}: {error.strerror}.") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return _notes(unet, timesteps)


def _write(unet: UNet, described: Any, process: Any, folder: Path) -> None:
    index = {
        "_class_name": "DDPMPipeline",
        "_diffusers_version": described["_diffusers_version"],
        "scheduler": ["diffusers", "DDPMScheduler"],
        "unet": ["diffusers", "UNet2DModel"],
    }
    files = {
        "model_index.json": index,
        f"unet/{folders.CONFIG}": described,
        f"scheduler/{folders.SCHEDULER}": process,
    }
    for name, document in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    metadata = {"format": "pt"}
    if unet.config.conditioning == "class":
        metadata[_NULL_CLASS] = str(unet.config.classes)
    save_tensors(tensors.from_weights(unet), folder / "unet" / WEIGHTS, metadata)


def _notes(unet: UNet, timesteps: int) -> list[str]:
    notes = []
    if timesteps < 1000:
        notes.append(
            f"DDPMPipeline asks for 1000 steps unless told otherwise: call it with "
            f"num_inference_steps={timesteps} or fewer."
        )
    if unet.config.conditioning == "class":
        notes.append(
            "DDPMPipeline loads this network but passes no class to it: call pipeline.unet(x, t, "
            f"class_labels=labels); label {unet.config.classes} is no class, as for guidance."
        )
    return notes


def _with_null_class(
    config: UNetConfig, given: dict[str, Tensor], has_null: bool
) -> tuple[UNetConfig, dict[str, Tensor]]:
    """Our networks count the vector for no class apart; others have none."""
    if config.conditioning != "class" or "class_embedding.weight" not in given:
        return config, given
    if has_null:
        return replace(config, classes=config.classes - 1), given
    vectors = given["class_embedding.weight"]
    with_null = torch.cat([vectors, vectors.mean(0, keepdim=True)])
    return config, {**given, "class_embedding.weight": with_null}
