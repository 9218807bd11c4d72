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


@dataclass(frozen=True, eq=False)
class Statistics:
    """What a step learned, of the global batch: timesteps int64 (B,), squared errors (B,).

    An error is the mean square of what the network predicts, without its weight.
    """

    t: Tensor
    error: Tensor


class NoiseLevels:
    """Tables of probability and weight a timestep; static, unless a subclass has `update`.

    The tables are changed in place and never replaced, so that a captured CUDA graph sees it.
    """

    adaptive: ClassVar[bool] = False  # True: `update` wants the statistics of every step

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
        """Learn from a step. Static tables have nothing to learn."""

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
        """Move the tables; returns itself."""
        self.probability = self.probability.to(device)
        self.weights = self.weights.to(device)
        self._cumulative = self._cumulative.to(device)
        return self


def make_noise_levels(
    timesteps: str,
    weighting: str,
    schedule: Schedule,
    prediction: str,
    gamma: float | None = None,
    k: float = 1.0,
) -> NoiseLevels:
    """TIMESTEP_SAMPLERS[timesteps] with WEIGHTINGS[weighting], for a network's prediction.

    `gamma` is min_snr's bound (5 where None) or p2's power (1), `k` is p2's offset; both are
    above 0. Raises ValueError for an unknown name or a number out of range.
    """
    for name, number in (("gamma", gamma), ("k", k)):
        if number is not None and not 0.0 < number < float("inf"):
            raise ValueError(f"{name}: {number} given; a number above 0 is needed.")
    predicted = lookup(PREDICTIONS, prediction, "prediction")
    weigh = lookup(WEIGHTINGS, weighting, "weighting")
    snr = schedule.snr.clamp(*_SNR_RANGE)
    weight = weigh(snr, predicted, gamma, k) / predicted.error(snr)
    return lookup(TIMESTEP_SAMPLERS, timesteps, "timesteps")(schedule, weight)


def uniform_weight(
    snr: Tensor, prediction: type[Prediction], gamma: float | None, k: float
) -> Tensor:
    """1 on whatever is predicted, the L_simple of Ho et al. (2020), eq. 14.

    On the error of x0 it is SNR for noise, 1 for x0 and SNR + 1 for v: three objectives.
    """
    return prediction.error(snr)


def min_snr(snr: Tensor, prediction: type[Prediction], gamma: float | None, k: float) -> Tensor:
    """min(SNR, gamma) on the error of x0, gamma = 5: one objective for all predictions.

    So min(SNR, gamma) / SNR for noise and min(SNR, gamma) / (SNR + 1) for v. Hang et al. (2023),
    "Efficient diffusion training via Min-SNR weighting strategy", section 3.4.
    """
    return snr.clamp(max=5.0 if gamma is None else gamma)


def p2(snr: Tensor, prediction: type[Prediction], gamma: float | None, k: float) -> Tensor:
    """SNR / (k + SNR)^gamma on the error of x0, k = 1, gamma = 1.

    So 1 / (k + SNR)^gamma for noise. Choi et al. (2022), "Perception prioritized training of
    diffusion models", eq. 8.
    """
    return snr / (k + snr) ** (1.0 if gamma is None else gamma)


Weighting = Callable[[Tensor, type[Prediction], float | None, float], Tensor]
WEIGHTINGS: dict[str, Weighting] = {"uniform": uniform_weight, "min_snr": min_snr, "p2": p2}


def uniform_timesteps(schedule: Schedule, weight: Tensor) -> NoiseLevels:
    """p(t) = 1 / T (Ho et al. 2020, algorithm 1)."""
    return NoiseLevels(torch.full_like(schedule.betas, 1.0 / schedule.timesteps), weight)


TIMESTEP_SAMPLERS: dict[str, Callable[[Schedule, Tensor], NoiseLevels]] = {
    "uniform": uniform_timesteps
}


def _cumulative(probability: Tensor) -> Tensor:
    """P(t <= i), summed in float64 and kept in float32, in which every device compares alike."""
    total = probability.cpu().to(torch.float64).cumsum(0)
    return (total / total[-1]).to(probability.device, torch.float32)
