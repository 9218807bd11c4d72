"""The diffusion process: schedules, the forward process q and the posterior.

    x_t = sqrt(alpha_bar) x0 + sqrt(1 - alpha_bar) noise

for timesteps t = 0..T-1 (Ho et al. 2020, who count them 1..T). Images x are (B, C, H, W).
`alpha_bar` is a tensor (B,), or of any shape that broadcasts with x. Coefficients are computed in
its precision and then cast to that of x. Pass it in float64 if the device supports it, because
1 - alpha_bar loses digits where alpha_bar is near 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
from torch import Tensor

# Lower bound of the divisors sqrt(alpha_bar) and sqrt(1 - alpha_bar), so that dividing by an exact
# zero gives a finite number, which clipping can bound. The schedules here stay above 5e-7.
SMALLEST = 1e-10
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Schedule:
    """The tables of a process, each float64 (T,) on the CPU, indexed by timestep 0..T-1.

    Attributes:
        name: The name in SCHEDULES.
        betas: The variance of the noise that step t adds.
        alphas: 1 - betas.
        alphas_bar: Products of alphas up to t, the image's share of the variance.
        alphas_bar_prev: alphas_bar of the previous timestep; starts with 1, the clean image.
        snr: Signal-to-noise ratio, alpha_bar / (1 - alpha_bar).
        noise_to_signal: 1 / sqrt(snr), the standard deviation of the noise if x0 has scale 1;
            infinite at the last timestep with zero terminal SNR.
        posterior_variance: Variance of q(x_{t-1} | x_t, x0) (Ho et al. 2020, eq. 7); 0 at t = 0.
    """

    name: str
    betas: Tensor
    alphas: Tensor
    alphas_bar: Tensor
    alphas_bar_prev: Tensor
    snr: Tensor
    noise_to_signal: Tensor
    posterior_variance: Tensor

    @property
    def timesteps(self) -> int:
        """T, the number of timesteps."""
        return len(self.betas)

    def first(self, timesteps: int) -> Schedule:
        """Return the process that ends after some timesteps, 1..T."""
        tables = {
            field.name: getattr(self, field.name)[:timesteps]
            for field in fields(self)
            if field.name != "name"
        }
        return replace(self, **tables)


def make_schedule(name: str, timesteps: int, zero_terminal_snr: bool = False) -> Schedule:
    """Return the tables of SCHEDULES[name] with T = `timesteps`.

    Args:
        zero_terminal_snr: Whether to rescale the schedule (see `without_terminal_signal`).

    Raises:
        ValueError: The name is unknown, or the schedule is not defined for so few timesteps.
    """
    if timesteps < 2:
        raise ValueError(f"timesteps: got {timesteps}; must be at least 2.")
    betas = lookup(SCHEDULES, name, "schedule")(timesteps)
    alphas_bar = (1.0 - betas).cumprod(0)
    if zero_terminal_snr:
        alphas_bar = without_terminal_signal(alphas_bar)
    alphas_bar_prev = torch.cat((torch.ones_like(alphas_bar[:1]), alphas_bar[:-1]))
    alphas = alphas_bar / alphas_bar_prev if zero_terminal_snr else 1.0 - betas
    snr = alphas_bar / (1.0 - alphas_bar)
    return Schedule(
        name=name,
        betas=1.0 - alphas if zero_terminal_snr else betas,
        alphas=alphas,
        alphas_bar=alphas_bar,
        alphas_bar_prev=alphas_bar_prev,
        snr=snr,
        noise_to_signal=snr.rsqrt(),
        posterior_variance=posterior_variance(alphas_bar, alphas_bar_prev),
    )


def without_terminal_signal(alphas_bar: Tensor) -> Tensor:
    """Return sqrt(alpha_bar) - sqrt(alpha_bar_T), rescaled to its first value and squared, (T,).

    So x_T is pure noise, as sampling starts from. With other schedules x_T still shows the mean of
    the image, which sampling never sees. Lin et al. (2024), "Common diffusion noise schedules and
    sample steps are flawed", algorithm 1.
    """
    signal = alphas_bar.sqrt()
    return ((signal - signal[-1]) * (signal[0] / (signal[0] - signal[-1]))).square()


def linear(timesteps: int) -> Tensor:
    """Return betas (T,) from 1e-4 to 0.02 in equal steps, times 1000 / T.

    Ho et al. (2020), section 4, for T = 1000. The factor keeps the last alpha_bar close to its
    value there. It makes beta reach 1 at T = 20, so at least 21 timesteps are required.
    """
    if timesteps <= 20:
        raise ValueError(
            f"timesteps: got {timesteps}; schedule linear requires at least 21, because its betas, "
            "up to 0.02 x 1000 / timesteps, must stay below 1. Use more, or schedule cosine."
        )
    return torch.linspace(1e-4, 0.02, timesteps, dtype=torch.float64) * (1000 / timesteps)


def cosine(timesteps: int) -> Tensor:
    """Return betas (T,) of alpha_bar(t) ~ cos^2(pi/2 (t/T + s) / (1 + s)), s = 0.008.

    beta is at most 0.999. Nichol and Dhariwal (2021), "Improved denoising diffusion probabilistic
    models", eq. 17.
    """
    offset = 0.008
    t = torch.arange(timesteps + 1, dtype=torch.float64) / timesteps
    f = ((t + offset) / (1 + offset) * (math.pi / 2)).cos().square()
    return (1.0 - f[1:] / f[:-1]).clamp(max=0.999)


SCHEDULES: dict[str, Callable[[int], Tensor]] = {"linear": linear, "cosine": cosine}


def q_sample(x0: Tensor, noise: Tensor, alpha_bar: Tensor) -> Tensor:
    """Return x_t = sqrt(alpha_bar) x0 + sqrt(1 - alpha_bar) noise (Ho et al. 2020, eq. 4)."""
    signal, sigma = scales(alpha_bar, x0)
    return signal * x0 + sigma * noise


def to_noise(x0: Tensor, x: Tensor, alpha_bar: Tensor) -> Tensor:
    """Return the noise in x = x_t if x0 is its clean image, clipped or not.

    (x - sqrt(alpha_bar) x0) / sqrt(1 - alpha_bar).
    """
    signal, sigma = scales(alpha_bar, x)
    return (x - signal * x0) / sigma.clamp(min=SMALLEST)


def posterior_mean(x0: Tensor, x: Tensor, alpha_bar: Tensor, alpha_bar_prev: Tensor) -> Tensor:
    """Return the mean of q(x_prev | x_t, x0) for any earlier step `prev` (Ho et al. 2020, eq. 7).

    With alpha = alpha_bar / alpha_bar_prev it is

        sqrt(alpha_bar_prev) (1 - alpha) / (1 - alpha_bar) x0
        + sqrt(alpha) (1 - alpha_bar_prev) / (1 - alpha_bar) x.
    """
    alpha = alpha_bar / alpha_bar_prev
    of_x0 = alpha_bar_prev.sqrt() * (1.0 - alpha) / (1.0 - alpha_bar)
    of_x = alpha.sqrt() * (1.0 - alpha_bar_prev) / (1.0 - alpha_bar)
    return spread(of_x0, x) * x0 + spread(of_x, x) * x


def posterior_variance(alpha_bar: Tensor, alpha_bar_prev: Tensor) -> Tensor:
    """Return the variance of q(x_prev | x_t, x0), 0 if `prev` is the clean image.

    (1 - alpha_bar / alpha_bar_prev) (1 - alpha_bar_prev) / (1 - alpha_bar) (Ho et al. 2020, eq. 7).
    """
    beta = 1.0 - alpha_bar / alpha_bar_prev
    return beta * (1.0 - alpha_bar_prev) / (1.0 - alpha_bar)


def lookup(table: Mapping[str, T], name: str, what: str) -> T:
    """Return an entry of a table of methods. Raises ValueError, which lists the choices."""
    if name not in table:
        raise ValueError(f"{what}: got {name!r}; must be one of {', '.join(table)}.")
    return table[name]


def scales(alpha_bar: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return sqrt(alpha_bar) and sqrt(1 - alpha_bar), shaped and typed for x."""
    return spread(alpha_bar.sqrt(), x), spread((1.0 - alpha_bar).sqrt(), x)


def spread(coefficient: Tensor, x: Tensor) -> Tensor:
    """Return a coefficient in x's dtype; if it is (B,), as (B, 1, ...) to broadcast with x."""
    if coefficient.ndim == 1:
        coefficient = coefficient.view(-1, *[1] * (x.ndim - 1))
    return coefficient.to(x.dtype)
