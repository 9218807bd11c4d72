"""The probability of each timestep in training.

A sampler other than `uniform` changes what training minimizes: the objective weights each timestep
by its probability times its weight. To add a sampler, add a function to TIMESTEP_SAMPLERS.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ddpm_core.diffusion.noise_levels import NoiseLevels, PairedLevels, finite_snr
from ddpm_core.diffusion.process import Schedule

# Maps a process and the weights on the network's own error, float64 (T,), to noise levels.
TimestepSampler = Callable[[Schedule, Tensor], NoiseLevels]


def uniform(schedule: Schedule, weight: Tensor) -> NoiseLevels:
    """Draw every timestep with p(t) = 1 / T (Ho et al. 2020, algorithm 1)."""
    return NoiseLevels(torch.full_like(schedule.betas, 1.0 / schedule.timesteps), weight)


def log_normal(schedule: Schedule, weight: Tensor) -> NoiseLevels:
    """Draw ln(sigma) from a normal distribution with mean -1.2 and standard deviation 1.2.

    sigma = 1 / sqrt(SNR). p(t) is the density at ln(sigma_t) times the distance between neighboring
    values of ln(sigma). Made for weighting `edm`. Karras et al. (2022), "Elucidating the design
    space of diffusion-based generative models", table 1.
    """
    log_sigma = -0.5 * finite_snr(schedule).log()
    return NoiseLevels(_mass(log_sigma, -0.5 * ((log_sigma + 1.2) / 1.2).square()), weight)


def laplace(schedule: Schedule, weight: Tensor) -> NoiseLevels:
    """Draw ln(SNR) from a Laplace distribution with location 0 and scale 1/2.

    p(t) is the density exp(-2 |ln SNR_t|) times the distance between neighboring values of ln(SNR),
    so most samples have about as much noise as signal. Hang et al. (2024), "Improved noise schedule
    for diffusion training", eq. 12.
    """
    log_snr = finite_snr(schedule).log()
    return NoiseLevels(_mass(log_snr, -2.0 * log_snr.abs()), weight)


def speed(schedule: Schedule, weight: Tensor) -> NoiseLevels:
    """Draw timesteps below tau 5 times as often as later ones, in pairs, and change the weight.

    The second sample of a pair has timestep m - t if t < m, else t - m, where t is that of the
    first. tau and m are the first timesteps (from 1) at which sqrt(1 - alpha_bar) grows by less
    than 0.05 / T and 0.1 / T: 700 and 642 for schedule linear with T = 1000, as published. Below
    tau, the weight is multiplied by 0.4 + 0.2 d, where d is the increase of 1 - alpha_bar, scaled
    to [0, 1]. Made for prediction `noise` and weighting `uniform`. Wang et al. (2024), "A closer
    look at time steps is worthy of triple speed-up for diffusion model training", eqs. 4 to 6.
    """
    timesteps = schedule.timesteps
    t = torch.arange(timesteps)
    growth = torch.gradient((1.0 - schedule.alphas_bar).sqrt())[0] * timesteps
    tau, pivot = (_first_below(growth, limit) for limit in (0.05, 0.1))
    increase = torch.gradient(1.0 - schedule.alphas_bar)[0]
    scaled = (increase - increase.min()) / (increase.max() - increase.min())
    probability = torch.where(t < tau, 5.0, 1.0).to(schedule.betas)
    factor = torch.where(t < tau, 0.4 + 0.2 * scaled, 1.0)
    dual = torch.where(t < pivot, pivot - t, t - pivot)
    return PairedLevels(probability / probability.sum(), weight * factor, dual)


TIMESTEP_SAMPLERS: dict[str, TimestepSampler] = {
    "uniform": uniform,
    "log_normal": log_normal,
    "laplace": laplace,
    "speed": speed,
}


def _mass(coordinate: Tensor, log_density: Tensor) -> Tensor:
    """Return probabilities (T,) for a density along a monotonic coordinate of the timesteps.

    None is 0: adaptive methods divide by them.
    """
    mass = (log_density - log_density.max()).exp() * torch.gradient(coordinate)[0].abs()
    return (mass / mass.sum()).clamp(min=1e-12)


def _first_below(growth: Tensor, limit: float) -> int:
    """Return the first timestep, from 1, with a growth below `limit`; the last one if none is."""
    below = torch.nonzero(growth < limit).flatten()
    return min(int(below[0]) + 1 if len(below) else len(growth), len(growth) - 1)
