"""Samplers: update rules that turn noise into images, and the loop that applies them.

A rule gets the image x at one noise level and returns x at the next, lower level. It may call
`denoise` for an estimate of the clean image and `noise` for fresh noise. To add a sampler, add a
function that returns its levels and its rule to SAMPLERS.
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
from ddpm_core.diffusion.predictions import Prediction
from ddpm_core.diffusion.process import Schedule, lookup
from ddpm_core.diffusion.spacings import SPACINGS

VARIANCES = ("auto", "large", "small")


@dataclass(frozen=True)
class SamplerSettings:
    """How to sample.

    Attributes:
        sampler: A name of SAMPLERS.
        steps: Number of updates, 1..T.
        spacing: A name of SPACINGS; used by ddpm and ddim.
        eta: Share of fresh noise in ddim, 0..1.
        variance: "large", "small" or "auto", which is large for full chains (`steps` = T) and small
            for shortened ones; used by ddpm.
        clip: Whether to clip each estimate of x0 to [-1, 1].
    """

    sampler: str
    steps: int
    spacing: str = "uniform"
    eta: float = 0.0
    variance: str = "auto"
    clip: bool = True


@dataclass(frozen=True, eq=False)
class Level:
    """A noise level: a timestep and its alpha_bar, a float64 scalar on the CPU.

    t = -1 is the clean image.
    """

    t: int
    alpha_bar: Tensor

    @property
    def signal(self) -> float:
        """The scale of the image, sqrt(alpha_bar)."""
        return math.sqrt(float(self.alpha_bar))

    @property
    def sigma(self) -> float:
        """The standard deviation of the noise, sqrt(1 - alpha_bar)."""
        return math.sqrt(1.0 - float(self.alpha_bar))


CLEAN = Level(-1, torch.ones((), dtype=torch.float64))
Denoise = Callable[[Tensor, Level], Tensor]
Draw = Callable[[], Tensor]
Previous = tuple[Level, Tensor] | None  # the last level and its estimate of x0


class Rule(Protocol):
    """One update of x from `level` to the lower level `target`.

    Args:
        denoise: Returns the estimate of x0 for an image and its level.
        x: The image at `level`, (B, C, H, W).
        previous: What the rule returned at the last update, None at the first.
        noise: Returns the fresh noise of this update, (B, C, H, W).

    Returns:
        x at `target`, and what the next update gets as `previous`.
    """

    def __call__(
        self,
        denoise: Denoise,
        x: Tensor,
        level: Level,
        target: Level,
        previous: Previous,
        noise: Draw,
    ) -> tuple[Tensor, Previous]: ...


def sample(
    network: Callable[[Tensor, Tensor], Tensor],
    schedule: Schedule,
    prediction: Prediction,
    settings: SamplerSettings,
    noise: Callable[[int], Tensor],
    on_step: Callable[[int], None] | None = None,
) -> Tensor:
    """Draw images x0, (B, C, H, W), in the dtype of the noise.

    Args:
        network: Maps x (B, C, H, W) and timesteps int64 (B,) to the network's raw output.
        prediction: What the network predicts.
        noise: noise(0) is the start; noise(i) is the fresh noise of update i, 1..steps.
            Deterministic rules call it for the start alone.
        on_step: Called as on_step(i) after update i.

    Raises:
        ValueError: A setting is invalid or does not fit the process.
    """
    levels, rule, denoise = prepare(network, schedule, prediction, settings)
    return run(rule, denoise, noise(0), levels, noise, on_step)


def prepare(
    network: Callable[[Tensor, Tensor], Tensor],
    schedule: Schedule,
    prediction: Prediction,
    settings: SamplerSettings,
) -> tuple[list[Level], Rule, Denoise]:
    """Return the levels of a sampler, its rule, and the estimate of x0; see `sample`."""
    _check(settings, schedule)
    levels, rule = lookup(SAMPLERS, settings.sampler, "sampler")(schedule, settings)

    def denoise(x: Tensor, level: Level) -> Tensor:
        t = torch.full((len(x),), level.t, dtype=torch.int64, device=x.device)
        output = network(x, t).to(x.dtype)
        x0 = prediction.to_x0(output, x, level.alpha_bar)
        return x0.clamp(-1.0, 1.0) if settings.clip else x0

    return levels, rule, denoise


@torch.no_grad()
def run(
    rule: Rule,
    denoise: Denoise,
    x: Tensor,
    levels: Sequence[Level],
    noise: Callable[[int], Tensor],
    on_step: Callable[[int], None] | None = None,
) -> Tensor:
    """Apply a rule along `levels`, noisiest first, and from the last level to the clean image."""
    previous: Previous = None
    for i, (level, target) in enumerate(pairwise([*levels, CLEAN]), start=1):
        x, previous = rule(denoise, x, level, target, previous, partial(noise, i))
        if on_step is not None:
            on_step(i)
    return x


def ddpm(schedule: Schedule, settings: SamplerSettings) -> tuple[list[Level], Rule]:
    """Sample by x_prev = posterior_mean(x0, x) + sqrt(variance) noise, without noise at the end.

    Ho et al. (2020), algorithm 2, with x0 clipped before the mean, along any `spacing`. The
    variance is beta_t for `large` and the posterior's for `small`; see `reverse_variance`.
    """
    levels = _spaced(schedule, settings)
    full = len(levels) == schedule.timesteps
    kind = settings.variance if settings.variance != "auto" else "large" if full else "small"
    ascending = torch.stack([level.alpha_bar for level in reversed(levels)])
    # In float64 and once per level, because 1 - alpha_bar has few digits where alpha_bar is near 1.
    deviations = reverse_variance(ascending, kind).sqrt().flip(0)
    deviation = {level.t: d for level, d in zip(levels, deviations, strict=True)}

    def rule(
        denoise: Denoise, x: Tensor, level: Level, target: Level, previous: Previous, noise: Draw
    ) -> tuple[Tensor, Previous]:
        x0 = denoise(x, level)
        mean = process.posterior_mean(x0, x, level.alpha_bar, target.alpha_bar)
        if target is CLEAN:
            return mean, None
        return mean + deviation[level.t].to(x.dtype) * noise(), None

    return levels, rule


def ddim(schedule: Schedule, settings: SamplerSettings) -> tuple[list[Level], Rule]:
    """Sample by x_prev = sqrt(a_prev) x0 + sqrt(1 - a_prev - s^2) noise(x0) + s fresh noise.

    a = alpha_bar and s = eta sqrt(posterior variance): eta = 0 is deterministic, eta = 1 along all
    timesteps is ddpm with `variance: small`. noise(x0) is computed from the clipped x0. Song
    et al. (2021), "Denoising diffusion implicit models", eqs. 12 and 16.
    """

    def rule(
        denoise: Denoise, x: Tensor, level: Level, target: Level, previous: Previous, noise: Draw
    ) -> tuple[Tensor, Previous]:
        x0 = denoise(x, level)
        variance = settings.eta**2 * process.posterior_variance(level.alpha_bar, target.alpha_bar)
        direction = process.to_noise(x0, x, level.alpha_bar)
        # Not negative in exact arithmetic; at eta = 1 rounding can make it so.
        rest = math.sqrt(max(0.0, target.sigma**2 - float(variance)))
        x = target.signal * x0 + rest * direction
        if variance > 0.0:
            x = x + variance.sqrt().to(x.dtype) * noise()
        return x, None

    return _spaced(schedule, settings), rule


def dpmpp(schedule: Schedule, settings: SamplerSettings) -> tuple[list[Level], Rule]:
    """Sample by x_next = (sigma_next / sigma) x - signal_next (e^-h - 1) D, DPM-Solver++(2M).

    h is the step in ln(signal / sigma), and D = x0 + (x0 - x0_previous) h / (2 h_previous). The
    first update has D = x0, and the last one returns x0. Lu et al. (2022), "DPM-Solver++",
    algorithm 2. Steps have equal h; `spacing` is not used. With zero terminal SNR, the first update
    starts at the last timestep, and it and the next one are first-order.
    """

    def rule(
        denoise: Denoise, x: Tensor, level: Level, target: Level, previous: Previous, noise: Draw
    ) -> tuple[Tensor, Previous]:
        x0 = denoise(x, level)
        if target is CLEAN:
            return x0, None  # the limit of the formula: h is infinite, since there is no noise
        h = _half_log_snr(target) - _half_log_snr(level)
        mixed = x0
        if previous is not None:
            previous_level, x0_previous = previous
            h_previous = _half_log_snr(level) - _half_log_snr(previous_level)
            mixed = x0 + (x0 - x0_previous) * (h / (2.0 * h_previous))
        # expm1 keeps the digits that exp(-h) - 1 would lose for the small h of many steps.
        x = (target.sigma / level.sigma) * x - target.signal * math.expm1(-h) * mixed
        return x, (level, x0)

    return _levels(schedule, spacings.log_snr(schedule, settings.steps)), rule


def heun(schedule: Schedule, settings: SamplerSettings) -> tuple[list[Level], Rule]:
    """Sample by x'_next = x' + (sigma_next - sigma) (d + d_next) / 2, the trapezoidal rule.

    x' = x / sqrt(alpha_bar), sigma = sqrt((1 - alpha_bar) / alpha_bar), and d = (x' - x0) / sigma
    is the noise in x. d_next is that at the end of the first-order step, x' + (sigma_next - sigma)
    d. So each update evaluates the network twice, and `steps` counts updates; the last one returns
    x0, after one evaluation. Karras et al. (2022), "Elucidating the design space", algorithm 1,
    without fresh noise, at the levels of dpmpp; `spacing` is not used. With zero terminal SNR, the
    first update is first-order, too.
    """

    def rule(
        denoise: Denoise, x: Tensor, level: Level, target: Level, previous: Previous, noise: Draw
    ) -> tuple[Tensor, Previous]:
        x0 = denoise(x, level)
        if target is CLEAN:
            return x0, None
        slope = process.to_noise(x0, x, level.alpha_bar)
        x = target.signal * x0 + target.sigma * slope
        if level.signal == 0.0:
            return x, None
        change = process.to_noise(denoise(x, target), x, target.alpha_bar) - slope
        step = target.sigma / target.signal - level.sigma / level.signal
        return x + target.signal * (step / 2.0) * change, None

    return _levels(schedule, spacings.log_snr(schedule, settings.steps)), rule


SAMPLERS: dict[str, Callable[[Schedule, SamplerSettings], tuple[list[Level], Rule]]] = {
    "ddpm": ddpm,
    "ddim": ddim,
    "dpmpp": dpmpp,
    "heun": heun,
}


def reverse_variance(alphas_bar: Tensor, kind: str) -> Tensor:
    """Return the variance of x_prev given x along S ascending timesteps, float64 (S,).

    `small` is the posterior's, 0 at the first timestep. `large` is beta, but at the first timestep
    the posterior's second value, so that its logarithm is finite (Ho et al. 2020, section 3.2, and
    their code).
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
    # Without signal, h is infinite: the formula of dpmpp is then the first-order step, twice.
    return math.log(level.signal / level.sigma) if level.signal else -math.inf


def _check(settings: SamplerSettings, schedule: Schedule) -> None:
    if not 1 <= settings.steps <= schedule.timesteps:
        raise ValueError(
            f"steps: got {settings.steps}; must be from 1 to the number of timesteps, "
            f"{schedule.timesteps}."
        )
    if not 0.0 <= settings.eta <= 1.0:
        raise ValueError(f"eta: got {settings.eta}; must be from 0 to 1.")
    if settings.variance not in VARIANCES:
        raise ValueError(
            f"variance: got {settings.variance!r}; must be one of {', '.join(VARIANCES)}."
        )
