"""The weight of each noise level in the loss, as a function of its signal-to-noise ratio.

Every weighting is defined on the squared error of x0, whatever the network predicts. The squared
error of a noise prediction is SNR times as large, and that of a v prediction SNR + 1 times, so the
weight is divided by that factor (`Prediction.error`). To add a weighting, add a function to
WEIGHTINGS.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ddpm_core.diffusion.noise_levels import Context

# Returns the weight of every timestep on the squared error of x0, float64 (T,).
Weighting = Callable[[Context], Tensor]


def uniform(context: Context) -> Tensor:
    """Weight the error of the network's own prediction by 1: L_simple of Ho et al. (2020), eq. 14.

    On the error of x0 that is SNR for noise, 1 for x0 and SNR + 1 for v: three different
    objectives.
    """
    return context.error


def min_snr(context: Context) -> Tensor:
    """Weight the error of x0 by min(SNR, gamma), gamma = 5 by default.

    One objective for all predictions: on the network's own error this is min(SNR, gamma) / SNR for
    noise and min(SNR, gamma) / (SNR + 1) for v. Hang et al. (2023), "Efficient diffusion
    training via Min-SNR weighting strategy", section 3.4.
    """
    gamma = context.settings.gamma
    return context.snr.clamp(max=5.0 if gamma is None else gamma)


def p2(context: Context) -> Tensor:
    """Weight the error of x0 by SNR / (k + SNR)^gamma, k = 1 and gamma = 1 by default.

    On the error of a noise prediction this is 1 / (k + SNR)^gamma. Choi et al. (2022),
    "Perception prioritized training of diffusion models", eq. 8.
    """
    gamma, k = context.settings.gamma, context.settings.k
    return context.snr / (k + context.snr) ** (1.0 if gamma is None else gamma)


def debias(context: Context) -> Tensor:
    """Weight the error of x0 by sqrt(SNR).

    On the error of a noise prediction this is 1 / sqrt(SNR). Yu et al. (2024), "Unmasking bias in
    diffusion model training", section 3.3.
    """
    return context.snr.sqrt()


def edm(context: Context) -> Tensor:
    """Weight the error of x0 by (sigma^2 + s^2) / (sigma s)^2 = SNR + 1 / s^2.

    sigma^2 = 1 / SNR, and s^2 is the variance of all values of the training images about their one
    mean (`Moments.variance`), as in prediction `edm`, whose own error gets the weight 1. It belongs
    with timesteps.sampler `log_normal`. Karras et al. (2022), "Elucidating the design space of
    diffusion-based generative models", table 1.
    """
    return context.snr + 1.0 / context.moments.variance


WEIGHTINGS: dict[str, Weighting] = {
    "uniform": uniform,
    "min_snr": min_snr,
    "p2": p2,
    "debias": debias,
    "edm": edm,
}
