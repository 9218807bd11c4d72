"""Small checkpoints with random weights."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ddpm_core import rng
from ddpm_core.checkpoint import MOMENTS, Checkpoint, Settings, TrainingData
from ddpm_core.config import load as params
from ddpm_core.models.config import UNetConfig
from ddpm_core.models.unet import UNet
from ddpm_core.rng import Purpose
from ddpm_core.storage import seal
from ddpm_core.training.snapshot import SavedExecution, SavedTotals, SnapshotContents, State
from support.moments import some_moments

CLASSES = ["circle", "square", "7"]


def write_checkpoint(
    folder: Path,
    conditioning: str = "none",
    seed: int = 0,
    step: int = 4,
    timesteps: int = 50,
    prediction: str = "v",
    groups: int | None = None,
    cross_attention: bool = False,
    **facts: Any,
) -> Checkpoint:
    """Write a checkpoint of 8x8 gray images: raw weights and an average of decay 0.9.

    Without `groups` of its norms, the network is one of an earlier version.
    """
    given = params.validate(
        {
            "prepare": {"image_size": 8},
            "model": {
                "channels": 8,
                "multipliers": [1, 2],
                "blocks": 1,
                "attention": [4],
                "conditioning": conditioning,
                "cross_attention": cross_attention,
            },
            "diffusion": {"timesteps": timesteps, "prediction": prediction},
            "train": {"ema": [0.9]},
            "sample": {"steps": 4, "seed": 5},
        }
    )
    network = UNetConfig(
        *(8, 1, 8, (1, 2), 1, (4,)),
        conditioning=conditioning,
        classes=len(CLASSES),
        norm_num_groups=groups,
        cross_attention=cross_attention,
    )
    folder.mkdir(parents=True)
    for number, name in enumerate(("model", "ema-0.9")):
        save_file(weights(network, seed + number), folder / f"{name}.safetensors")
    if given.diffusion.uses_moments:
        save_file(some_moments(1, 8, "dct").tensors(), folder / MOMENTS)
    settings = {
        "params": given.dump(),
        "network": asdict(network),
        "data": {
            "fingerprint": "feed",
            "classes": CLASSES,
            "class_counts": [3, 2, 1],
            "captions": [["a circle", 3], ["a square", 1]],
            "image_size": 8,
            "channels": 1,
            "count": 6,
            "source": {"uri": "shapes", "revision": "v1"},
            **facts,
        },
        "train_fingerprint": "cafe",
        "step": step,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    seal(folder)
    return Checkpoint.open(folder)


def empty_snapshot() -> SnapshotContents:
    """Return a snapshot without tensors, to test how snapshots are written."""
    totals = SavedTotals(loss=0.0, grad_norm=0.0, clipped=0.0, steps=0)
    execution = SavedExecution(precision="fp32", compile=False)
    state = State(step=0, execution=execution, scaler={}, totals=totals, history=[])
    data = TrainingData(
        fingerprint="feed",
        classes=[],
        class_counts=[],
        captions=[],
        image_size=8,
        channels=1,
        source={},
    )
    settings = Settings(step=0, params={}, network={}, data=data, train_fingerprint="cafe")
    return SnapshotContents({}, state, settings)


def spoil(folder: Path, value: float) -> None:
    """Set one value in every weights file of a checkpoint folder, and write a valid manifest."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        next(tensor for tensor in tensors.values() if tensor.is_floating_point()).view(-1)[0] = (
            value
        )
        save_file(tensors, file)
    (folder / "manifest.json").unlink()
    seal(folder)


@functools.cache
def weights(config: UNetConfig, seed: int) -> dict[str, torch.Tensor]:
    """Return random values for all weights of a network, also those that start at zero."""
    key = rng.key(Purpose.INIT, seed)
    tensors = {}
    for index, (name, tensor) in enumerate(UNet(config).state_dict().items()):
        noise = rng.normal(key, torch.tensor([index]), tuple(tensor.shape))[0]
        tensors[name] = 0.2 * noise + (1.0 if "norm" in name and tensor.dim() == 1 else 0.0)
    return tensors
