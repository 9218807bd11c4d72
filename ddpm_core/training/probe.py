"""The loss on fixed images at fixed noise and timesteps, so that two steps can be compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ddpm_core import rng
from ddpm_core.config import Config
from ddpm_core.data.dataset import PackedDataset, open_dataset
from ddpm_core.diffusion.probed import Probed
from ddpm_core.errors import UserError
from ddpm_core.rng import Purpose
from ddpm_core.sampling.images import to_model
from ddpm_core.storage.workspace import Workspace
from ddpm_core.training.state import TrainState
from ddpm_core.training.step import errors_of, read_images


@dataclass(frozen=True)
class Probe:
    """Images with their timesteps and conditions, the same on every worker."""

    pixels: Tensor  # uint8 (n, H, W, C)
    condition: Tensor | None  # as in step.Batch
    t: Tensor  # int64 (n,)
    purpose: Purpose = Purpose.PROBE  # of the draws of images and noise

    @classmethod
    def create(
        cls,
        config: Config,
        t: Tensor,
        data: PackedDataset,
        device: torch.device,
        purpose: Purpose = Purpose.PROBE,
    ) -> Probe:
        """Draw an image of `data` for each timestep of t, int64 (n,); few images are repeated."""
        place = rng.uniform(rng.key(purpose, config.seed), torch.arange(len(data)), ())
        order = np.argsort(place.numpy(), kind="stable")
        chosen = np.resize(order, len(t))
        return cls(*read_images(config, data, chosen, device), t.to(device), purpose)

    @torch.no_grad()
    def losses(self, state: TrainState) -> Tensor:
        """Return the unweighted loss of each image, float32 (n,), the same on every worker."""
        config, world = state.config, state.world
        losses = torch.zeros(len(self.t), device=world.device)
        share = world.share(len(self.t))
        most = -(-config.train.batch_size // (config.train.microbatches * world.size))
        if config.train.reduction == "exact":
            most = 1  # the size of a batch changes the rounding of its images
        for start in range(share.start, share.stop, most):
            rows = torch.arange(start, min(start + most, share.stop), device=world.device)
            losses[rows] = self._losses(state, rows)
        world.all_reduce_(losses)
        return losses

    def _losses(self, state: TrainState, rows: Tensor) -> Tensor:
        x0 = to_model(self.pixels[rows])
        # Step 0: the noise of an image is the same at every evaluation.
        noise = rng.normal(rng.key(self.purpose, state.config.seed), rows, x0.shape[1:], 0)
        condition = None if self.condition is None else self.condition[rows]
        return errors_of(state, x0, noise, self.t[rows], condition)


def observe(state: TrainState) -> None:
    """After a step, evaluate the probe and pass its losses to the adaptive method, if it is due."""
    levels = state.noise_levels
    if state.probe and isinstance(levels, Probed) and levels.probe_due(state.step):
        levels.observe(state.step, state.probe())
        state.watch.mark("compute")


def make_probe(
    state: TrainState, workspace: Workspace, data: PackedDataset
) -> Callable[[], Tensor] | None:
    """Return a function that evaluates the probe of the run's adaptive method; None without one.

    Raises UserError if the method needs held-out images and there are none.
    """
    levels = state.noise_levels
    if not isinstance(levels, Probed):
        return None
    if levels.images == "holdout":
        data = open_dataset(workspace, "holdout")
        if not len(data):
            raise UserError(
                "train.timesteps.adaptive: got held_out, but the data has no held-out images. Use "
                "a prepare.holdout above 0, or another method."
            )
    probe = Probe.create(state.config, levels.timesteps, data, state.world.device)
    return partial(probe.losses, state)
