"""A grid of images from a network in training, to look at while it learns."""

from __future__ import annotations

from typing import Any

from ddpm_core.config import Config, Sample
from ddpm_core.generate.images import Generator
from ddpm_core.images import enlarge, grid, png
from ddpm_core.models.unet import UNet
from ddpm_core.training.state import TrainState

GRID = "grid.png"
STEPS = 20


def preview(state: TrainState, settings: dict[str, Any]) -> dict[str, bytes]:
    """`grid.png` with `train.grid` images of the first average, or of the raw weights."""
    count = state.config.train.grid
    if count == 0:
        return {}
    model = UNet(state.model.config).to(state.world.device)
    weights = state.emas[0].tensors if state.emas else state.model.state_dict()
    model.load_state_dict(weights)
    generator = Generator(
        model.eval(), settings["data"], _settings(state.config), state.config.diffusion
    )
    return {GRID: png(enlarge(grid(generator.images(range(count))), 512))}


def _settings(config: Config) -> Sample:
    steps = min(STEPS, config.diffusion.timesteps)
    return Sample(count=config.train.grid, batch_size=config.train.grid, steps=steps)
