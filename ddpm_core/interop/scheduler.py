"""Convert configs of diffusers' schedulers to and from the settings of a diffusion process."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ddpm_core.config import Diffusion
from ddpm_core.errors import Problem, UserError, got
from ddpm_core.interop.fields import Fields

FIELDS = Fields(
    classes=("DDPMScheduler", "DDIMScheduler"),
    carried={
        "num_train_timesteps": 1000,
        "beta_schedule": "linear",
        "beta_start": 1e-4,
        "beta_end": 0.02,
        "prediction_type": "epsilon",
        "variance_type": "fixed_small",
    },
    fixed={
        "trained_betas": (None,),
        "rescale_betas_zero_snr": (False,),
        "clip_sample": (True,),
        "clip_sample_range": (1.0,),
        "thresholding": (False,),
        "timestep_spacing": ("leading",),
        "steps_offset": (0,),
        "set_alpha_to_one": (True,),
    },
    # Used with thresholding alone.
    ignored=("dynamic_thresholding_ratio", "sample_max_value"),
)
_SCHEDULES = {"linear": "linear", "cosine": "squaredcos_cap_v2"}
_PREDICTIONS = {"noise": "epsilon", "x0": "sample", "v": "v_prediction"}
# fixed_small_log is the same variance, computed as the exponential of its logarithm.
_VARIANCES = {"fixed_large": "large", "fixed_small": "small", "fixed_small_log": "small"}


def to_settings(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of the sections `diffusion` and `sample` for a scheduler's config.

    Raises UserError, which lists all problems, if ddpm does not support the scheduler.
    """
    values, problems = FIELDS.read(given)
    if values:
        problems += _process_problems(values)
    if problems:
        raise UserError(
            "Unsupported scheduler. If the network was trained with these values, ddpm cannot use "
            "it. If they only change how images are drawn, change them in scheduler_config.json "
            "and import it again:",
            problems,
        )
    diffusion = {
        "schedule": _key_of(_SCHEDULES, values["beta_schedule"]),
        "timesteps": values["num_train_timesteps"],
        "prediction": _key_of(_PREDICTIONS, values["prediction_type"]),
    }
    return diffusion, {"variance": _VARIANCES[values["variance_type"]]}


def _process_problems(values: Mapping[str, Any]) -> list[Problem]:
    timesteps = values["num_train_timesteps"]
    if not isinstance(timesteps, int) or timesteps < 1:
        raise ValueError(f"num_train_timesteps is {timesteps!r:.80}")
    problems = [
        Problem(field, got(values[field]), f"must be one of {', '.join(allowed)}")
        for field, allowed in (
            ("beta_schedule", _SCHEDULES.values()),
            ("prediction_type", _PREDICTIONS.values()),
            ("variance_type", _VARIANCES),
        )
        if values[field] not in allowed
    ]
    for field in ("beta_start", "beta_end"):
        expected = FIELDS.carried[field] * 1000 / timesteps
        linear = values["beta_schedule"] == "linear"
        if linear and not math.isclose(values[field], expected, rel_tol=1e-6):
            must = f"must be {expected:g} for {timesteps} timesteps"
            problems.append(Problem(field, got(values[field]), must))
    return problems


def _key_of(names: Mapping[str, str], value: str) -> str:
    return next(key for key, name in names.items() if name == value)


def from_diffusion(diffusion: Diffusion, variance: str) -> dict[str, Any]:
    """Return the config of a DDPMScheduler.

    The variance `auto` becomes Ho's larger one, that of a full chain. x0 is clipped to [-1, 1].
    Raises UserError if diffusers has no such schedule or prediction.
    """
    if diffusion.zero_terminal_snr:
        raise UserError(
            "diffusion.zero_terminal_snr: got true; must be false to be exported. Draw the images "
            "with ddpm (ddpm sample, ddpm serve)."
        )
    timesteps = diffusion.timesteps
    for setting, given, known in (
        ("diffusion.schedule", diffusion.schedule, _SCHEDULES),
        ("diffusion.prediction", diffusion.prediction, _PREDICTIONS),
    ):
        if given not in known:
            raise UserError(
                f"{setting}: got {given!r}; must be one of {', '.join(known)} to be exported, "
                "because diffusers supports no other. Train with one of them, or draw the images "
                "with ddpm (ddpm sample, ddpm serve)."
            )
    scheduler = {
        "_class_name": "DDPMScheduler",
        "_diffusers_version": "0.32.0",
        **FIELDS.defaults,
        "beta_schedule": _SCHEDULES[diffusion.schedule],
        "beta_start": 1e-4 * 1000 / timesteps,
        "beta_end": 0.02 * 1000 / timesteps,
        "num_train_timesteps": timesteps,
        "prediction_type": _PREDICTIONS[diffusion.prediction],
        "variance_type": "fixed_small" if variance == "small" else "fixed_large",
    }
    del scheduler["set_alpha_to_one"]  # a field of DDIMScheduler alone
    return scheduler
