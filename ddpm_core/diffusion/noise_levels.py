"""The timesteps that training draws, and the weight of each in the loss.

A static choice of sampler (timestep_samplers.py) and weighting (weightings.py) gives two tables:
the probability of each timestep and its weight. A learning method (adaptive.py) starts from those
tables and changes them during training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ddpm_core.diffusion.moments import Moments
from ddpm_core.diffusion.process import Schedule

# Outside this range a ratio of SNRs can be 0/0 or inf/inf in float64. Only a last timestep of pure
# noise is outside of it.
_SNR_RANGE = (1e-20, 1e20)
# Probabilities are summed as multiples of 2^-40, which represent a float32 of 1e-5 or more exactly.
_FRACTION_BITS = 40

# Maps places in the global batch, int64 (b,), to uniform numbers in [0, 1), float32 (b,).
Uniform = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class NoiseLevelSettings:
    """How to draw and weight timesteps.

    Attributes:
        sampler: A name of TIMESTEP_SAMPLERS.
        weighting: A name of WEIGHTINGS.
        gamma: The bound of min_snr (default 5) or the power of p2 (default 1), above 0.
        k: The offset of p2, above 0.
        adaptive: A name of ADAPTIVE_METHODS.
        steps: Steps of the whole run; used by adaptive methods.
        batch_size: Images per step over all workers; used by adaptive methods.
        moments: Of the training images; required by `wiener_gate` and by weighting `edm`.
        tables: The trajectory that `replay` follows, float32 (SLOTS, 2, K) of adaptive.Adaptive.
        order: How `replay` reads it: recorded, reversed, last or mean.
    """

    sampler: str = "uniform"
    weighting: str = "uniform"
    gamma: float | None = None
    k: float = 1.0
    adaptive: str = "none"
    steps: int = 1
    batch_size: int = 1
    moments: Moments | None = None
    tables: Tensor | None = None
    order: str = "recorded"


@dataclass(frozen=True, eq=False)
class Context:
    """What a weighting or an adaptive method may depend on.

    Attributes:
        settings: The settings of the run.
        snr: Signal-to-noise ratio of each timestep, float64 (T,), finite and above 0.
        error: Squared error of the network's output per unit of squared error of x0, float64 (T,).
    """

    settings: NoiseLevelSettings
    snr: Tensor
    error: Tensor

    @property
    def moments(self) -> Moments:
        """The moments of the training images. Raises ValueError if unset."""
        if self.settings.moments is None:
            raise ValueError("moments: missing (required by wiener_gate and weighting edm).")
        return self.settings.moments


def finite_snr(schedule: Schedule) -> Tensor:
    """Return the signal-to-noise ratio of each timestep, float64 (T,), finite and above 0."""
    return schedule.snr.clamp(*_SNR_RANGE)


@dataclass(frozen=True, eq=False)
class Statistics:
    """The timesteps and errors of the global batch of one training step.

    Attributes:
        step: The number of the step, from 1.
        t: int64 (B,), or (0,) for a method that uses no losses.
        error: float32, as many: each sample's unweighted loss (see LOSSES).
    """

    step: int
    t: Tensor
    error: Tensor


class NoiseLevels:
    """The probability and the weight of each timestep.

    The tables are constant, unless a subclass sets `adaptive`. An adaptive subclass changes them by
    `set_tables_` in `update`, which is a function of the statistics alone: those are equal on every
    worker, so the tables stay equal. Any other state it has belongs in its `state_dict`, which
    every snapshot saves. Tables are changed in place, never replaced, so that a captured CUDA graph
    sees the change.
    """

    adaptive: ClassVar[bool] = False  # True: training calls `update` after every step
    uses_losses: ClassVar[bool] = True  # False: the statistics in `update` have no samples

    def __init__(self, probability: Tensor, weight: Tensor) -> None:
        """Set the tables.

        Args:
            probability: (T,), sums to 1.
            weight: (T,), finite; multiplies the error of the network's own prediction.
        """
        self.probability = probability.to(torch.float32)
        self.weights = weight.to(torch.float32)
        self._cumulative = _cumulative(self.probability)

    def draw(self, uniform: Uniform, index: Tensor) -> Tensor:
        """Draw timesteps for places `index` in the global batch: int64 (b,), by the inverse CDF."""
        return self._inverse(uniform(index))

    def _inverse(self, uniforms: Tensor) -> Tensor:
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


class PairedLevels(NoiseLevels):
    """Noise levels whose samples come in pairs: the second of a pair gets the dual of the first.

    `dual` maps a timestep to its dual, int64 (T,).
    """

    def __init__(self, probability: Tensor, weight: Tensor, dual: Tensor) -> None:
        super().__init__(probability, weight)
        self.dual = dual

    def draw(self, uniform: Uniform, index: Tensor) -> Tensor:
        # Both samples of a pair use the number of the pair, whichever workers they are on.
        t = self._inverse(uniform(index // 2))
        return torch.where(index % 2 == 0, t, self.dual[t])


def _cumulative(probability: Tensor) -> Tensor:
    """Return P(t <= i) for each timestep i, float32 (T,).

    Sums of integers are the same on every device, whatever the order of summation; float32 results
    compare alike everywhere. No operation waits for the device.
    """
    total = (probability * 2.0**_FRACTION_BITS).round().to(torch.int64).cumsum(0)
    wide = total.to(torch.float32 if total.device.type == "mps" else torch.float64)
    return (wide / wide[-1]).to(torch.float32)
