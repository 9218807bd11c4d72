"""The loss on fixed held-out and training images at fixed noise, by noise level, during training.

Both splits have the same timesteps, drawn from the static sampler of the run, and no flip, dropout
or dropped condition. So their losses differ only as far as the network knows the training images
better than the held-out ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ddpm_core.config import Train
from ddpm_core.console import say
from ddpm_core.data.dataset import PackedDataset, open_dataset
from ddpm_core.diffusion.objective import make_noise_levels
from ddpm_core.diffusion.process import make_schedule
from ddpm_core.rng import Purpose
from ddpm_core.storage.workspace import Workspace
from ddpm_core.tracking.validation import BINS, key
from ddpm_core.training.probe import Probe
from ddpm_core.training.state import TrainState, noise_level_settings

_COST = 0.015  # share of the time of training; with overheads it stays below 2 %
_FEWEST, _MOST = 64, 1024  # images per split
_PASSES = 4  # both splits, with the weights and with their average
_FORWARD = 1 / 3  # time of a forward pass per time of a training step


@dataclass(frozen=True)
class Validation:
    """The images of both splits, and the weight of each of their timesteps."""

    probes: dict[str, Probe]  # by split
    weight: Tensor  # float32 (n,), on the error of the network's own output

    @classmethod
    def create(
        cls, state: TrainState, workspace: Workspace, data: PackedDataset
    ) -> Validation | None:
        """Choose the images; None if there are no held-out images or validation is off."""
        config, device = state.config, state.world.device
        if not config.train.validate_every:
            return None
        held_out = open_dataset(workspace, "holdout")
        if not len(held_out):
            if state.world.rank == 0:
                say("train: without held-out images, their loss is not measured.")
            return None
        t, weight = _noise_levels(state, image_count(config.train))
        probes = {
            split: Probe.create(config, t, images, device, Purpose.VALIDATION)
            for split, images in (("held_out", held_out), ("train", data))
        }
        return cls(probes, weight)

    def measure(self, state: TrainState) -> dict[str, float]:
        """Return the losses for a row of the log, the same on every worker.

        `val_loss` is the mean over held-out images, as the static objective of the run weights
        them; `val_train_loss` is that over training images. `_ema` is for the first average of the
        weights, and `_bin1` (little noise) to `_bin8` are means over parts of equal probability.
        Evaluates the network, so that all workers must call it.
        """
        return dict(self._losses(state))

    def _losses(self, state: TrainState) -> Iterator[tuple[str, float]]:
        weights: list[tuple[str, AbstractContextManager[None]]] = [("", nullcontext())]
        weights += [("ema", state.emas[0].applied())] if state.emas else []
        for average, applied in weights:
            with applied:
                for split, probe in self.probes.items():
                    losses = (self.weight * probe.losses(state)).cpu().double()
                    yield key(split, average), float(losses.mean())
                    means = losses.view(BINS, -1).mean(1).tolist()
                    for i, mean in enumerate(means, start=1):
                        yield key(split, average, i), mean


def image_count(train: Train) -> int:
    """Return how many images of a split keep validation below 2 % of the time of training.

    It is a multiple of BINS, from 64, which takes more if `validate_every` is small, to 1,024.
    """
    count = _COST * train.validate_every * train.batch_size / (_PASSES * _FORWARD)
    return min(max(_FEWEST, math.floor(count / BINS) * BINS), _MOST)


def is_due(every: int, step: int, since: int) -> bool:
    """Return whether a multiple of `every` is among the last `since` steps up to `step`."""
    return step // every > (step - since) // every


def _noise_levels(state: TrainState, count: int) -> tuple[Tensor, Tensor]:
    """Return ascending timesteps, int64 (count,), and their weights, float32 (count,).

    They are the quantiles of the static probabilities, from which adaptive methods start. So the
    mean weighted loss is comparable during the whole run.
    """
    diffusion = state.config.diffusion
    schedule = make_schedule(diffusion.schedule, diffusion.timesteps, diffusion.zero_terminal_snr)
    settings = replace(noise_level_settings(state.config.train, state.moments), adaptive="none")
    levels = make_noise_levels(settings, schedule, state.prediction).to(state.world.device)
    places = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    cumulative = levels.probability.cpu().double().cumsum(0)
    t = torch.searchsorted(cumulative, places * cumulative[-1]).clamp(max=len(cumulative) - 1)
    return t, levels.weight(t.to(state.world.device))
