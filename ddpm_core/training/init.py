"""The network before its first step: drawn from the seed, or taken from another model."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ddpm_core import rng
from ddpm_core.config import Config
from ddpm_core.config.paths import input_path
from ddpm_core.data.dataset import PackedDataset
from ddpm_core.errors import UserError
from ddpm_core.models.config import UNetConfig, group_count
from ddpm_core.models.init import initialise
from ddpm_core.models.unet import UNet
from ddpm_core.rng import Purpose
from ddpm_core.storage.workspace import SNAPSHOTS, Workspace
from ddpm_core.training.warm_start import Origin, check_origin, open_origin, take_weights


class Pictures(Protocol):
    """What a network has to know of the images it is for; prepared data tell it."""

    @property
    def image_size(self) -> int: ...

    @property
    def channels(self) -> int: ...

    @property
    def classes(self) -> list[str]: ...


def network_config(config: Config, data: Pictures) -> UNetConfig:
    """Return the network that the settings describe for this data, where nothing came before it.

    All its norms have one number of groups, that of the first level: UNet2DModel can express no
    other.
    """
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
        norm_num_groups=group_count(math.gcd(model.channels, *model.widths)),
    )


def fresh_network(config: Config, data: Pictures) -> tuple[UNet, str]:
    """Return the network of step 0, and a sentence on what was not taken from `train.init`.

    What the settings leave open it has from the network of `train.init`.
    """
    origin = None if config.train.init is None else open_origin(config)
    network = network_config(config, data)
    model = UNet(network if origin is None else network.with_details(origin.network))
    return model, initial_weights(model, config, data.classes, origin)


def initial_weights(
    model: UNet, config: Config, classes: Sequence[str] = (), origin: Origin | None = None
) -> str:
    """Set the weights: keyed by their names, so the same on every worker and device.

    With `train.init` those of another network, `origin` where it is open already; then the result
    says what they were not taken for. `classes` are those of the data.
    """
    key = rng.key(Purpose.INIT, config.seed)

    def uniform(name: str, shape: tuple[int, ...]) -> Tensor:
        digest = hashlib.sha256(name.encode()).digest()
        return rng.uniform(key, torch.tensor([int.from_bytes(digest[:4], "big")]), shape)[0]

    initialise(model, uniform)
    if config.train.init is None:
        return ""
    origin = origin or open_origin(config)
    notes = [check_origin(origin, model.config, config), take_weights(model, origin, classes)]
    return " ".join(filter(None, notes))


def check_init_stays(config: Config, workspace: Workspace) -> None:
    """Refuse a train.init that the new run moves to superseded/, and could not begin with again."""
    origin, own = config.train.init, Path(workspace.uri, SNAPSHOTS)
    if origin is None or origin.startswith("models:/"):
        return
    if input_path(origin).resolve().is_relative_to(own.resolve()):
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
