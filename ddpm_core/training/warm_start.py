"""A network that begins with the weights of another one: `train.init`."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddpm_core.checkpoint import Checkpoint
from ddpm_core.config import Config
from ddpm_core.config.paths import input_path
from ddpm_core.errors import UserError
from ddpm_core.models.config import DETAILS, UNetConfig
from ddpm_core.models.unet import UNet

_CONDITION = "condition."  # begins the names of the weights that a class or text goes through
_VECTORS = "condition.embedding.weight"  # (classes + 1, width); the last is that of no class
# Fields of UNetConfig that may differ: they give weights no other meaning, or are handled apart.
_MAY_DIFFER = {"image_size", "dropout", "attention", "conditioning", "classes", *DETAILS}


@dataclass(frozen=True)
class Origin:
    """The network of `train.init`: its weights, and the settings that give them a meaning."""

    network: UNetConfig
    diffusion: dict[str, Any]  # prediction, schedule and timesteps; empty without a scheduler
    weights: dict[str, Tensor]
    classes: Sequence[str]  # empty where they are not known


def check_origin(found: Origin, network: UNetConfig, config: Config) -> str:
    """Raise UserError where the settings give the weights of `train.init` another meaning.

    Returns a sentence about differences that train.init_diffusion allows, or "".
    """
    structure = list(_network_differences(found.network, network))
    process = [
        (f"diffusion.{name}", there, here)
        for name, there in found.diffusion.items()
        if there != (here := getattr(config.diffusion, name))
    ]
    if config.train.init_diffusion == "any" and process:
        allowed = ", ".join(_described(*difference) for difference in process)
        process = []
    else:
        allowed = ""
    if wrong := structure + process:
        lines = "\n".join(f"  {_described(*difference)}" for difference in wrong)
        options = " ".join(f"-S {shlex.quote(f'{name}={there}')}" for name, there, _ in wrong)
        or_any = "; or allow the difference: -S train.init_diffusion=any" if not structure else ""
        raise UserError(
            f"train.init: the network in {config.train.init} has different settings:\n{lines}\n"
            f"They must be equal. Use those of train.init: {options}{or_any}."
        )
    return allowed and f"train.init: {allowed}; training has to make up for it."


def take_weights(model: UNet, found: Origin, classes: Sequence[str]) -> str:
    """Set the weights of `model` to those of an origin that `check_origin` accepts.

    `classes` are those of the data. What belongs to a class or text that the other network does
    not know stays as it is; the result is a sentence about it, or "".
    """
    taken = {n: tensor for n, tensor in found.weights.items() if not n.startswith(_CONDITION)}
    there, here = found.network.conditioning, model.config.conditioning
    told = ""
    if there != here:
        told = f"model.conditioning is {there} there, {here} here: all else is taken" + (
            "" if here == "none" else ", and what belongs to it starts anew"
        )
    elif here == "class":
        own = model.state_dict()[_VECTORS].clone()
        taken[_VECTORS], told = _vectors(found, own, classes)
    else:
        taken = found.weights
    model.load_state_dict({**model.state_dict(), **taken})
    return told and f"train.init: {told}."


def _vectors(found: Origin, own: Tensor, classes: Sequence[str]) -> tuple[Tensor, str]:
    """The vectors of the classes, those of the same name taken; `own` is filled and returned."""
    given = found.weights[_VECTORS]
    same = set(found.classes) & set(classes)
    if len(given) == len(own) and (not same or list(found.classes) == list(classes)):
        named = found.classes and not same
        return given, "the classes have other names there: taken in their order" if named else ""
    for name in same:
        own[classes.index(name)] = given[found.classes.index(name)]
    own[-1] = given[-1]
    kept = f"but those of {', '.join(sorted(same))}" if same else "all"
    return own, (
        f"{len(given) - 1} classes there, {len(own) - 1} here: their vectors start anew, {kept}"
    )


def _network_differences(there: UNetConfig, here: UNetConfig) -> Iterable[tuple[str, Any, Any]]:
    """Yield each setting with its two values where they give the weights another meaning."""
    for name in (field.name for field in fields(UNetConfig) if field.name not in _MAY_DIFFER):
        setting = "prepare.channels" if name == "in_channels" else f"model.{name}"
        theirs, ours = (_plain(getattr(network, name)) for network in (there, here))
        if theirs != ours:
            yield setting, theirs, ours
    levels = [[size in network.attention for size in network.sizes] for network in (there, here)]
    if levels[0] != levels[1]:
        # Attention belongs to a level; its size there may be another one than here.
        wanted = [size for size, has in zip(here.sizes, levels[0], strict=False) if has]
        yield "model.attention", wanted, sorted(here.attention)


def _plain(value: Any) -> Any:
    """A setting as a params file has it."""
    return list(value) if isinstance(value, tuple) else value


def _described(setting: str, there: Any, here: Any) -> str:
    return f"{setting} is {there} there, {here} here"


def open_origin(config: Config) -> Origin:
    """Read the network of `train.init`. Raises UserError where there is none, or Corrupt."""
    origin = config.train.init or ""
    if origin.startswith("models:/"):
        from ddpm_core.registry.models import download

        return _checkpoint(download(config, origin))
    folder = input_path(origin)
    if not folder.is_dir():
        raise UserError(f"train.init: {origin!r} given; it is no folder and no models:/ URI.")
    if (folder / "config.json").exists() and (folder / "manifest.json").exists():
        return _checkpoint(folder)
    from ddpm_core.interop.diffusers import import_folder

    found = import_folder(folder)
    return Origin(found.network, found.diffusion, found.weights, ())


def _checkpoint(folder: Path) -> Origin:
    checkpoint = Checkpoint.open(folder)
    model = checkpoint.load("auto", torch.device("cpu"))
    diffusion = checkpoint.params.diffusion.model_dump()
    return Origin(model.config, diffusion, dict(model.state_dict()), checkpoint.data["classes"])
