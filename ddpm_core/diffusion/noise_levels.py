"""The timesteps that training draws and the weight of each in the loss.

Every weighting is defined on the squared error of x0, whatever the network predicts. The squared
error of a noise prediction is SNR times as large, and that of a v prediction SNR + 1 times, so the
weight is divided by that factor. To add a weighting or a sampler of timesteps, add a function to
WEIGHTINGS or TIMESTEP_SAMPLERS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ddpm_core.diffusion.predictions import Prediction
from ddpm_core.diffusion.process import Schedule, lookup

# Outside this range a ratio of SNRs can be 0/0 or inf/inf in float64. No schedule comes near it.
_SNR_RANGE = (1e-20, 1e20)
# Probabilities are summed as multiples of 2^-40, which represent a float32 of 1e-5 or more exactly.
_FRACTION_BITS = 40


@dataclass(frozen=True, eq=False)
class Statistics:
    """The timesteps and errors of the global batch of one training step.

    Attributes:
        t: int64 (B,).
        error: float32 (B,), each sample's unweighted loss (see LOSSES).
    """

    t: Tensor
    error: Tensor


@dataclass(frozen=True)
class NoiseLevelSettings:
    """How to draw and weight timesteps.

    Attributes:
        sampler: A name of TIMESTEP_SAMPLERS.
        weighting: A name of WEIGHTINGS.
        gamma: The bound of min_snr (default 5) or the power of p2 (default 1), above 0.
        k: The offset of p2, above 0.
    """

    sampler: str = "uniform"
    weighting: str = "uniform"
    gamma: float | None = None
    k: float = 1.0


class NoiseLevels:
    """The probability and the weight of each timestep.

    The tables are constant, unless a subclass sets `adaptive`. An adaptive subclass changes them in
    `update` by `set_tables_`, from the statistics alone: those are equal on every worker, so the
    tables stay equal. Any other state it has belongs in its `state_dict`, which every snapshot
    saves. Tables are changed in place, never replaced, so that a captured CUDA graph sees the
    change.
    """

    adaptive: ClassVar[bool] = False  # True: training calls `update` after every step

    def __init__(self, probability: Tensor, weight: Tensor) -> None:
        """Set the tables.

        Args:
            probability: (T,), sums to 1.
            weight: (T,), finite; multiplies the error of the network's own prediction.
        """
        self.probability = probability.to(torch.float32)
        self.weights = weight.to(torch.float32)
        self._cumulative = _cumulative(self.probability)

    def draw(self, uniforms: Tensor) -> Tensor:
        """Draw timesteps, int64 (B,), from uniform numbers (B,) in [0, 1), by the inverse CDF."""
        t = torch.searchsorted(self._cumulative, uniforms, right=True)
        return t.clamp(max=len(self._cumulative) - 1)

    def weight(self, t: Tensor) -> Tensor:
        """Return the weights of timesteps t (B,) on the network's own error, float32 (B,)."""
        return self.weights[t]

    def update(self, statistics: Statistics) -> None:
        """Change the tables after a step. Must not wait for the device. Does nothing here."""

    def set_tables_(self, probability: Tensor, weight: Tensor) -> None:
        """Fill the tables, (T,) each. Draws normalise probabilities that do not sum to 1."""
        self.probability.copy_(probability)
        self.weights.copy_(weight)
        self._cumulative.copy_(_cumulative(self.probability))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tables that a snapshot saves."""
        return {"probability": self.probability, "weight": self.weights}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore saved tables. Raises ValueError if their names or shapes do not match."""
        own = self.state_dict()
        shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
        given = {name: tuple(tensor.shape) for name, tensor in state.items()}
        if shapes != given:
            raise ValueError(f"noise levels: got tables {given}; must be {shapes}.")
        for name, tensor in own.items():
            tensor.copy_(state[name])
        self._cumulative.copy_(_cumulative(self.probability))

    def to(self, device: torch.device | str) -> NoiseLevels:
        """Move the tables, and every other tensor attribute, to a device; return self."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))
        return self


def make_noise_levels(
    settings: NoiseLevelSettings, schedule: Schedule, prediction: Prediction
) -> NoiseLevels:
    """Return the noise levels of a process for a network with this prediction.

    Raises:
        ValueError: A name is unknown or a number is out of range.
    """
    for name, number in (("gamma", settings.gamma), ("k", settings.k)):
        if number is not None and not 0.0 < number < float("inf"):
            raise ValueError(f"{name}: got {number}; must be a finite number above 0.")
    weigh = lookup(WEIGHTINGS, settings.weighting, "weighting")
    snr = schedule.snr.clamp(*_SNR_RANGE)
    weight = weigh(snr, prediction, settings) / prediction.error(snr)
    make = lookup(TIMESTEP_SAMPLERS, settings.sampler, "timesteps.sampler")
    return make(schedule, weight, settings)


# Maps the SNR of every timestep, float64 (T,), to its weight on the squared error of x0, (T,).
Weighting = Callable[[Tensor, Prediction, NoiseLevelSettings], Tensor]


def uniform_weight(snr: Tensor, prediction: Prediction, settings: NoiseLevelSettings) -> Tensor:
    """Weight the error of the network's own prediction by 1: L_simple of Ho et al. (2020), eq. 14.

    On the error of x0 that is SNR for noise, 1 for x0 and SNR + 1 for v: three different
    objectives.
    """
    return prediction.error(snr)


def min_snr(snr: Tensor, prediction: Prediction, settings: NoiseLevelSettings) -> Tensor:
    """Weight the error of x0 by min(SNR, gamma), gamma = 5 by default.

    One objective for all predictions: on the network's own error this is min(SNR, gamma) / SNR for
    noise and min(SNR, gamma) / (SNR + 1) for v. Hang et al. (2023), "Efficient diffusion
    training via Min-SNR weighting strategy", section 3.4.
    """
    return snr.clamp(max=5.0 if settings.gamma is None else settings.gamma)


def p2(snr: Tensor, prediction: Prediction, settings: NoiseLevelSettings) -> Tensor:
    """Weight the error of x0 by SNR / (k + SNR)^gamma, k = 1 and gamma = 1 by default.

    On the error of a noise prediction this is 1 / (k + SNR)^gamma. Choi et al. (2022),
    "Perception prioritized training of diffusion models", eq. 8.
    """
    return snr / (settings.k + snr) ** (1.0 if settings.gamma is None else settings.gamma)


WEIGHTINGS: dict[str, Weighting] = {"uniform": uniform_weight, "min_snr": min_snr, "p2": p2}


def uniform_timesteps(
    schedule: Schedule, weight: Tensor, settings: NoiseLevelSettings
) -> NoiseLevels:
    """Draw every timestep with p(t) = 1 / T (Ho et al. 2020, algorithm 1)."""
    return NoiseLevels(torch.full_like(schedule.betas, 1.0 / schedule.timesteps), weight)


# Maps a process and its weights on the network's own error, float64 (T,), to noise levels.
MakeLevels = Callable[[Schedule, Tensor, NoiseLevelSettings], NoiseLevels]
TIMESTEP_SAMPLERS: dict[str, MakeLevels] = {"uniform": uniform_timesteps}


def _cumulative(probability: Tensor) -> Tensor:
    """Return P(t <= i) for each timestep i, float32 (T,).

    Sums of integers are the same on every device, whatever the order of summation; float32 results
    compare alike everywhere. No operation waits for the device.
    """
    total = (probability * 2.0**_FRACTION_BITS).round().to(torch.int64).cumsum(0)
    wide = total.to(torch.float32 if total.device.type == "mps" else torch.float64)
    return (wide / wide[-1]).to(torch.float32)
