"""The config of diffusers' schedulers, to and from the settings of a diffusion process."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ddpm_core.errors import UserError
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
    # They belong to thresholding.
    ignored=("dynamic_thresholding_ratio", "sample_max_value"),
)
_SCHEDULES = {"linear": "linear", "cosine": "squaredcos_cap_v2"}
_PREDICTIONS = {"noise": "epsilon", "x0": "sample", "v": "v_prediction"}
# fixed_small_log computes the same variance, as the exponential of its logarithm.
_VARIANCES = {"fixed_large": "large", "fixed_small": "small", "fixed_small_log": "small"}


def to_settings(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of the sections `diffusion` and `sample`. Raises UserError."""
    values, mistakes = FIELDS.read(given)
    if values:
        mistakes += _process_mistakes(values)
    if mistakes:
        raise UserError(
            "The scheduler is not supported:\n  " + "\n  ".join(mistakes) + "\nIf the network was "
            "trained with such a process, it can't be used here. Where the field only changes how "
            "images are drawn, change it in scheduler_config.json and import again."
        )
    diffusion = {
        "schedule": _own(_SCHEDULES, values["beta_schedule"]),
        "timesteps": values["num_train_timesteps"],
        "prediction": _own(_PREDICTIONS, values["prediction_type"]),
    }
    return diffusion, {"variance": _VARIANCES[values["variance_type"]]}


def _process_mistakes(values: Mapping[str, Any]) -> list[str]:
    timesteps = values["num_train_timesteps"]
    if not isinstance(timesteps, int) or timesteps < 1:
        raise ValueError(f"num_train_timesteps is {timesteps!r:.80}")
    mistakes = [
        f"{field} is {values[field]!r:.80}; only {', '.join(allowed)} can be imported"
        for field, allowed in (
            ("beta_schedule", _SCHEDULES.values()),
            ("prediction_type", _PREDICTIONS.values()),
            ("variance_type", _VARIANCES),
        )
        if values[field] not in allowed
    ]
    for field in ("beta_start", "beta_end"):
        wanted = FIELDS.carried[field] * 1000 / timesteps
        linear = values["beta_schedule"] == "linear"
        if linear and not math.isclose(values[field], wanted, rel_tol=1e-6):
            mistakes.append(
                f"{field} is {values[field]!r:.80}; at {timesteps} timesteps it must be {wanted:g}"
            )
    return mistakes


def _own(names: Mapping[str, str], their: str) -> str:
    return next(own for own, name in names.items() if name == their)


def from_settings(name: str, timesteps: int, prediction: str, variance: str) -> dict[str, Any]:
    """Return the config of a DDPMScheduler. Raises UserError.

    `auto` as the variance is Ho's larger one, that of a full chain. x0 is clipped to [-1, 1].
    """
    for given, known in ((name, _SCHEDULES), (prediction, _PREDICTIONS)):
        if given not in known:
            raise UserError(f"diffusers has no {given!r}; {', '.join(known)} can be exported.")
    scheduler = {
        "_class_name": "DDPMScheduler",
        "_diffusers_version": "0.32.0",
        **FIELDS.defaults,
        "beta_schedule": _SCHEDULES[name],
        "beta_start": 1e-4 * 1000 / timesteps,
        "beta_end": 0.02 * 1000 / timesteps,
        "num_train_timesteps": timesteps,
        "prediction_type": _PREDICTIONS[prediction],
        "variance_type": "fixed_small" if variance == "small" else "fixed_large",
    }
    del scheduler["set_alpha_to_one"]  # DDIMScheduler's
    return scheduler
