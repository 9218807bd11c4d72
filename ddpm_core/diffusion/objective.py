"""The noise levels of a run: a sampler and a weighting, and an adaptive method or none."""

from __future__ import annotations

from collections.abc import Callable

from ddpm_core.diffusion.adaptive import LEARNED
from ddpm_core.diffusion.noise_levels import (
    Context,
    NoiseLevels,
    NoiseLevelSettings,
    finite_snr,
)
from ddpm_core.diffusion.predictions import Prediction
from ddpm_core.diffusion.probed import PROBED
from ddpm_core.diffusion.process import Schedule, lookup
from ddpm_core.diffusion.timestep_samplers import TIMESTEP_SAMPLERS
from ddpm_core.diffusion.weightings import WEIGHTINGS


def none(levels: NoiseLevels, context: Context) -> NoiseLevels:
    """Keep the probabilities of the sampler and the weights of the weighting."""
    return levels


ADAPTIVE_METHODS: dict[str, Callable[[NoiseLevels, Context], NoiseLevels]] = {
    "none": none,
    **LEARNED,
    **PROBED,
}


def make_noise_levels(
    settings: NoiseLevelSettings, schedule: Schedule, prediction: Prediction
) -> NoiseLevels:
    """Return the noise levels of a process for a network with this prediction.

    Raises:
        ValueError: A name is unknown, a number is out of range, or moments are missing.
        UserError: Recorded tables do not fit.
    """
    for name, number in (("gamma", settings.gamma), ("k", settings.k)):
        if number is not None and not 0.0 < number < float("inf"):
            raise ValueError(f"{name}: got {number}; must be a finite number above 0.")
    weigh = lookup(WEIGHTINGS, settings.weighting, "weighting")
    draw = lookup(TIMESTEP_SAMPLERS, settings.sampler, "timesteps.sampler")
    snr = finite_snr(schedule)
    context = Context(settings, snr, prediction.error(snr))
    levels = draw(schedule, weigh(context) / context.error)
    return lookup(ADAPTIVE_METHODS, settings.adaptive, "timesteps.adaptive")(levels, context)
