"""A network that begins with the weights of another one: `train.init`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ddpm_core.checkpoint import Checkpoint
from ddpm_core.config import Config
from ddpm_core.config.paths import input_path
from ddpm_core.errors import UserError
from ddpm_core.models.unet import UNet, UNetConfig

_CONDITION = "condition."  # begins the names of the weights that a class or text goes through
_VECTORS = "condition.embedding.weight"  # (classes + 1, width); the last is that of no class


@dataclass(frozen=True)
class Origin:
    """Another network, and the names of its classes, empty where they are not known."""

    network: UNetConfig
    weights: dict[str, Tensor]
    classes: Sequence[str]


def take_weights(model: UNet, origin: str, config: Config, classes: Sequence[str]) -> str:
    """Set the weights to those of a checkpoint folder, a diffusers folder or a registered model.

    `classes` are those of the data. What belongs to a class or text that the other network does
    not know stays as it is; the result is a sentence about it, or "". Raises UserError where the
    other is no such network.
    """
    found = _opened(origin, config)
    if wrong := list(_differing(found.network, model.config)):
        raise UserError(
            f"train.init: {origin} is another network than the settings ask for; these must be "
            "equal:\n" + "\n".join(f"  {line}" for line in wrong)
        )
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


def _differing(there: UNetConfig, here: UNetConfig) -> Iterable[str]:
    """The settings that give the two other weights."""
    for setting, name in (
        ("prepare.channels", "in_channels"),
        ("model.channels", "channels"),
        ("model.multipliers", "multipliers"),
        ("model.blocks", "blocks"),
    ):
        pair = [getattr(network, name) for network in (there, here)]
        if pair[0] != pair[1]:
            shown = [list(value) if isinstance(value, tuple) else value for value in pair]
            yield f"{setting} is {shown[0]} there, {shown[1]} here"
    attend = [[size in network.attention for size in network.sizes] for network in (there, here)]
    if attend[0] != attend[1]:
        said = [f"{sorted(n.attention)} for {n.image_size} pixels" for n in (there, here)]
        yield f"model.attention is {said[0]} there, {said[1]} here"


def _opened(origin: str, config: Config) -> Origin:
    if origin.startswith("models:/"):
        from ddpm_core.registry.models import download

        return _checkpoint(download(config, origin))
    folder = input_path(origin)
    if not folder.is_dir():
        raise UserError(f"train.init: {origin!r} given; it is no folder and no models:/ URI.")
    if (folder / "config.json").exists() and (folder / "manifest.json").exists():
        return _checkpoint(folder)
    from ddpm_core.interop.diffusers import import_folder

    network, weights, _ = import_folder(folder)
    return Origin(network, weights, ())


def _checkpoint(folder: Path) -> Origin:
    checkpoint = Checkpoint.open(folder)
    model = checkpoint.load("auto", torch.device("cpu"))
    return Origin(model.config, dict(model.state_dict()), checkpoint.data["classes"])
