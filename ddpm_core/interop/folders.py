"""Find the parts of what diffusers and accelerate save: pipelines, bare networks, checkpoints.

Only JSON and safetensors are read, so nothing that is read can run code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ddpm_core.errors import Corrupt, UserError
from ddpm_core.storage.files import must_be_inside, read_object, read_tensors_and_metadata

WEIGHTS = "diffusion_pytorch_model.safetensors"
SCHEDULER = "scheduler_config.json"
CONFIG = "config.json"
_PLAIN = "model.safetensors"  # accelerate's name, without a config beside it
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.safetensors$")


def network_part(folder: Path) -> tuple[Path, Path]:
    """Return the folder with the weights and the path of the network's config. Raises UserError.

    Averaged weights come first: the training example of diffusers draws its images with them.
    """
    for part in (folder / "unet_ema", folder / "unet", folder):
        if (part / CONFIG).is_file():
            return part, part / CONFIG
    if any((folder / name).is_file() for name in (_PLAIN, f"{_PLAIN}.index.json")):
        config = folder.parent / "unet" / CONFIG
        if config.is_file():
            return folder, config
        raise UserError(
            f"{folder} has weights, but there is no {config} that describes their network. Put "
            "the config.json of the UNet2DModel into the folder."
        )
    checkpoints = sorted(path.name for path in folder.glob("checkpoint-*") if path.is_dir())
    there = f"; it has {', '.join(checkpoints):.200}, which can be imported" if checkpoints else ""
    raise UserError(
        f"{folder} has no unet/{CONFIG} and no {CONFIG}{there}. Give the folder of a pipeline, of "
        "a UNet2DModel or of a checkpoint, as diffusers saves them."
    )


def scheduler_config(folder: Path) -> dict[str, Any] | None:
    """Return the scheduler's config: that of the folder, or of the pipeline that it is part of."""
    for place in (folder / "scheduler", folder, folder.absolute().parent / "scheduler"):
        if (place / SCHEDULER).is_file():
            return read_object(place / SCHEDULER, str(place / SCHEDULER))
    return None


def read_weights(part: Path) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    """Return the tensors of a network and their metadata. Raises UserError and Corrupt."""
    path = _weights_file(part)
    if path.suffix != ".json":
        return read_tensors_and_metadata(path)
    shards = read_object(path, str(path)).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise Corrupt(f"{path} is damaged: it has no weight_map from tensors to files.")
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for name in sorted(set(shards.values())):
        must_be_inside(str(part), name)
        if not (part / name).is_file():
            raise UserError(f"{part} has no {name}, which {path.name} names. Copy it there.")
        found, more = read_tensors_and_metadata(part / name)
        tensors |= found
        metadata |= more
    return tensors, metadata


def _weights_file(part: Path) -> Path:
    """Return the weights or the index of their shards: in full precision, else the one variant."""
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
            f"{', '.join(path.name for path in variants):.300}. Remove all but one."
        )
    if any(part.glob("*pytorch_model*.bin")):
        raise UserError(
            f"{part} has its weights as .bin, a pickle, which runs code when it is read. Convert "
            "it where you trust it: DDPMPipeline.from_pretrained(folder).save_pretrained(new)."
        )
    raise UserError(f"{part} has no {WEIGHTS}.")
