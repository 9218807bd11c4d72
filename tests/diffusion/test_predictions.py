"""Identities that every prediction satisfies, and those of single ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ddpm_core import rng
from ddpm_core.diffusion import process
from ddpm_core.diffusion.predictions import PREDICTIONS, make_prediction
from ddpm_core.diffusion.process import SCHEDULES, make_schedule

every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)
every_prediction = pytest.mark.parametrize("name", PREDICTIONS)


def normal(stream: int, *shape: int) -> Tensor:
    key = rng.key(rng.Purpose.NOISE, 0)
    return rng.normal(key, torch.arange(shape[0]), shape[1:], stream=stream).double()


@every_schedule
@every_prediction
def test_every_prediction_recovers_image_and_noise(schedule: str, name: str) -> None:
    x0, noise = normal(0, 6, 1, 4, 4).clamp(-1, 1), normal(1, 6, 1, 4, 4)
    alpha_bar = make_schedule(schedule, 1000).alphas_bar[[0, 1, 250, 500, 900, 990]]
    x = process.q_sample(x0, noise, alpha_bar)
    prediction = make_prediction(name)
    output = prediction.target(x0, noise, alpha_bar)
    assert torch.allclose(prediction.to_x0(output, x, alpha_bar), x0, atol=1e-9)
    assert torch.allclose(process.to_noise(x0, x, alpha_bar), noise, atol=1e-9)


@every_prediction
def test_prediction_error_is_relative_to_that_of_x0(name: str) -> None:
    schedule = make_schedule("cosine", 100)
    x, output = normal(2, 100, 1, 1, 1), normal(3, 100, 1, 1, 1)
    prediction = make_prediction(name)
    x0 = prediction.to_x0(output, x, schedule.alphas_bar)
    moved = prediction.to_x0(output + 1, x, schedule.alphas_bar)
    error = prediction.error(schedule.snr).view_as(x)
    assert torch.allclose(error * (moved - x0) ** 2, torch.ones_like(x), rtol=1e-6)


@every_schedule
@every_prediction
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ends_are_finite(schedule: str, name: str, dtype: torch.dtype) -> None:
    alphas_bar = make_schedule(schedule, 1000).alphas_bar
    ends = torch.cat((alphas_bar[[0, -1]], torch.tensor([0.0, 1.0], dtype=torch.float64)))
    x, output = normal(1, 4, 2, 3, 3).to(dtype), normal(2, 4, 2, 3, 3).to(dtype)
    prediction = make_prediction(name)
    x0 = prediction.to_x0(output, x, ends)
    assert x0.dtype == dtype and torch.isfinite(x0).all()
    assert torch.isfinite(prediction.target(x0.clamp(-1, 1), output, ends)).all()
    assert torch.isfinite(process.to_noise(x0.clamp(-1, 1), x, ends)).all()


def test_unknown_prediction_is_reported_with_the_choices() -> None:
    with pytest.raises(ValueError, match="prediction: got 'eps'; must be one of noise, x0, v"):
        make_prediction("eps")
