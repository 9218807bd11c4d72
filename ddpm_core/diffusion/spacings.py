"""Which timesteps a sampler visits: sequences of S of the T, ascending, int64 (S,).

`uniform`, `quadratic` and `log_snr` hold exactly S distinct timesteps, the first and the last of
their range among them; S = 1 is the last alone. Where rounding lets two fall together the later one
moves up to the next free timestep, and those that this pushes past the last move down.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ddpm_core.diffusion.process import Schedule

LARGEST_RATIO = 120.0


def uniform(timesteps: int, steps: int) -> Tensor:
    """S timesteps in equal distances from 0 to T-1, rounded (Song et al. 2021, appendix D.2).

    The published sequence, multiples of T // S, ends below T-1 (990 for 100 of 1,000).
    """
    return distinct(_linspace(timesteps - 1.0, steps).round().long())


def quadratic(timesteps: int, steps: int) -> Tensor:
    """Squares of S equal distances from 0 to sqrt(T-1), rounded and made distinct.

    Denser at low noise, after Song et al. (2021), "Denoising diffusion implicit models", appendix
    D.2, but from the first timestep to the last; see `quadratic_official`.
    """
    return distinct(_linspace(math.sqrt(timesteps - 1.0), steps).square().round().long())


def quadratic_official(timesteps: int, steps: int) -> Tensor:
    """Squares of S equal distances from 0 to sqrt(0.8 T), truncated, as in the published scores.

    Code of Song et al. (2021). Timesteps repeat (96 distinct of 100 for T = 1,000): a repeated one
    would leave x as it is, so it is visited once. Sampling begins at 0.8 T, which is all but noise
    in the linear schedule it is meant for (alpha_bar 0.0015), but not in a cosine one (0.09).
    """
    root = math.sqrt(0.8 * timesteps)
    distance = root / max(1, steps - 1)
    roots = [i * distance for i in range(steps - 1)] + [root]
    return torch.tensor(sorted({int(r * r) for r in roots}))


SPACINGS: dict[str, Callable[[int, int], Tensor]] = {
    "uniform": uniform,
    "quadratic": quadratic,
    "quadratic_official": quadratic_official,
}


def log_snr(schedule: Schedule, steps: int) -> Tensor:
    """S timesteps in equal distances of ln sigma, each moved to the nearest timestep.

    sigma = sqrt((1 - alpha_bar) / alpha_bar), so half the log-SNR is -ln sigma (Lu et al. 2022,
    "DPM-Solver", section 3.3). From t = 0 to the noisiest timestep of at most LARGEST_RATIO:
    beyond it a cosine schedule leaps (640 and 20,000 at T = 1,000). Where fewer than S timesteps
    lie below, it begins at S-1.
    """
    last = max(int((schedule.noise_to_signal <= LARGEST_RATIO).sum()), steps, 2) - 1
    log_ratio = schedule.noise_to_signal[: last + 1].log()
    wanted = log_ratio[0] + _linspace(float(log_ratio[-1] - log_ratio[0]), steps)
    above = torch.searchsorted(log_ratio, wanted).clamp(1, last)
    below_is_nearer = wanted - log_ratio[above - 1] < log_ratio[above] - wanted
    return distinct(above - below_is_nearer.long())


def distinct(t: Tensor) -> Tensor:
    """Make an ascending sequence strictly ascending, its ends unchanged; see the top of the file.

    The range must have room for it: t[-1] - t[0] >= S - 1.
    """
    index = torch.arange(len(t))
    pushed_up = (t - index).cummax(0).values + index
    return torch.minimum(pushed_up, t[-1] - index.flip(0))


def _linspace(end: float, steps: int) -> Tensor:
    """S numbers from 0 to `end` in equal distances, float64; `end` alone where S = 1."""
    return torch.linspace(end, 0.0, steps, dtype=torch.float64).flip(0)
