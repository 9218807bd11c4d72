"""Checkpoints: a folder with the weights of a trained network and the settings to use them.

Snapshots and registered models are checkpoints. Neither needs the params file of its run. The
settings may have been written by another version of ddpm.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, Field, InstanceOf, ValidationError

from ddpm_core import __version__
from ddpm_core.config import Config
from ddpm_core.config import load as params
from ddpm_core.errors import Corrupt, UserError
from ddpm_core.models.config import UNetConfig
from ddpm_core.problems import fields_of, problems_of, section_of
from ddpm_core.storage import MANIFEST, verify
from ddpm_core.storage.files import (
    Count,
    Schema,
    as_model,
    inside,
    parse_model,
    read_object,
    read_tensors,
)
from ddpm_core.storage.manifest import parse_manifest
from ddpm_core.storage.workspace import SNAPSHOTS, Workspace, snapshot_key, step_name

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ddpm_core.models.unet import UNet

SETTINGS = "config.json"
WEIGHTS = "model.safetensors"
MOMENTS = "moments.safetensors"  # of the training images, if the prediction uses them
GUIDE = "guide.safetensors"  # in a registered model: the weights of its guide (sample.guide)

# Sections without which a network has no meaning. Keys that another version of ddpm added to other
# sections are ignored; unknown keys in these are an error.
NEEDED = ("model", "diffusion", "train", "sample")


# A text and how many images have it. JSON has no tuples, so a list must be accepted too.
Caption = Annotated[tuple[InstanceOf[str], Count], Field(strict=False)]


class TrainingData(Schema):
    """The data that a network was trained on."""

    fingerprint: str
    classes: list[InstanceOf[str]]  # from file names, which may not be UTF-8
    class_counts: list[Count]
    captions: list[Caption]
    image_size: Annotated[int, Field(ge=1, le=2**20)]
    channels: Literal[1, 3]
    source: dict[str, Any]
    count: Count | None = None  # of the images; earlier versions wrote none


class Settings(Schema):
    """The content of config.json, which describes a network without a params file."""

    step: Count
    ddpm: str | None = None  # the version that wrote it
    params: dict[str, Any]
    network: dict[str, Any]  # the fields of UNetConfig
    data: TrainingData
    train_fingerprint: str
    identity: dict[str, Any] = Field(default_factory=dict)  # see training.identity


def ema_name(decay: float) -> str:
    """Return the name of the file with the moving average of the weights."""
    return f"ema-{decay}.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A folder with weights and settings whose checksums match.

    `guide` is the earlier checkpoint that guidance leads away from (sample.guide), if there is one.
    """

    folder: Path
    step: int
    params: Config
    network: UNetConfig
    training_data: TrainingData
    train_fingerprint: str
    checksums: dict[str, str]
    guide: Checkpoint | None = None

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read a folder.

        Raises:
            Corrupt: A file is missing or was changed.
            UserError: The checkpoint is intact, but another version of ddpm is required.
        """
        files = verify(folder).files
        name = f"{folder.name}/{SETTINGS}"
        if SETTINGS not in files:
            raise Corrupt(f"{folder.name} is damaged: its manifest does not list {SETTINGS}.")
        try:
            settings = as_model(read_object(folder / SETTINGS, name), Settings, name)
        except OSError as error:
            raise Corrupt(f"{name} cannot be read: {error.strerror}.") from error
        return cls._of(folder, {name: file.sha256 for name, file in files.items()}, settings)

    @classmethod
    def _of(cls, folder: Path, checksums: dict[str, str], settings: Settings) -> Checkpoint:
        name = f"{folder.name}/{SETTINGS}"
        network = _network(settings.network, name, settings.ddpm)
        _check_agreement(network, settings.data, name)
        return cls(
            folder=folder,
            step=settings.step,
            params=read_params(settings.params, name, settings.ddpm),
            network=network,
            training_data=settings.data,
            train_fingerprint=settings.train_fingerprint,
            checksums=checksums,
        )

    @property
    def data(self) -> dict[str, Any]:
        """The training data as plain data."""
        return self.training_data.model_dump(exclude_unset=True)

    def weights_name(self, ema: float | str = "auto") -> str:
        """Return the name of a weights file.

        `ema` is "none" for the raw weights, a decay for their average, or "auto" for the average of
        the first decay in train.ema. Raises UserError if there is no such file.
        """
        if ema == "auto":
            decays = self.params.train.ema
            ema = decays[0] if decays else "none"
        name = WEIGHTS if ema == "none" else ema_name(float(ema))
        if name not in self.checksums:
            there = ", ".join(sorted(n for n in self.checksums if n.startswith("ema-")))
            raise UserError(
                f"sample.ema: {self.folder.name} has no {name}; available: {there or 'no average'}."
            )
        return name

    def weights_hash(self, ema: float | str = "auto") -> str:
        """Return the SHA-256 of a weights file; `ema` is as in `weights_name`."""
        return self.checksums[self.weights_name(ema)]

    def used_files(self, ema: float | str) -> list[str]:
        """Return the names of the files, besides the settings, that drawing images requires."""
        return [self.weights_name(ema), *([MOMENTS] * self.params.diffusion.uses_moments)]

    def load(self, ema: float | str, device: torch.device) -> UNet:
        """Return the network with its weights, in eval mode and without gradients.

        `ema` is as in `weights_name`. Raises Corrupt if weights and settings do not match.
        """
        return self.load_file(self.weights_name(ema), device)

    def load_file(self, name: str, device: torch.device) -> UNet:
        """Return the network with the weights of a file, as `load` does."""
        from ddpm_core.models.unet import UNet

        tensors = read_tensors(self.folder / name)
        must_fit(self.network, tensors, f"{self.folder.name}/{name}")
        model = UNet(self.network)
        model.load_state_dict(tensors)
        return model.to(device).eval().requires_grad_(False)


def must_fit(config: UNetConfig, tensors: Mapping[str, Tensor], name: str) -> None:
    """Raise Corrupt unless the tensors are those of the network; allocates no memory for them."""
    expected = outline(config, tensors, name).state_dict()
    for key in sorted({*expected, *tensors}):
        shapes = [
            tuple(group[key].shape) if key in group else "none" for group in (expected, tensors)
        ]
        if shapes[0] != shapes[1]:
            raise Corrupt(
                f"{name} does not match its {SETTINGS}: {key[:200]} has shape {shapes[1]}; must be "
                f"{shapes[0]}."
            )
        if not tensors[key].is_floating_point():
            raise Corrupt(
                f"{name} is damaged: {key[:200]} has dtype {tensors[key].dtype}; must be a float."
            )


def outline(config: UNetConfig, tensors: Mapping[str, Tensor], name: str) -> UNet:
    """Return the network without memory for its weights.

    Raises Corrupt if the config asks for more layers or channels than the tensors have: even
    without weights, the modules of a huge network would take memory.
    """
    from ddpm_core.models.unet import UNet

    longest = max((size for tensor in tensors.values() for size in tensor.shape), default=0)
    if config.blocks * len(config.multipliers) > len(tensors) or max(config.widths) > longest:
        raise Corrupt(f"{name} contains a smaller network than its {SETTINGS} describes.")
    try:
        return UNet(config, device="meta")
    except (RuntimeError, TypeError, ValueError) as error:
        raise Corrupt(f"{name} does not contain a valid network: {error}.") from error


def _network(fields: dict[str, Any], name: str, made_by: str | None) -> UNetConfig:
    """Return the network of a config.json. Raises Corrupt, or UserError for another version."""
    names = {field.name for field in dataclasses.fields(UNetConfig)}
    known = {field: value for field, value in fields.items() if field in names}
    try:
        network = UNetConfig.from_dict(known)
    except ValidationError as error:
        found = problems_of(error, UNetConfig)
        raise Corrupt(f"The network in {name} is damaged:", found) from error
    if unknown := sorted(fields.keys() - known.keys()):
        what = f"has unknown network fields: {', '.join(unknown)}."
        raise _other_version_error(name, what, made_by)
    return network


def _check_agreement(network: UNetConfig, data: TrainingData, name: str) -> None:
    """Raise Corrupt if the network does not match the images or classes."""
    images = (data.image_size, data.channels)
    if (network.image_size, network.in_channels) != images:
        raise Corrupt(
            f"{name} is damaged: the network is for images of {network.image_size} pixels and "
            f"{network.in_channels} channels, the data has {images[0]} and {images[1]}."
        )
    if network.conditioning == "class":
        counts = {network.classes, len(data.classes), len(data.class_counts)}
        if len(counts) > 1 or not sum(data.class_counts):
            raise Corrupt(
                f"{name} is damaged: its numbers of classes, {sorted(counts)}, must be equal, and "
                "there must be images."
            )


def read_params(given: dict[str, Any], name: str, made_by: str | None) -> Config:
    """Return the Config of a checkpoint's params.

    Unknown keys outside the sections in NEEDED are ignored. `name` is the file's name, `made_by`
    the version that wrote it, if recorded.

    Raises:
        UserError: The params may be valid for another version of ddpm.
        Corrupt: The params are invalid for every version.
    """
    sections = {key: _known(value, key) for key, value in given.items() if key in fields_of(Config)}
    needed = {key: value for key, value in sections.items() if key in NEEDED}
    if unknown := list(_unknown(needed, Config)):
        raise _other_version_error(name, f"has unknown settings: {', '.join(unknown)}.", made_by)
    try:
        return params.validate(sections, name)
    except UserError as error:
        if made_by in (None, __version__):
            raise Corrupt(f"{error!s:.1000}") from error
        raise _other_version_error(
            name, f"is invalid for this version: {error}", made_by
        ) from error


def _other_version_error(name: str, what: str, made_by: str | None) -> UserError:
    """Return the error for an intact file that this version cannot use."""
    other = f"ddpm {made_by}" if made_by and made_by != __version__ else "another version of ddpm"
    return UserError(
        f"{name} {what:.1000}\nIt was written by {other}; this is {__version__}. Install that "
        "version to use it."
    )


def _known(section: Any, name: str) -> Any:
    """Return a section outside NEEDED without its unknown keys, and any other unchanged."""
    model = section_of(fields_of(Config)[name])
    if model is None or name in NEEDED or not isinstance(section, dict):
        return section
    return {key: value for key, value in section.items() if key in fields_of(model)}


def _unknown(given: Mapping[str, Any], model: type[BaseModel], prefix: str = "") -> Iterable[str]:
    """Yield the dotted names of keys that no section has."""
    for key, value in given.items():
        field = fields_of(model).get(key)
        if field is None:
            yield f"{prefix}{key}"
        elif isinstance(value, dict) and (section := section_of(field)):
            yield from _unknown(value, section, f"{prefix}{key}.")


def open_checkpoint(workspace: Workspace, step: int) -> Checkpoint:
    """Return the checkpoint of a step. Raises UserError if there is none, Corrupt if damaged."""
    must_be_there(workspace, step)
    return of_step(step, Checkpoint.open(workspace.path(snapshot_key(step))))


def look_at_checkpoint(workspace: Workspace, step: int) -> Checkpoint:
    """Return the checkpoint of a step from its manifest and settings, without its weights.

    Nothing else is downloaded or checked. Raises UserError if there is none, Corrupt if damaged.
    """
    must_be_there(workspace, step)
    key, storage = snapshot_key(step), workspace.storage
    name = f"{step_name(step)}/{SETTINGS}"
    try:
        files = parse_manifest(storage.read(f"{key}/{MANIFEST}"), step_name(step)).files
        data = storage.read(f"{key}/{SETTINGS}")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Corrupt(f"{step_name(step)} is incomplete: writing it was interrupted.") from error
    checksums = {name: file.sha256 for name, file in files.items()}
    if hashlib.sha256(data).hexdigest() != checksums.get(SETTINGS):
        raise Corrupt(f"{name} was changed or damaged: its checksum does not match.")
    settings = parse_model(data, Settings, name)
    return of_step(step, Checkpoint._of(Path(step_name(step)), checksums, settings))


def check_weights(workspace: Workspace, checkpoint: Checkpoint, ema: float | str) -> None:
    """Raise Corrupt unless the files that drawing with `ema` reads have their checksums.

    Of the other files only the sizes are checked: a checkpoint that is sampled may be registered
    later, which requires all of them.
    """
    key = snapshot_key(checkpoint.step)
    if damage := workspace.damage(key):
        raise Corrupt(damage)
    for name in checkpoint.used_files(ema):
        if workspace.storage.checksum(f"{key}/{name}") != checkpoint.checksums.get(name):
            raise Corrupt(f"{key}/{name} was changed or damaged: its checksum does not match.")


def fetch_weights(workspace: Workspace, checkpoint: Checkpoint, ema: float | str) -> Checkpoint:
    """Download what drawing with `ema` reads; return the checkpoint with the local folder.

    `checkpoint` comes from `look_at_checkpoint`. No other file of it is downloaded. Raises Corrupt
    if the weights were changed.
    """
    check_weights(workspace, checkpoint, ema)
    for name in checkpoint.used_files(ema):
        folder = workspace.path(f"{snapshot_key(checkpoint.step)}/{name}").parent
        inside(folder, name)
    guide = checkpoint.guide and fetch_weights(workspace, checkpoint.guide, ema)
    return replace(checkpoint, folder=folder, guide=guide)


def must_be_there(workspace: Workspace, step: int) -> None:
    """Raise UserError, which lists the available steps, if a step has no checkpoint."""
    if not workspace.storage.exists(snapshot_key(step)):
        steps = workspace.steps(SNAPSHOTS)
        available = ", ".join(map(str, steps)) or "none"
        raise UserError(
            f"There is no checkpoint of step {step} in {workspace.uri} (available: {available}).",
            run=() if steps else ("train",),
        )


def of_step(step: int, checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint if its settings name this step. Raises Corrupt otherwise."""
    if checkpoint.step != step:
        raise Corrupt(
            f"The checkpoint of step {step} is damaged: {SETTINGS} names step {checkpoint.step}."
        )
    return checkpoint
