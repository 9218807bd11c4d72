"""Read and write folders of the diffusers package: a UNet2DModel with its DDPMScheduler.

Reads what diffusers and accelerate save: pipelines, bare networks and training checkpoints. JSON
and safetensors are read directly, so the diffusers package is not required, and no file that is
read can run code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddpm_core.checkpoint import outline
from ddpm_core.config import Diffusion
from ddpm_core.errors import Corrupt, UserError
from ddpm_core.interop import scheduler, tensors, unet2d
from ddpm_core.models.config import UNetConfig
from ddpm_core.models.unet import UNet
from ddpm_core.storage.files import (
    must_be_inside,
    read_object,
    read_tensors_and_metadata,
    save_tensors,
)

WEIGHTS = "diffusion_pytorch_model.safetensors"
SCHEDULER = "scheduler_config.json"
CONFIG = "config.json"
_PLAIN = "model.safetensors"  # accelerate's name for weights, which it saves without a config
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.safetensors$")
# Errors in computing with fields or tensors of unexpected types, which a damaged file can have.
_DAMAGE = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError)
_NULL_CLASS = "null_class"  # metadata of exported weights: the number of the vector for "no class"


@dataclass(frozen=True)
class Imported:
    """A network that was read from a folder of diffusers.

    Attributes:
        network: Its structure.
        weights: Its state_dict, in float32.
        diffusion: Settings of the section `diffusion`; empty without a scheduler.
        sample: Settings of the section `sample`; empty without a scheduler.
        part: The folder with the weights.
    """

    network: UNetConfig
    weights: dict[str, Tensor]
    diffusion: dict[str, Any]
    sample: dict[str, Any]
    part: Path


def import_folder(folder: Path | str) -> Imported:
    """Read a pipeline, a UNet2DModel or a checkpoint of diffusers' training example.

    A class-conditional network that ddpm did not export has no vector for "no class". It gets the
    mean of the class vectors.

    Raises:
        UserError: There is no network in the folder, or ddpm does not support it or its scheduler.
        Corrupt: A file is damaged.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise UserError(
            f"{folder} is not an existing folder. Give the folder of a pipeline saved by diffusers."
        )
    part, described = network_part(folder)
    process = scheduler_config(folder)
    network = read_object(described, str(described))
    try:
        config = unet2d.to_config(network)
        diffusion, sample = ({}, {}) if process is None else scheduler.to_settings(process)
    except _DAMAGE as error:
        raise Corrupt(f"A config in {folder} is damaged: {error!r:.300}") from error
    given, metadata = read_weights(part)
    try:
        config, given = _with_null_class(config, given, _NULL_CLASS in metadata)
        weights = tensors.to_weights(outline(config, given, str(part)), given)
    except _DAMAGE as error:
        raise Corrupt(f"The weights in {part} are damaged: {error!r:.300}") from error
    return Imported(config, weights, diffusion, sample, part)


def _with_null_class(
    config: UNetConfig, given: dict[str, Tensor], has_null: bool
) -> tuple[UNetConfig, dict[str, Tensor]]:
    """Return config and weights with a vector for "no class" after those of the classes.

    An exported network already has one (`has_null`), which diffusers counts as a class.
    """
    if config.conditioning != "class" or "class_embedding.weight" not in given:
        return config, given
    if has_null:
        return replace(config, classes=config.classes - 1), given
    vectors = given["class_embedding.weight"]
    with_null = torch.cat([vectors, vectors.mean(0, keepdim=True)])
    return config, {**given, "class_embedding.weight": with_null}


def network_part(folder: Path) -> tuple[Path, Path]:
    """Return the folder with the weights and the path of the network's config.

    Averaged weights come first: the training example of diffusers draws its images with them.
    Raises UserError if there is no network.
    """
    for part in (folder / "unet_ema", folder / "unet", folder):
        if (part / CONFIG).is_file():
            return part, part / CONFIG
    if any((folder / name).is_file() for name in (_PLAIN, f"{_PLAIN}.index.json")):
        config = folder.parent / "unet" / CONFIG
        if config.is_file():
            return folder, config
        raise UserError(
            f"{folder} has weights, but {config}, which describes their network, is missing. Copy "
            "the config.json of the UNet2DModel into the folder."
        )
    checkpoints = sorted(path.name for path in folder.glob("checkpoint-*") if path.is_dir())
    hint = f" It has {', '.join(checkpoints):.200}, which can be imported." if checkpoints else ""
    raise UserError(
        f"{folder} has neither unet/{CONFIG} nor {CONFIG}.{hint} Give the folder of a pipeline, "
        "a UNet2DModel or a checkpoint, as diffusers saves them."
    )


def scheduler_config(folder: Path) -> dict[str, Any] | None:
    """Return the scheduler's config, of the folder or of the pipeline around it, or None."""
    for place in (folder / "scheduler", folder, folder.absolute().parent / "scheduler"):
        if (place / SCHEDULER).is_file():
            return read_object(place / SCHEDULER, str(place / SCHEDULER))
    return None


def read_weights(part: Path) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    """Return the tensors of a network and their metadata.

    Raises UserError if there are no weights to read, Corrupt if they are damaged.
    """
    path = _weights_file(part)
    if path.suffix != ".json":
        return read_tensors_and_metadata(path)
    shards = read_object(path, str(path)).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise Corrupt(f"{path} is damaged: weight_map must map tensors to files.")
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for name in sorted(set(shards.values())):
        must_be_inside(str(part), name)
        if not (part / name).is_file():
            raise UserError(f"{part / name} is missing; {path.name} lists it. Copy it there.")
        found, more = read_tensors_and_metadata(part / name)
        tensors |= found
        metadata |= more
    return tensors, metadata


def _weights_file(part: Path) -> Path:
    """Return the weights file, or the index of its shards.

    Full precision comes first, then the only variant (such as fp16). Raises UserError.
    """
    for name in (WEIGHTS, f"{WEIGHTS}.index.json", _PLAIN, f"{_PLAIN}.index.json"):
        if (part / name).is_file():
            return part / name
    stem = WEIGHTS.partition(".")[0]
    variants = [path for path in part.glob(f"{stem}.*.safetensors") if not _SHARD.search(path.name)]
    variants = sorted([*variants, *part.glob(f"{WEIGHTS}.index.*.json")])
    if len(variants) == 1:
        return variants[0]
    if variants:
        raise UserError(
            f"{part} has {len(variants)} variants of the weights, "
            f"{', '.join(path.name for path in variants):.300}. Keep one and remove the others."
        )
    if any(part.glob("*pytorch_model*.bin")):
        raise UserError(
            f"{part} has its weights as .bin, a pickle, which can run code when it is read. If you "
            "trust it, convert it: DDPMPipeline.from_pretrained(folder).save_pretrained(new)."
        )
    raise UserError(f"{part / WEIGHTS} is missing. Copy the weights into the folder.")


def refusal(network: UNetConfig, diffusion: Diffusion, variance: str = "auto") -> str:
    """Return why diffusers cannot represent a network and its process, or "" if it can."""
    try:
        unet2d.from_unet(UNet(network, device="meta"))
        scheduler.from_diffusion(diffusion, variance)
    except UserError as error:
        return str(error)
    return ""


def export_folder(
    unet: UNet, diffusion: Diffusion, folder: Path, variance: str = "auto"
) -> list[str]:
    """Write what `diffusers.DiffusionPipeline.from_pretrained` loads into a folder.

    Args:
        unet: The network, with its weights.
        diffusion: The process it was trained for.
        folder: Created if it is missing.
        variance: The setting sample.variance.

    Returns:
        Notes for the user of the folder.

    Raises:
        UserError: diffusers cannot represent the network or the process; nothing is written.
        OSError: The folder cannot be written.
    """
    described = unet2d.from_unet(unet)
    index = {
        "_class_name": "DDPMPipeline",
        "_diffusers_version": described["_diffusers_version"],
        "scheduler": ["diffusers", "DDPMScheduler"],
        "unet": ["diffusers", "UNet2DModel"],
    }
    files = {
        "model_index.json": index,
        f"unet/{CONFIG}": described,
        f"scheduler/{SCHEDULER}": scheduler.from_diffusion(diffusion, variance),
    }
    for name, document in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    metadata = {"format": "pt"}
    if unet.config.conditioning == "class":
        metadata[_NULL_CLASS] = str(unet.config.classes)
    save_tensors(tensors.from_weights(unet), folder / "unet" / WEIGHTS, metadata)
    return _notes(unet, diffusion.timesteps)


def _notes(unet: UNet, timesteps: int) -> list[str]:
    notes = []
    if timesteps < 1000:
        notes.append(
            "DDPMPipeline takes 1000 steps by default, more than this network has: call it with "
            f"num_inference_steps={timesteps} or fewer."
        )
    if unet.config.conditioning == "class":
        notes.append(
            "DDPMPipeline passes no class to this network: call pipeline.unet(x, t, "
            f'class_labels=labels). Label {unet.config.classes} means "no class", for guidance.'
        )
    return notes
