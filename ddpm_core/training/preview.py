"""A grid of images from a network in training, to look at while it learns."""

from __future__ import annotations

import torch

from ddpm_core.checkpoint import SETTINGS, WEIGHTS, ema_name
from ddpm_core.config import Config, Sample
from ddpm_core.models.config import UNetConfig
from ddpm_core.models.unet import UNet
from ddpm_core.sampling.images import enlarge, grid, png
from ddpm_core.sampling.sampler import ImageSampler
from ddpm_core.storage.workspace import GRID
from ddpm_core.training.snapshot import SnapshotContents

STEPS = 20


def preview(config: Config, device: torch.device, contents: SnapshotContents) -> dict[str, bytes]:
    """`grid.png` with `train.grid` images of a snapshot's first average, or of its raw weights."""
    settings, ema = contents.documents[SETTINGS], config.train.ema
    model = UNet(UNetConfig.from_dict(settings["network"]))
    model.load_state_dict(dict(contents.tensors[ema_name(ema[0]) if ema else WEIGHTS]))
    model = model.to(device).eval().requires_grad_(False)
    sampler = ImageSampler(model, settings["data"], _settings(config), config.diffusion)
    return {GRID: png(enlarge(grid(sampler.images(range(config.train.grid))), 512))}


def _settings(config: Config) -> Sample:
    steps = min(STEPS, config.diffusion.timesteps)
    return Sample(count=config.train.grid, batch_size=config.train.grid, steps=steps)
