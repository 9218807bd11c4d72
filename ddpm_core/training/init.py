"""The network before its first step: drawn from the seed, or a warm start by `train.init`."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ddpm_core import rng
from ddpm_core.checkpoint import WEIGHTS, Checkpoint, ema_name
from ddpm_core.config import Config
from ddpm_core.config.paths import input_path
from ddpm_core.data.dataset import PackedDataset
from ddpm_core.errors import UserError
from ddpm_core.models.config import DETAILS, UNetConfig
from ddpm_core.models.init import initialise
from ddpm_core.models.unet import UNet
from ddpm_core.rng import Purpose
from ddpm_core.storage.workspace import SNAPSHOTS, Workspace
from ddpm_core.training.augment import PARAMETERS

_CONDITION = "condition."  # starts the names of all weights that process a class or text
_AUGMENTATION = "augmentation."  # starts the name of the weights for augmentation parameters
_CROSS = (".cross.", "condition.null_token")  # parts of the names of weights for cross-attention
_CLASS_VECTORS = "condition.embedding.weight"  # (classes + 1, width); the last row: no class
# Fields of UNetConfig that may differ: the weights mean the same, or the difference is handled.
_MAY_DIFFER = {
    *("image_size", "dropout", "attention", "cross_attention", "conditioning", "classes"),
    "augmentation",
    *DETAILS,
}


class ImageShape(Protocol):
    """The properties of the images that a network depends on; PackedDataset has them."""

    @property
    def image_size(self) -> int: ...

    @property
    def channels(self) -> int: ...

    @property
    def classes(self) -> list[str]: ...


def network_config(config: Config, data: ImageShape) -> UNetConfig:
    """Return the network that the settings describe for this data, before `train.init` applies."""
    network = config.model.network(data.image_size, data.channels, len(data.classes))
    return replace(network, augmentation=PARAMETERS.get(config.train.augment, 0))


def fresh_network(config: Config, data: ImageShape) -> tuple[UNet, str]:
    """Return the network of step 0, and a note on what `train.init` does not provide, or "".

    Details of the network that no setting names come from `train.init`. Moments of the images do
    not: they are those of the data.
    """
    origin = None if config.train.init is None else open_origin(config)
    network = network_config(config, data)
    model = UNet(network if origin is None else network.with_details(origin.network))
    return model, initial_weights(model, config, data.classes, origin)


def initial_weights(
    model: UNet, config: Config, classes: Sequence[str] = (), origin: Origin | None = None
) -> str:
    """Draw the weights from the seed, then replace those that `train.init` provides.

    Random numbers are keyed by the name of the weight, so every worker and device draws the same.
    `classes` are those of the data; `origin` is the network of `train.init` if it is open already.
    Returns a note on what `train.init` does not provide, or "".
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


def check_data_fits(config: Config, data: PackedDataset) -> None:
    """Raise UserError if the prepared data does not match the settings."""
    if data.image_size != config.prepare.image_size:
        raise UserError(
            f"The prepared images are {data.image_size} pixels wide, but prepare.image_size is "
            f"{config.prepare.image_size}.",
            run=("prepare",),
        )
    if config.model.conditioning == "class" and len(data.classes) < 2:
        raise UserError(
            "model.conditioning: got class, but the data has no classes. Put the images of each "
            "class into its own folder, or set model.conditioning: none."
        )
    if config.model.conditioning == "text" and data.captions is None:
        raise UserError(
            "model.conditioning: got text, but the prepared data has no captions. Set "
            "model.conditioning: none, or add captions.",
            run=("prepare",),
        )
    if config.train.balance == "classes" and (found := len(set(data.labels.tolist()))) < 2:
        raise UserError(
            f"train.balance: got classes, but the training images have "
            f"{'one class' if data.classes and found else 'no classes'}. Set train.balance: none, "
            "or put the images of each class into its own folder."
        )


# Warm start


@dataclass(frozen=True)
class Origin:
    """The network of `train.init`."""

    network: UNetConfig
    diffusion: dict[str, Any]  # the settings of that section; {} if there is no scheduler
    weights: dict[str, Tensor]
    classes: Sequence[str]  # () if unknown


def check_init_stays(config: Config, workspace: Workspace) -> None:
    """Raise UserError if `train.init` is a snapshot that the new run would move away."""
    origin, own = config.train.init, Path(workspace.uri, SNAPSHOTS)
    if origin is None or origin.startswith("models:/"):
        return
    if input_path(origin).resolve().is_relative_to(own.resolve()):
        raise UserError(
            f"train.init: got {origin}, a snapshot in this workspace, which this run would move "
            "away. Copy it elsewhere, or use another workspace (-w)."
        )


def open_origin(config: Config) -> Origin:
    """Read the network of `train.init`. Raises UserError if there is none, or Corrupt."""
    origin = config.train.init or ""
    if origin.startswith("models:/"):
        from ddpm_core.registry.models import download

        return _from_checkpoint(download(config, origin))
    folder = input_path(origin)
    if not folder.is_dir():
        raise UserError(
            f"train.init: got {origin!r}, which is not a folder. Use the folder of a checkpoint or "
            "of a diffusers pipeline, or a models:/ URI."
        )
    if (folder / "config.json").exists() and (folder / "manifest.json").exists():
        return _from_checkpoint(folder)
    from ddpm_core.interop.diffusers import import_folder

    found = import_folder(folder)
    process = found.diffusion and {**found.diffusion, "zero_terminal_snr": False}
    return Origin(found.network, process, found.weights, ())


def _from_checkpoint(folder: Path) -> Origin:
    checkpoint = Checkpoint.open(folder)
    model = checkpoint.load(_available(checkpoint), torch.device("cpu"))
    diffusion = checkpoint.params.diffusion.model_dump()
    return Origin(
        model.config, diffusion, dict(model.state_dict()), checkpoint.training_data.classes
    )


def _available(checkpoint: Checkpoint) -> float | str:
    """Return which weights to use: the first average, or in a registered model the scored ones."""
    train = checkpoint.params.train
    first = ema_name(train.ema[0]) if train.ema else WEIGHTS
    return "auto" if first in checkpoint.checksums else checkpoint.params.sample.ema


def check_origin(origin: Origin, network: UNetConfig, config: Config) -> str:
    """Raise UserError if the settings give the weights of `train.init` another meaning.

    Returns a note on differences that `train.init_diffusion: any` allows, or "".
    """
    structure = list(_network_differences(origin.network, network))
    process = [
        (f"diffusion.{name}", trained, wanted)
        for name, trained in origin.diffusion.items()
        if trained != (wanted := getattr(config.diffusion, name))
    ]
    if config.train.init_diffusion == "any" and process:
        allowed = ", ".join(_described(*difference) for difference in process)
        process = []
    else:
        allowed = ""
    if wrong := structure + process:
        lines = "\n".join(f"  {_described(*difference)}" for difference in wrong)
        options = " ".join(f"-S {shlex.quote(f'{name}={trained}')}" for name, trained, _ in wrong)
        or_any = "; or allow the difference: -S train.init_diffusion=any" if not structure else ""
        raise UserError(
            f"train.init: the network in {config.train.init} has different settings:\n{lines}\n"
            f"They must be equal. Use those of train.init: {options}{or_any}."
        )
    return allowed and f"train.init: {allowed}. Training has to adapt the weights to it."


def take_weights(model: UNet, origin: Origin, classes: Sequence[str]) -> str:
    """Copy the weights of an origin that `check_origin` accepts into `model`.

    `classes` are those of the data. Weights for a class, text or augmentation that the origin does
    not have keep their values. Returns a note on them, or "".
    """
    taken = {n: tensor for n, tensor in origin.weights.items() if not n.startswith(_CONDITION)}
    trained, wanted = origin.network.conditioning, model.config.conditioning
    note = ""
    if trained != wanted:
        rest = "" if wanted == "none" else "; the weights for it start from random values"
        difference = _described("model.conditioning", trained, wanted)
        note = f"{difference}. All other weights are used{rest}"
    elif wanted == "class":
        own = model.state_dict()[_CLASS_VECTORS].clone()
        taken[_CLASS_VECTORS], note = _class_vectors(origin, own, classes)
    else:
        taken = origin.weights
    if model.config.augmentation != origin.network.augmentation:
        taken = {n: tensor for n, tensor in taken.items() if not n.startswith(_AUGMENTATION)}
    if model.config.augmentation not in (0, origin.network.augmentation):
        fresh = "the weights for the parameters of train.augment start from random values"
        note = f"{note}; {fresh}" if note else fresh
    if model.config.cross_attention != origin.network.cross_attention:
        taken = {n: t for n, t in taken.items() if not any(part in n for part in _CROSS)}
        if trained == wanted:
            values = origin.network.cross_attention, model.config.cross_attention
            fresh = "; its weights start from random values" if model.config.cross_attention else ""
            note = _described("model.cross_attention", *values) + fresh
    model.load_state_dict({**model.state_dict(), **taken})
    return note and f"train.init: {note}."


def _class_vectors(origin: Origin, own: Tensor, classes: Sequence[str]) -> tuple[Tensor, str]:
    """Return the vectors of the classes, those of equal names from `origin`, and a note.

    `own` holds the vectors of `model`, and is changed.
    """
    given = origin.weights[_CLASS_VECTORS]
    same = set(origin.classes) & set(classes)
    if len(given) == len(own) and (not same or list(origin.classes) == list(classes)):
        renamed = origin.classes and not same
        return given, "its classes have different names; using them in order" if renamed else ""
    for name in same:
        own[classes.index(name)] = given[origin.classes.index(name)]
    own[-1] = given[-1]
    kept = f", except {', '.join(sorted(same))}" if same else ""
    return own, (
        f"it has {len(given) - 1} classes, this run has {len(own) - 1}. The vectors of the classes "
        f"start from random values{kept}"
    )


def _network_differences(origin: UNetConfig, network: UNetConfig) -> Iterable[tuple[str, Any, Any]]:
    """Yield each setting, with its two values, in which the weights have another meaning."""
    for name in (field.name for field in fields(UNetConfig) if field.name not in _MAY_DIFFER):
        setting = "prepare.channels" if name == "in_channels" else f"model.{name}"
        trained, wanted = (_plain(getattr(config, name)) for config in (origin, network))
        if trained != wanted:
            yield setting, trained, wanted
    # Attention belongs to a level of the network; the size of that level may differ.
    levels = [[size in config.attention for size in config.sizes] for config in (origin, network)]
    if levels[0] != levels[1]:
        trained = [size for size, has in zip(network.sizes, levels[0], strict=False) if has]
        yield "model.attention", trained, sorted(network.attention)


def _plain(value: Any) -> Any:
    """Return a value in the form that it has in a params file."""
    return list(value) if isinstance(value, tuple) else value


def _described(setting: str, trained: Any, wanted: Any) -> str:
    return f"{setting} is {trained} in train.init, {wanted} in this run"
