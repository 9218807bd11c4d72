"""Checkpoints: a folder with the weights of a trained network and the settings to use them.

Snapshots and registered models are checkpoints. Neither needs the params file of its run. The
settings may have been written by another version of ddpm.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, InstanceOf, ValidationError

from ddpm_core.config import Config
from ddpm_core.config.recorded import other_version_error, read_params
from ddpm_core.config.train import width_of
from ddpm_core.errors import Corrupt, UserError
from ddpm_core.models.config import UNetConfig
from ddpm_core.problems import problems_of
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
    balance: Literal["none", "classes"] = "none"  # train.balance


class Settings(Schema):
    """The content of config.json, which describes a network without a params file."""

    step: Count
    ddpm: str | None = None  # the version that wrote it
    params: dict[str, Any]
    network: dict[str, Any]  # the fields of UNetConfig
    data: TrainingData
    train_fingerprint: str
    identity: dict[str, Any] = Field(default_factory=dict)  # see training.identity


def ema_name(average: float | str) -> str:
    """Return the name of the file of an average of the weights, an element of `train.ema`."""
    return f"ema-{average}.safetensors".replace(":", "-")


@dataclass(frozen=True)
class Checkpoint:
    """A folder with weights and settings whose checksums match.

    `guide` is the earlier checkpoint that guidance leads away from (sample.guide), if there is one.
    `earlier` are those whose power-function averages reconstruct another width (`with_earlier`).
    """

    folder: Path
    step: int
    params: Config
    network: UNetConfig
    training_data: TrainingData
    train_fingerprint: str
    checksums: dict[str, str]
    guide: Checkpoint | None = None
    earlier: tuple[Checkpoint, ...] = ()

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
        """Return the name of the file of some weights.

        `ema` is "none" for the raw weights, the decay or width of an average, or "auto" for the
        first average in train.ema. If there are power-function averages, any other width has a
        name too, but no file (`reconstructs`). Raises UserError if there are no such weights.
        """
        train = self.params.train
        if ema == "auto":
            ema = train.ema[0] if train.ema else "none"
        elif isinstance(ema, float) and ema not in train.ema and train.widths:
            ema = f"power:{ema}"
        name = WEIGHTS if ema == "none" else ema_name(ema)
        if name not in self.checksums and not (width_of(ema) and self._power_averages()):
            there = ", ".join(sorted(n for n in self.checksums if n.startswith("ema-")))
            raise UserError(
                f"sample.ema: {self.folder.name} has no {name}; available: {there or 'no average'}."
            )
        return name

    def reconstructs(self, ema: float | str) -> bool:
        """Return whether weights have no file, but are made from averages of other widths."""
        return self.weights_name(ema) not in self.checksums

    def weights_hash(self, ema: float | str = "auto") -> str:
        """Return a SHA-256 that identifies weights: of their file, or of how they are made."""
        if not self.reconstructs(ema):
            return self.checksums[self.weights_name(ema)]
        parts = [(part.step, part.checksums[name]) for part, name, _ in self._parts(float(ema))]
        return hashlib.sha256(json.dumps([ema, parts]).encode()).hexdigest()

    def used_files(self, ema: float | str) -> list[str]:
        """Return the names of the files, besides the settings, that drawing images requires."""
        weights = [self.weights_name(ema)]
        if self.reconstructs(ema):
            weights = [name for name, _ in self._power_averages()]
        return [*weights, *([MOMENTS] * self.params.diffusion.uses_moments)]

    def tensors(self, ema: float | str) -> dict[str, Tensor]:
        """Return weights, on the CPU; `ema` is as in `weights_name`.

        Raises Corrupt if weights and settings do not match.
        """
        if not self.reconstructs(ema):
            return self._read(self.weights_name(ema))
        total: dict[str, Tensor] = {}
        for part, name, coefficient in self._parts(float(ema)):
            for key, tensor in part._read(name).items():
                term = coefficient * tensor.double()
                total[key] = total[key] + term if key in total else term
        return {key: tensor.float() for key, tensor in total.items()}

    def load(self, ema: float | str, device: torch.device) -> UNet:
        """Return the network with the weights of `tensors`, in eval mode and without gradients."""
        return self._model(self.tensors(ema), device)

    def load_file(self, name: str, device: torch.device) -> UNet:
        """Return the network with the weights of a file, as `load` does."""
        return self._model(self._read(name), device)

    def _model(self, tensors: Mapping[str, Tensor], device: torch.device) -> UNet:
        from ddpm_core.models.unet import UNet

        model = UNet(self.network)
        model.load_state_dict(tensors)
        return model.to(device).eval().requires_grad_(False)

    def _read(self, name: str) -> dict[str, Tensor]:
        tensors = read_tensors(self.folder / name)
        must_fit(self.network, tensors, f"{self.folder.name}/{name}")
        return tensors

    def _power_averages(self) -> list[tuple[str, float]]:
        """Return the files of the power-function averages, and their widths."""
        named = [(ema_name(f"power:{width}"), width) for width in self.params.train.widths]
        return [(name, width) for name, width in named if name in self.checksums]

    def _parts(self, width: float) -> list[tuple[Checkpoint, str, float]]:
        """Return the averages that reconstruct a width: checkpoint, file and coefficient of each.

        Raises UserError if they do not represent it.
        """
        from ddpm_core.models import averages  # here, because it imports numpy

        sources = (*self.earlier, self)
        stored = [(part, *average) for part in sources for average in part._power_averages()]
        profiles = [averages.Profile(part.step, known) for part, _, known in stored]
        if expected := averages.problem(profiles, self.step, width):
            raise UserError(f"sample.ema: got {width}; {expected}.")
        found, _ = averages.reconstruct(profiles, averages.Profile(self.step, width))
        return [(part, name, x) for (part, name, _), x in zip(stored, found, strict=True)]


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
        raise other_version_error(name, what, made_by)
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


def with_earlier(
    workspace: Workspace, checkpoint: Checkpoint, ema: float | str, fetch: bool = False
) -> Checkpoint:
    """Return the checkpoint with the earlier ones that its weights are reconstructed from, if any.

    They are milestones of the same run, with their weights only if `fetch` is set. Raises UserError
    if their averages do not represent the width.
    """
    if not checkpoint.reconstructs(ema):
        return checkpoint
    from ddpm_core.models.averages import source_steps  # here, because it imports numpy

    step = checkpoint.step
    milestones = checkpoint.params.train.milestones(workspace.steps(SNAPSHOTS), step)
    chosen = [look_at_checkpoint(workspace, s) for s in source_steps(milestones, step)[:-1]]
    same = [c for c in chosen if c.train_fingerprint == checkpoint.train_fingerprint]
    earlier = [fetch_weights(workspace, c, ema) for c in same] if fetch else same
    found = replace(checkpoint, earlier=tuple(earlier))
    found.weights_hash(ema)  # raises UserError
    return found


def check_weights(workspace: Workspace, checkpoint: Checkpoint, ema: float | str) -> None:
    """Raise Corrupt unless the files that drawing with `ema` reads have their checksums.

    Includes the files of the guide and of earlier checkpoints. Of the other files only the sizes
    are checked: a checkpoint that is sampled may be registered later, which requires all of them.
    """
    key = snapshot_key(checkpoint.step)
    if damage := workspace.damage(key):
        raise Corrupt(damage)
    for name in checkpoint.used_files(ema):
        if workspace.storage.checksum(f"{key}/{name}") != checkpoint.checksums.get(name):
            raise Corrupt(f"{key}/{name} was changed or damaged: its checksum does not match.")
    for other in (*checkpoint.earlier, *filter(None, [checkpoint.guide])):
        check_weights(workspace, other, ema)


def fetch_weights(workspace: Workspace, checkpoint: Checkpoint, ema: float | str) -> Checkpoint:
    """Download what drawing with `ema` reads; return the checkpoint with the local folder.

    `checkpoint` comes from `look_at_checkpoint`. No other file of it is downloaded. Raises Corrupt
    if the weights were changed.
    """
    check_weights(workspace, checkpoint, ema)
    return _fetch(workspace, checkpoint, ema)


def _fetch(workspace: Workspace, checkpoint: Checkpoint, ema: float | str) -> Checkpoint:
    for name in checkpoint.used_files(ema):
        folder = workspace.path(f"{snapshot_key(checkpoint.step)}/{name}").parent
        inside(folder, name)
    guide = checkpoint.guide and _fetch(workspace, checkpoint.guide, ema)
    earlier = tuple(_fetch(workspace, part, ema) for part in checkpoint.earlier)
    return replace(checkpoint, folder=folder, guide=guide, earlier=earlier)


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
