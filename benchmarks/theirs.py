"""The training step and the sampling of diffusers, as in its training example, in fp32 or bf16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.training_utils import EMAModel
from torch.nn import functional

from benchmarks.networks import Network
from ddpm_core.models.config import group_count
from ddpm_core.runtime.device import autocast

CPU = torch.device("cpu")


def unet(network: Network) -> UNet2DModel:
    """Return the UNet2DModel of the same structure, with as many groups per norm as that of ddpm.

    The default of 32 groups would erase the time embedding of levels with 32 channels.
    """
    model = network.config.model
    sizes = [network.image_size // 2**level for level in range(len(model.multipliers))]
    attends = [size in model.attention for size in sizes]
    return UNet2DModel(
        sample_size=network.image_size,
        in_channels=network.channels,
        out_channels=network.channels,
        block_out_channels=tuple(model.channels * multiplier for multiplier in model.multipliers),
        layers_per_block=model.blocks,
        down_block_types=tuple("AttnDownBlock2D" if a else "DownBlock2D" for a in attends),
        up_block_types=tuple("AttnUpBlock2D" if a else "UpBlock2D" for a in reversed(attends)),
        attention_head_dim=None,
        norm_num_groups=group_count(model.channels),
        dropout=model.dropout,
    )


def train_step(
    network: Network, device: torch.device = CPU, precision: str = "fp32"
) -> Callable[[], None]:
    """Return a function that runs one step (noise, loss, backward, clip, Adam, EMA)."""
    model, scheduler = unet(network).train().to(device), DDPMScheduler()
    settings = network.config.train
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.optimizer.lr)
    ema = EMAModel(model.parameters(), decay=settings.ema[0])
    shape = (network.batch, network.channels, network.image_size, network.image_size)
    images = torch.rand(shape, device=device) * 2 - 1
    timesteps = scheduler.config.num_train_timesteps

    def run() -> None:
        noise = torch.randn(images.shape, device=device)
        t = torch.randint(0, timesteps, (network.batch,), device=device)
        with autocast(precision, device):
            output = model(scheduler.add_noise(images, noise, t), t).sample
        loss: Any = functional.mse_loss(output.float(), noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.optimizer.clip)
        optimizer.step()
        optimizer.zero_grad()
        ema.step(model.parameters())

    return run


def denoise(
    network: Network, device: torch.device = CPU, precision: str = "fp32"
) -> Callable[[], None]:
    """Return a function that draws one batch with DDPMScheduler, in `network.steps` updates."""
    model, scheduler = unet(network).eval().to(device), DDPMScheduler()
    shape = (network.sample_batch, network.channels, network.image_size, network.image_size)

    @torch.no_grad()
    def run() -> None:
        x = torch.randn(shape, device=device)
        scheduler.set_timesteps(network.steps)
        for t in scheduler.timesteps:
            with autocast(precision, device):
                output = model(x, t).sample
            x = scheduler.step(output.float(), t, x).prev_sample
        ((x / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).cpu()

    return run
