"""A trained network as it lies in a folder: weights, and the settings that give them a meaning.

A snapshot is one, and so is a registered model: neither needs the params file it was made with.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpm_core import params
from ddpm_core.config import Config
from ddpm_core.errors import UserError
from ddpm_core.storage import Corrupt, verify
from ddpm_core.workspace import SNAPSHOTS, Workspace, snapshot_key

if TYPE_CHECKING:
    import torch

    from ddpm_core.models.unet import UNet

SETTINGS = "config.json"
WEIGHTS = "model.safetensors"


def ema_name(decay: float) -> str:
    return f"ema-{decay:g}.safetensors"


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
        """Read a folder. Raises Corrupt where a file is missing or is not what was written."""
        files: Any = verify(folder)["files"]
        try:
            settings = json.loads((folder / SETTINGS).read_bytes())
            return cls(
                folder=folder,
                step=int(settings["step"]),
                params=params.validate(settings["params"], f" in {SETTINGS}"),
                network=dict(settings["network"]),
                data=dict(settings["data"]),
                train_fingerprint=str(settings["train_fingerprint"]),
                checksums={name: str(file["sha256"]) for name, file in files.items()},
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Corrupt(f"{folder.name}/{SETTINGS} is damaged: {error!r}.") from error

    def weights_name(self, ema: float | str = "auto") -> str:
        """The file that holds the raw weights ("none"), those of a decay, or the first decay's."""
        if ema == "auto":
            decays = self.params.train.ema
            return ema_name(decays[0]) if decays else WEIGHTS
        name = WEIGHTS if ema == "none" else ema_name(float(ema))
        if name not in self.checksums:
            there = ", ".join(sorted(n for n in self.checksums if n.startswith("ema-")))
            raise UserError(f"{self.folder.name} has no {name}; it has {there or 'no average'}.")
        return name

    def weights_hash(self, ema: float | str = "auto") -> str:
        """SHA-256 of the weights file: what the images made with it depend on."""
        return self.checksums[self.weights_name(ema)]

    def load(self, ema: float | str, device: torch.device) -> UNet:
        """The network with its weights, in eval mode."""
        from safetensors.torch import load_file

        from ddpm_core.models.unet import UNet, UNetConfig

        model = UNet(UNetConfig.from_dict(self.network))
        name = self.weights_name(ema)
        try:
            model.load_state_dict(load_file(self.folder / name))
        except RuntimeError as error:
            raise Corrupt(
                f"{self.folder.name}/{name} does not fit its {SETTINGS}: {error}"
            ) from error
        return model.to(device).eval().requires_grad_(False)


def open_checkpoint(workspace: Workspace, step: int) -> Checkpoint:
    """The checkpoint of a step of this workspace. Raises UserError if there is none."""
    if step not in (steps := workspace.steps(SNAPSHOTS)):
        there = ", ".join(map(str, steps)) or "none; run `ddpm train` first"
        raise UserError(
            f"There is no checkpoint of step {step} in {workspace.uri} (there: {there})."
        )
    return Checkpoint.open(workspace.path(snapshot_key(step)))
