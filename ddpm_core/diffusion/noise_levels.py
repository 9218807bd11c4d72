"""Which timesteps training visits, and how much each counts: one object owns both.

A weighting is defined once, on the squared error of x0; for a network that predicts the noise or v
it is divided by the SNR or by SNR + 1, the error of such an output for one of x0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ddpm_core.diffusion.process import PREDICTIONS, Prediction, Schedule, lookup

# Beyond these a ratio of SNRs is 0/0 or inf/inf in float64; no schedule here comes near them.
_SNR_RANGE = (1e-20, 1e20)
_FRACTION_BITS = 40  # of probabilities as whole numbers: exact for a float32 of 1e-5 and more


@dataclass(frozen=True, eq=False)
class Statistics:
    """What a step learned, of the global batch: timesteps int64 (B,), errors float32 (B,).

    An error is the loss of a sample (LOSSES, of the network's own prediction) without its weight.
    """

    t: Tensor
    error: Tensor


@dataclass(frozen=True)
class NoiseLevelSettings:
    """Names of TIMESTEP_SAMPLERS and WEIGHTINGS, and their settings.

    `gamma`, above 0, is min_snr's bound (5 where None) or p2's power (1); `k`, above 0, is p2's
    offset.
    """

    sampler: str = "uniform"
    weighting: str = "uniform"
    gamma: float | None = None
    k: float = 1.0


class NoiseLevels:
    """Tables of probability and weight a timestep; static, unless a subclass is `adaptive`.

    Such a one changes them in `update`, by `set_tables_`, from the statistics alone: they are the
    same on every worker, and so the tables stay so. What else it learns from belongs in its
    `state_dict`, which goes through every snapshot. The tables are changed in place and never
    replaced, so that a captured CUDA graph sees it.
    """

    adaptive: ClassVar[bool] = False  # True: `update` is given the statistics of every step

    def __init__(self, probability: Tensor, weight: Tensor) -> None:
        """`probability` (T,) sums to 1; `weight` (T,) is finite and multiplies the error."""
        self.probability = probability.to(torch.float32)
        self.weights = weight.to(torch.float32)
        self._cumulative = _cumulative(self.probability)

    def draw(self, uniforms: Tensor) -> Tensor:
        """Timesteps int64 (B,) for uniform numbers (B,) in [0, 1), by the inverse CDF."""
        t = torch.searchsorted(self._cumulative, uniforms, right=True)
        return t.clamp(max=len(self._cumulative) - 1)

    def weight(self, t: Tensor) -> Tensor:
        """The factor of the squared error of the network's own prediction, float32 (B,)."""
        return self.weights[t]

    def update(self, statistics: Statistics) -> None:
        """Learn from a step, without a wait for the device. Static tables have nothing to learn."""

    def set_tables_(self, probability: Tensor, weight: Tensor) -> None:
        """Fill the tables, (T,) both; probabilities that don't sum to 1 count by their share."""
        self.probability.copy_(probability)
        self.weights.copy_(weight)
        self._cumulative.copy_(_cumulative(self.probability))

    def state_dict(self) -> dict[str, Tensor]:
        return {"probability": self.probability, "weight": self.weights}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over saved tables. Raises ValueError where they are another process's."""
        own = self.state_dict()
        shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
        given = {name: tuple(tensor.shape) for name, tensor in state.items()}
        if shapes != given:
            raise ValueError(f"The saved noise levels are {given}; here they are {shapes}.")
        for name, tensor in own.items():
            tensor.copy_(state[name])
        self._cumulative.copy_(_cumulative(self.probability))

    def to(self, device: torch.device | str) -> NoiseLevels:
        """Move the tables, and every other tensor of a subclass; returns itself."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))
        return self


def make_noise_levels(
    settings: NoiseLevelSettings, schedule: Schedule, prediction: str
) -> NoiseLevels:
    """The timesteps and weights that the settings name, for a network's prediction.

    Raises ValueError for an unknown name or a number out of range.
    """
    for name, number in (("gamma", settings.gamma), ("k", settings.k)):
        if number is not None and not 0.0 < number < float("inf"):
            raise ValueError(f"{name}: {number} given; a number above 0 is needed.")
    predicted = lookup(PREDICTIONS, prediction, "prediction")
    weigh = lookup(WEIGHTINGS, settings.weighting, "weighting")
    snr = schedule.snr.clamp(*_SNR_RANGE)
    weight = weigh(snr, predicted, settings) / predicted.error(snr)
    make = lookup(TIMESTEP_SAMPLERS, settings.sampler, "timesteps sampler")
    return make(schedule, weight, settings)


# The SNR of every timestep, float64 (T,), to the weight of each on the squared error of x0, (T,).
Weighting = Callable[[Tensor, type[Prediction], NoiseLevelSettings], Tensor]


def uniform_weight(
    snr: Tensor, prediction: type[Prediction], settings: NoiseLevelSettings
) -> Tensor:
    """1 on whatever is predicted, the L_simple of Ho et al. (2020), eq. 14; (T,) -> (T,).

    On the error of x0 it is SNR for noise, 1 for x0 and SNR + 1 for v: three objectives.
    """
    return prediction.error(snr)


def min_snr(snr: Tensor, prediction: type[Prediction], settings: NoiseLevelSettings) -> Tensor:
    """min(SNR, gamma) on the error of x0, gamma = 5; (T,) -> (T,).

    One objective for all predictions: min(SNR, gamma) / SNR for noise, min(SNR, gamma) / (SNR + 1)
    for v. Hang et al. (2023), "Efficient diffusion training via Min-SNR weighting strategy",
    section 3.4.
    """
    return snr.clamp(max=5.0 if settings.gamma is None else settings.gamma)


def p2(snr: Tensor, prediction: type[Prediction], settings: NoiseLevelSettings) -> Tensor:
    """SNR / (k + SNR)^gamma on the error of x0, k = 1, gamma = 1; (T,) -> (T,).

    So 1 / (k + SNR)^gamma for noise. Choi et al. (2022), "Perception prioritized training of
    diffusion models", eq. 8.
    """
    return snr / (settings.k + snr) ** (1.0 if settings.gamma is None else settings.gamma)


WEIGHTINGS: dict[str, Weighting] = {"uniform": uniform_weight, "min_snr": min_snr, "p2": p2}


def uniform_timesteps(
    schedule: Schedule, weight: Tensor, settings: NoiseLevelSettings
) -> NoiseLevels:
    """p(t) = 1 / T (Ho et al. 2020, algorithm 1)."""
    return NoiseLevels(torch.full_like(schedule.betas, 1.0 / schedule.timesteps), weight)


# A process and the weight of each of its timesteps on the network's own error, float64 (T,).
MakeLevels = Callable[[Schedule, Tensor, NoiseLevelSettings], NoiseLevels]
TIMESTEP_SAMPLERS: dict[str, MakeLevels] = {"uniform": uniform_timesteps}


def _cumulative(probability: Tensor) -> Tensor:
    """P(t <= i), in float32, in which every device compares alike.

    Summed in whole numbers, which have one sum on every device, and wait for none.
    """
    total = (probability * 2.0**_FRACTION_BITS).round().to(torch.int64).cumsum(0)
    wide = total.to(torch.float32 if total.device.type == "mps" else torch.float64)
    return (wide / wide[-1]).to(torch.float32)
