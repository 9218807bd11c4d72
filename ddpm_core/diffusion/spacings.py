"""Spacings: the S of T timesteps that a sampler visits, ascending, int64 (S,).

`uniform`, `quadratic` and `log_snr` return exactly S distinct timesteps, including the first and
the last of their range; S = 1 is the last alone. If rounding makes two of them equal, the later one
moves up to the next free timestep; timesteps that this pushes past the last move down.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ddpm_core.diffusion.process import Schedule

LARGEST_RATIO = 120.0  # of noise to signal where `log_snr` starts sampling


def uniform(timesteps: int, steps: int) -> Tensor:
    """Return S timesteps in equal distances from 0 to T-1, rounded.

    After Song et al. (2021), "Denoising diffusion implicit models", appendix D.2. The published
    sequence, multiples of T // S, ends below T-1 (at 990 for 100 of 1,000).
    """
    return distinct(_linspace(timesteps - 1.0, steps).round().long())


def quadratic(timesteps: int, steps: int) -> Tensor:
    """Return squares of S equal distances from 0 to sqrt(T-1), rounded and made distinct.

    They are denser at low noise, after Song et al. (2021), "Denoising diffusion implicit models",
    appendix D.2, but reach from the first timestep to the last; see `quadratic_official`.
    """
    return distinct(_linspace(math.sqrt(timesteps - 1.0), steps).square().round().long())


def quadratic_official(timesteps: int, steps: int) -> Tensor:
    """Return squares of S equal distances from 0 to sqrt(0.8 T), truncated, without repetitions.

    This is the code behind the published scores of Song et al. (2021). Some timesteps repeat there
    (96 of 100 are distinct for T = 1,000); repeating one leaves x unchanged, so each is visited
    once. Sampling starts at 0.8 T, which is almost pure noise in the linear schedule it was made
    for (alpha_bar 0.0015), but not in a cosine schedule (0.09).
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
    """Return S timesteps in equal distances of ln sigma, each rounded to the nearest timestep.

    sigma = sqrt((1 - alpha_bar) / alpha_bar), so half the log-SNR is -ln sigma (Lu et al. 2022,
    "DPM-Solver", section 3.3). The range is from t = 0 to the last timestep with sigma of at most
    LARGEST_RATIO: beyond it a cosine schedule jumps (to 640 and 20,000 at T = 1,000). If fewer than
    S timesteps are in the range, it ends at S-1. With zero terminal SNR, the last timestep, where
    sigma is infinite, comes first in sampling, and the others follow from LARGEST_RATIO on.
    """
    if not torch.isinf(schedule.noise_to_signal[-1]):
        return _log_snr(schedule, steps, 0)
    last = schedule.timesteps - 1
    if steps <= 2:
        return torch.tensor([0, last][-steps:])
    return torch.cat((_log_snr(schedule, steps - 1, 1), torch.tensor([last])))


def _log_snr(schedule: Schedule, steps: int, left_out: int) -> Tensor:
    """Return S timesteps, none of the last `left_out` ones among them."""
    ratios = schedule.noise_to_signal[: schedule.timesteps - left_out]
    last = max(int((ratios <= LARGEST_RATIO).sum()), steps, 2) - 1
    log_ratio = ratios[: last + 1].log()
    wanted = log_ratio[0] + _linspace(float(log_ratio[-1] - log_ratio[0]), steps)
    above = torch.searchsorted(log_ratio, wanted).clamp(1, last)
    below_is_nearer = wanted - log_ratio[above - 1] < log_ratio[above] - wanted
    return distinct(above - below_is_nearer.long())


def distinct(t: Tensor) -> Tensor:
    """Make ascending timesteps (S,) strictly ascending without changing the ends.

    See the module's docstring. Requires room for it: t[-1] - t[0] >= S - 1.
    """
    index = torch.arange(len(t))
    pushed_up = (t - index).cummax(0).values + index
    return torch.minimum(pushed_up, t[-1] - index.flip(0))


def _linspace(end: float, steps: int) -> Tensor:
    """Return S numbers from 0 to `end` in equal distances, float64 (S,); `end` alone if S = 1."""
    return torch.linspace(end, 0.0, steps, dtype=torch.float64).flip(0)
