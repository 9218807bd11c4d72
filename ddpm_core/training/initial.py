"""The network before its first step: drawn from the seed, or taken from another model."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ddpm_core import rng
from ddpm_core.checkpoint import Checkpoint
from ddpm_core.config import Config
from ddpm_core.data.dataset import PackedDataset
from ddpm_core.errors import UserError
from ddpm_core.models.unet import UNet, UNetConfig
from ddpm_core.rng import Purpose
from ddpm_core.workspace import SNAPSHOTS, Workspace


class Pictures(Protocol):
    """What a network has to know of the images it is for; prepared data tell it."""

    @property
    def image_size(self) -> int: ...

    @property
    def channels(self) -> int: ...

    @property
    def classes(self) -> list[str]: ...


def network_config(config: Config, data: Pictures) -> UNetConfig:
    """The network that the settings describe, for this data."""
    model = config.model
    return UNetConfig(
        image_size=data.image_size,
        in_channels=data.channels,
        channels=model.channels,
        multipliers=model.multipliers,
        blocks=model.blocks,
        attention=model.attention,
        heads=model.heads,
        dropout=model.dropout,
        conditioning=model.conditioning,
        classes=len(data.classes) if model.conditioning == "class" else 0,
    )


def initial_weights(model: UNet, config: Config) -> None:
    """Set the weights: keyed by their names, so the same on every worker and device."""
    key = rng.key(Purpose.INIT, config.seed)

    def uniform(name: str, shape: tuple[int, ...]) -> Tensor:
        digest = hashlib.sha256(name.encode()).digest()
        return rng.uniform(key, torch.tensor([int.from_bytes(digest[:4], "big")]), shape)[0]

    model.initialise(uniform)
    if config.train.init is not None:
        _load(model, config.train.init, config)


def _load(model: UNet, origin: str, config: Config) -> None:
    """Take the weights of a checkpoint folder, a diffusers folder, or a registered model."""
    weights = _weights(origin, config)
    own = model.state_dict()
    wrong = [
        f"{name}: {tuple(weights[name].shape) if name in weights else 'absent'}, "
        f"{tuple(tensor.shape)} is needed"
        for name, tensor in own.items()
        if name not in weights or weights[name].shape != tensor.shape
    ]
    if wrong or set(weights) - set(own):
        listed = "\n".join(f"  {line}" for line in [*wrong, *sorted(set(weights) - set(own))][:8])
        raise UserError(f"train.init: the weights of {origin} don't fit this network:\n{listed}")
    model.load_state_dict(weights)


def _weights(origin: str, config: Config) -> dict[str, Tensor]:
    if origin.startswith("models:/"):
        from ddpm_core.registry.models import download

        return _checkpoint(download(config, origin))
    folder = Path(origin).expanduser()
    if not folder.is_dir():
        raise UserError(f"train.init: {origin!r} given; it is no folder and no models:/ URI.")
    if (folder / "config.json").exists() and (folder / "manifest.json").exists():
        return _checkpoint(folder)
    from ddpm_core.interop.diffusers import import_folder

    return import_folder(folder)[1]


def _checkpoint(folder: Path) -> dict[str, Tensor]:
    checkpoint = Checkpoint.open(folder)
    return dict(checkpoint.load("auto", torch.device("cpu")).state_dict())


def check_init_stays(config: Config, workspace: Workspace) -> None:
    """Refuse a train.init that the new run moves to superseded/, and could not begin with again."""
    origin, own = config.train.init, Path(workspace.uri, SNAPSHOTS)
    if origin is None or origin.startswith("models:/"):
        return
    if Path(origin).expanduser().resolve().is_relative_to(own.resolve()):
        raise UserError(
            f"train.init: {origin} given, a snapshot of the very workspace, which the run that "
            "begins with it sets aside. Copy that folder to another place and give the copy, or "
            "give the new run another workspace with -w."
        )


def check_data_fits(config: Config, data: PackedDataset) -> None:
    """Refuse data that the settings were not made for."""
    if data.image_size != config.prepare.image_size:
        raise UserError(
            f"The prepared images are {data.image_size} pixels wide, prepare.image_size is "
            f"{config.prepare.image_size}. Run `ddpm prepare` again."
        )
    if config.model.conditioning == "class" and len(data.classes) < 2:
        raise UserError(
            "model.conditioning is class, but the data has no classes: put the images of each "
            "class in a folder of its own, or set conditioning to none."
        )
    if config.model.conditioning == "text" and data.captions is None:
        raise UserError("model.conditioning is text, but the prepared data has no captions.")
