"""A trained network as it lies in a folder: weights, and the settings that give them a meaning.

A snapshot is one, and so is a registered model: neither needs the params file it was made with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, InstanceOf

from ddpm_core.config import Config
from ddpm_core.errors import Corrupt, UserError
from ddpm_core.storage import MANIFEST, verify
from ddpm_core.storage.files import (
    Count,
    Schema,
    inside,
    parse_object,
    read_object,
    read_tensors,
    validated,
)
from ddpm_core.storage.sealing import listed
from ddpm_core.storage.workspace import SNAPSHOTS, Workspace, snapshot_key, step_name
from ddpm_core.versions import of_another_version, read_params

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ddpm_core.models.config import UNetConfig
    from ddpm_core.models.unet import UNet

SETTINGS = "config.json"
WEIGHTS = "model.safetensors"


Small = Annotated[int, Field(ge=1, le=2**20)]


class Network(Schema):
    """Fields of models.unet.UNetConfig."""

    image_size: Small
    in_channels: Literal[1, 3]
    channels: Small
    multipliers: Annotated[list[Annotated[float, Field(gt=0, le=2**20)]], Field(max_length=16)]
    blocks: Small
    attention: list[Small]
    heads: Small
    dropout: float
    conditioning: Literal["none", "class", "text"]
    classes: Annotated[int, Field(ge=0, le=2**20)]
    downsample_padding: Literal[0, 1] = 0
    flip_sin_to_cos: bool = False
    freq_shift: float = 1
    norm_eps: float = 1e-6
    norm_num_groups: Small | None = None
    attention_head_dim: Small | None = None
    attention_up: list[Count] | None = None


class Data(Schema):
    """What a network was trained on."""

    fingerprint: str
    classes: list[InstanceOf[str]]  # of file names, which may be no UTF-8
    class_counts: list[Count]
    captions: list[Annotated[list[InstanceOf[str] | Count], Field(min_length=2, max_length=2)]]
    image_size: Small
    channels: Literal[1, 3]
    source: dict[str, Any]


class Settings(Schema):
    """All of config.json that is used."""

    step: Count
    ddpm: str | None = None  # the version that wrote it
    params: dict[str, Any]
    network: Network
    data: Data
    train_fingerprint: str


def ema_name(decay: float) -> str:
    return f"ema-{decay}.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A folder with weights and settings; its checksums hold."""

    folder: Path
    step: int
    params: Config
    network: dict[str, Any]  # fields of models.unet.UNetConfig
    data: dict[str, Any]  # fingerprint, classes, class_counts, captions, image_size, channels
    train_fingerprint: str
    checksums: dict[str, str]

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read a folder. Raises Corrupt where a file is missing or is not what was written.

        Raises UserError where it is whole, and another version's.
        """
        files: Any = verify(folder)["files"]
        name = f"{folder.name}/{SETTINGS}"
        if SETTINGS not in files:
            raise Corrupt(f"{folder.name} has no {SETTINGS} among the files that were written.")
        try:
            settings = validated(read_object(folder / SETTINGS, name), Settings, name)
        except OSError as error:
            raise Corrupt(f"{name} cannot be read: {error.strerror}.") from error
        return cls._of(folder, {name: file["sha256"] for name, file in files.items()}, settings)

    @classmethod
    def _of(cls, folder: Path, checksums: dict[str, str], settings: dict[str, Any]) -> Checkpoint:
        name = f"{folder.name}/{SETTINGS}"
        _must_agree(settings["network"], settings["data"], name)
        made = settings.get("ddpm")
        if unknown := sorted(settings["network"].keys() - Network.model_fields.keys()):
            raise of_another_version(name, f"has a network with {', '.join(unknown)}.", made)
        return cls(
            folder=folder,
            step=settings["step"],
            params=read_params(settings["params"], name, made),
            network=settings["network"],
            data=settings["data"],
            train_fingerprint=settings["train_fingerprint"],
            checksums=checksums,
        )

    def weights_name(self, ema: float | str = "auto") -> str:
        """The file that holds the raw weights ("none"), those of a decay, or the first decay's."""
        if ema == "auto":
            decays = self.params.train.ema
            ema = decays[0] if decays else "none"
        name = WEIGHTS if ema == "none" else ema_name(float(ema))
        if name not in self.checksums:
            there = ", ".join(sorted(n for n in self.checksums if n.startswith("ema-")))
            raise UserError(f"{self.folder.name} has no {name}; it has {there or 'no average'}.")
        return name

    def weights_hash(self, ema: float | str = "auto") -> str:
        """SHA-256 of the weights file: what the images made with it depend on."""
        return self.checksums[self.weights_name(ema)]

    def load(self, ema: float | str, device: torch.device) -> UNet:
        """The network with its weights, in eval mode. Raises Corrupt where they don't fit."""
        from ddpm_core.models.config import UNetConfig
        from ddpm_core.models.unet import UNet

        name = self.weights_name(ema)
        tensors = read_tensors(self.folder / name)
        try:
            config = UNetConfig.from_dict(self.network)
        except (ValueError, TypeError) as error:
            raise Corrupt(f"{self.folder.name}/{SETTINGS} is damaged: {error}") from error
        must_fit(config, tensors, f"{self.folder.name}/{name}")
        model = UNet(config)
        model.load_state_dict(tensors)
        return model.to(device).eval().requires_grad_(False)


def must_fit(config: UNetConfig, tensors: Mapping[str, Tensor], name: str) -> None:
    """Raise Corrupt unless the tensors are those of the network, before it takes any memory."""
    wanted = outline(config, tensors, name).state_dict()
    for key in sorted({*wanted, *tensors}):
        shapes = [
            tuple(group[key].shape) if key in group else "none" for group in (wanted, tensors)
        ]
        if shapes[0] != shapes[1]:
            raise Corrupt(
                f"{name} does not fit its {SETTINGS}: {key[:200]} has shape {shapes[1]}; "
                f"{shapes[0]} is needed."
            )
        if not tensors[key].is_floating_point():
            raise Corrupt(f"{name} is damaged: {key[:200]} is {tensors[key].dtype}.")


def outline(config: UNetConfig, tensors: Mapping[str, Tensor], name: str) -> UNet:
    """The network without memory for its weights. Raises Corrupt.

    One of more layers or channels than the tensors can be would take memory all the same.
    """
    from ddpm_core.models.unet import UNet

    longest = max((size for tensor in tensors.values() for size in tensor.shape), default=0)
    if config.blocks * len(config.multipliers) > len(tensors) or max(config.widths) > longest:
        raise Corrupt(f"{name} holds a smaller network than its {SETTINGS} asks for.")
    try:
        return UNet(config, device="meta")
    except (RuntimeError, TypeError, ValueError) as error:
        raise Corrupt(f"{name} holds no network: {error}.") from error


def _must_agree(network: dict[str, Any], data: dict[str, Any], name: str) -> None:
    """Raise Corrupt where the network is not one for such data."""
    sizes = [(network["image_size"], network["in_channels"])]
    sizes += [(data["image_size"], data["channels"])]
    if sizes[0] != sizes[1]:
        raise Corrupt(f"{name} is damaged: images of {sizes[1]}, a network for {sizes[0]}.")
    if network["conditioning"] == "class":
        numbers = {network["classes"], len(data["classes"]), len(data["class_counts"])}
        if len(numbers) > 1 or not sum(data["class_counts"]):
            raise Corrupt(f"{name} is damaged: numbers of classes {sorted(numbers)}.")
    for text, count in data["captions"]:
        if not isinstance(text, str) or not isinstance(count, int):
            raise Corrupt(f"{name} is damaged: a caption is {[text, count]!r:.200}.")


def open_checkpoint(workspace: Workspace, step: int) -> Checkpoint:
    """The checkpoint of a step of this workspace. Raises UserError if there is none."""
    must_be_there(workspace, step)
    return of_step(step, Checkpoint.open(workspace.path(snapshot_key(step))))


def look_at_checkpoint(workspace: Workspace, step: int) -> Checkpoint:
    """What its manifest and settings say: its weights are not fetched, and not looked at."""
    must_be_there(workspace, step)
    key, storage = snapshot_key(step), workspace.storage
    name = f"{step_name(step)}/{SETTINGS}"
    try:
        files = listed(storage.read(f"{key}/{MANIFEST}"), step_name(step))
        data = storage.read(f"{key}/{SETTINGS}")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Corrupt(f"{step_name(step)} was not written to its end.") from error
    checksums = {file: sha256 for file, (_, sha256) in files.items()}
    if hashlib.sha256(data).hexdigest() != checksums.get(SETTINGS):
        raise Corrupt(f"{name} was changed or damaged: its checksum differs.")
    settings = validated(parse_object(data, name), Settings, name)
    return of_step(step, Checkpoint._of(Path(step_name(step)), checksums, settings))


def check_weights(workspace: Workspace, checkpoint: Checkpoint, ema: float | str) -> None:
    """Raise Corrupt unless the file that `load(ema)` reads is as it was written.

    Of the others the sizes are looked at: what is sampled may be registered, which takes them all.
    """
    key = snapshot_key(checkpoint.step)
    if damage := workspace.damage(key):
        raise Corrupt(damage)
    name = checkpoint.weights_name(ema)
    if workspace.storage.checksum(f"{key}/{name}") != checkpoint.checksums[name]:
        raise Corrupt(f"{key}/{name} was changed or damaged: its checksum differs.")


def fetch_weights(workspace: Workspace, checkpoint: Checkpoint, ema: float | str) -> Checkpoint:
    """One that was looked at, with the weights that `load(ema)` reads on this machine.

    Of a snapshot in S3 nothing else is copied. Raises Corrupt where they are not what was written.
    """
    check_weights(workspace, checkpoint, ema)
    name = checkpoint.weights_name(ema)
    folder = workspace.path(f"{snapshot_key(checkpoint.step)}/{name}").parent
    inside(folder, name)
    return replace(checkpoint, folder=folder)


def must_be_there(workspace: Workspace, step: int) -> None:
    """Raise UserError, with the steps there are, where there is no checkpoint of a step."""
    if not workspace.storage.exists(snapshot_key(step)):
        steps = workspace.steps(SNAPSHOTS)
        there = ", ".join(map(str, steps)) or "none; run `ddpm train` first"
        raise UserError(
            f"There is no checkpoint of step {step} in {workspace.uri} (there: {there})."
        )


def of_step(step: int, checkpoint: Checkpoint) -> Checkpoint:
    """The same, if it says that it is of this step. Raises Corrupt."""
    if checkpoint.step != step:
        raise Corrupt(f"The checkpoint of step {step} says that it is of step {checkpoint.step}.")
    return checkpoint
