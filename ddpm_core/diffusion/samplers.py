"""From noise to images: the update rules, and the one loop that runs them.

A rule sees the image x at a level of noise, may ask for the clean image behind it and for fresh
noise, and gives x at the following level. Loop, clipping and callback are `run`'s and `sample`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from ddpm_core.diffusion import process, spacings
from ddpm_core.diffusion.process import Schedule, lookup
from ddpm_core.diffusion.spacings import SPACINGS

VARIANCES = ("auto", "large", "small")


@dataclass(frozen=True)
class SamplerSettings:
    """How to sample: names of SAMPLERS and SPACINGS, and their settings.

    `steps` is at most T. `spacing` and `variance` are for ddpm, `spacing` and `eta` (0..1) for
    ddim. `variance: auto` is large for full chains and small for shortened ones. `clip` holds each
    estimate of x0 within [-1, 1].
    """

    sampler: str
    steps: int
    spacing: str = "uniform"
    eta: float = 0.0
    variance: str = "auto"
    clip: bool = True


@dataclass(frozen=True, eq=False)
class Level:
    """A timestep, and its alpha_bar as a float64 scalar on the CPU; t = -1 is the clean image."""

    t: int
    alpha_bar: Tensor

    @property
    def signal(self) -> float:
        return math.sqrt(float(self.alpha_bar))

    @property
    def sigma(self) -> float:
        return math.sqrt(1.0 - float(self.alpha_bar))


CLEAN = Level(-1, torch.ones((), dtype=torch.float64))
Denoise = Callable[[Tensor, Level], Tensor]
Draw = Callable[[], Tensor]
Memory = tuple[Level, Tensor] | None  # the level before and the x0 seen there


class Rule(Protocol):
    """One update from `level` to `following`; `noise()` is this update's, drawn if asked for."""

    def __call__(
        self,
        denoise: Denoise,
        x: Tensor,
        level: Level,
        following: Level,
        memory: Memory,
        noise: Draw,
    ) -> tuple[Tensor, Memory]: ...


def sample(
    network: Callable[[Tensor, Tensor], Tensor],
    schedule: Schedule,
    prediction: str,
    settings: SamplerSettings,
    noise: Callable[[int], Tensor],
    on_step: Callable[[int], None] | None = None,
) -> Tensor:
    """Draw images x0 (B, C, H, W), in the dtype of the noise.

    `network(x, t)` takes timesteps int64 (B,) and answers with its raw output. noise(0) is the
    start, noise(i) belongs to the i-th update, i = 1..steps; deterministic rules never ask for it.
    `on_step(i)` follows each update. Raises ValueError for settings that the process can't meet.
    """
    _check(settings, schedule)
    levels, rule = lookup(SAMPLERS, settings.sampler, "sampler")(schedule, settings)

    def denoise(x: Tensor, level: Level) -> Tensor:
        t = torch.full((len(x),), level.t, dtype=torch.int64, device=x.device)
        output = network(x, t).to(x.dtype)
        return process.to_x0(prediction, output, x, level.alpha_bar, settings.clip)

    return run(rule, denoise, noise(0), levels, noise, on_step)


@torch.no_grad()
def run(
    rule: Rule,
    denoise: Denoise,
    x: Tensor,
    levels: Sequence[Level],
    noise: Callable[[int], Tensor],
    on_step: Callable[[int], None] | None = None,
) -> Tensor:
    """Apply a rule along `levels`, noisiest first, and from the last of them to the clean image."""
    memory: Memory = None
    for i, (level, following) in enumerate(pairwise([*levels, CLEAN]), start=1):
        x, memory = rule(denoise, x, level, following, memory, partial(noise, i))
        if on_step is not None:
            on_step(i)
    return x


def ddpm(schedule: Schedule, settings: SamplerSettings) -> tuple[list[Level], Rule]:
    """x_prev = posterior_mean(x0, x) + sqrt(variance) noise, no noise in the last update.

    Ho et al. (2020), algorithm 2, with x0 clipped before the mean, along any `spacing`. Variance
    `large` is beta_t, `small` the posterior's; see `reverse_variance`.
    """
    levels = _spaced(schedule, settings)
    full = len(levels) == schedule.timesteps
    kind = settings.variance if settings.variance != "auto" else "large" if full else "small"
    ascending = torch.stack([level.alpha_bar for level in reversed(levels)])
    deviations = reverse_variance(ascending, kind).sqrt().flip(0)
    deviation = {level.t: d for level, d in zip(levels, deviations, strict=True)}

    def rule(
        denoise: Denoise, x: Tensor, level: Level, following: Level, memory: Memory, noise: Draw
    ) -> tuple[Tensor, Memory]:
        x0 = denoise(x, level)
        mean = process.posterior_mean(x0, x, level.alpha_bar, following.alpha_bar)
        if following is CLEAN:
            return mean, None
        return mean + deviation[level.t].to(x.dtype) * noise(), None

    return levels, rule


def ddim(schedule: Schedule, settings: SamplerSettings) -> tuple[list[Level], Rule]:
    """x_prev = sqrt(a_prev) x0 + sqrt(1 - a_prev - s^2) noise(x0) + s fresh noise, a = alpha_bar.

    s = eta sqrt(posterior variance): eta = 0 is deterministic, eta = 1 along all timesteps is ddpm
    with `variance: small`. noise(x0) is recomputed from the clipped x0. Song et al. (2021),
    "Denoising diffusion implicit models", eqs. 12 and 16.
    """

    def rule(
        denoise: Denoise, x: Tensor, level: Level, following: Level, memory: Memory, noise: Draw
    ) -> tuple[Tensor, Memory]:
        x0 = denoise(x, level)
        variance = settings.eta**2 * process.posterior_variance(
            level.alpha_bar, following.alpha_bar
        )
        direction = process.to_noise(x0, x, level.alpha_bar)
        rest = math.sqrt(max(0.0, following.sigma**2 - float(variance)))
        x = following.signal * x0 + rest * direction
        if variance > 0.0:
            x = x + variance.sqrt().to(x.dtype) * noise()
        return x, None

    return _spaced(schedule, settings), rule


def dpmpp(schedule: Schedule, settings: SamplerSettings) -> tuple[list[Level], Rule]:
    """x_next = (sigma_next / sigma) x - signal_next (e^-h - 1) D, h the step in ln(signal / sigma).

    DPM-Solver++(2M): D = x0 + (x0 - x0_before) h / (2 h_before), the x0 alone in the first update
    and in the last, which is the x0. Lu et al. (2022), "DPM-Solver++", algorithm 2. Steps are equal
    in h; `spacing` is not used.
    """

    def rule(
        denoise: Denoise, x: Tensor, level: Level, following: Level, memory: Memory, noise: Draw
    ) -> tuple[Tensor, Memory]:
        x0 = denoise(x, level)
        if following is CLEAN:
            return x0, None
        h = _half_log_snr(following) - _half_log_snr(level)
        mixed = x0
        if memory is not None:
            before, x0_before = memory
            h_before = _half_log_snr(level) - _half_log_snr(before)
            mixed = x0 + (x0 - x0_before) * (h / (2.0 * h_before))
        x = (following.sigma / level.sigma) * x - following.signal * math.expm1(-h) * mixed
        return x, (level, x0)

    return _levels(schedule, spacings.log_snr(schedule, settings.steps)), rule


SAMPLERS: dict[str, Callable[[Schedule, SamplerSettings], tuple[list[Level], Rule]]] = {
    "ddpm": ddpm,
    "ddim": ddim,
    "dpmpp": dpmpp,
}


def reverse_variance(alphas_bar: Tensor, kind: str) -> Tensor:
    """The variance of x_prev given x along ascending timesteps, float64 (S,).

    `small` is the posterior's (0 at the first), `large` is beta with the posterior's second value
    at the first, so that its logarithm is finite (Ho et al. 2020, section 3.2, and their code).
    """
    prev = torch.cat((torch.ones_like(alphas_bar[:1]), alphas_bar[:-1]))
    small = process.posterior_variance(alphas_bar, prev)
    if kind == "small":
        return small
    return torch.cat((small[1:2], (1.0 - alphas_bar / prev)[1:])) if len(prev) > 1 else small


def _spaced(schedule: Schedule, settings: SamplerSettings) -> list[Level]:
    spacing = lookup(SPACINGS, settings.spacing, "spacing")
    return _levels(schedule, spacing(schedule.timesteps, settings.steps))


def _levels(schedule: Schedule, ascending: Tensor) -> list[Level]:
    return [Level(t, schedule.alphas_bar[t]) for t in reversed(ascending.tolist())]


def _half_log_snr(level: Level) -> float:
    return math.log(level.signal / level.sigma)


def _check(settings: SamplerSettings, schedule: Schedule) -> None:
    if not 1 <= settings.steps <= schedule.timesteps:
        raise ValueError(
            f"steps: {settings.steps} given; a process of {schedule.timesteps} timesteps "
            f"is sampled in 1 to {schedule.timesteps} steps."
        )
    if not 0.0 <= settings.eta <= 1.0:
        raise ValueError(f"eta: {settings.eta} given; a number from 0 to 1 is needed.")
    if settings.variance not in VARIANCES:
        raise ValueError(
            f"variance: {settings.variance!r} given; known are {', '.join(VARIANCES)}."
        )
