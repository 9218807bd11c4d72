"""Identities that every prediction satisfies, and those of single ones."""

from __future__ import annotations

import re

import pytest
import torch
from support.moments import KINDS, normal, random_images, some_moments
from torch import Tensor

from ddpm_core.diffusion import process
from ddpm_core.diffusion.moments import Moments
from ddpm_core.diffusion.predictions import (
    PREDICTIONS,
    WITH_MOMENTS,
    Prediction,
    VPrediction,
    make_prediction,
)
from ddpm_core.diffusion.process import SCHEDULES, make_schedule

every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)
every_prediction = pytest.mark.parametrize("name", [*PREDICTIONS, "wiener, dct"])
COSINE = make_schedule("cosine", 1000)


def made(name: str, channels: int = 1, size: int = 4) -> Prediction:
    name, _, kind = name.partition(", ")
    return make_prediction(name, some_moments(channels, size, kind or "pca"))


@every_schedule
@every_prediction
def test_every_prediction_recovers_image_and_noise(schedule: str, name: str) -> None:
    x0, noise = normal(0, 6, 1, 4, 4).clamp(-1, 1), normal(1, 6, 1, 4, 4)
    alpha_bar = make_schedule(schedule, 1000).alphas_bar[[0, 1, 250, 500, 900, 990]]
    x = process.q_sample(x0, noise, alpha_bar)
    output = made(name).target(x0, noise, alpha_bar)
    tolerance = 1e-6 if name.startswith("wiener") else 1e-9  # its basis is float32
    assert torch.allclose(made(name).to_x0(output, x, alpha_bar), x0, atol=tolerance)
    assert torch.allclose(process.to_noise(x0, x, alpha_bar), noise, atol=1e-9)


@every_prediction
def test_prediction_error_is_relative_to_that_of_x0(name: str) -> None:
    schedule = make_schedule("cosine", 1000)  # more timesteps than wiener takes at a time
    x, output = normal(2, 1000, 1, 4, 4), normal(3, 1000, 1, 4, 4)
    prediction = made(name)
    x0 = prediction.to_x0(output, x, schedule.alphas_bar)
    moved = prediction.to_x0(output + 1, x, schedule.alphas_bar)
    error = prediction.error(schedule.snr).view(-1, 1, 1, 1)
    assert torch.allclose(error * (moved - x0) ** 2, torch.ones_like(x), rtol=1e-6)


@every_schedule
@every_prediction
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ends_are_finite(schedule: str, name: str, dtype: torch.dtype) -> None:
    alphas_bar = make_schedule(schedule, 1000).alphas_bar
    ends = torch.cat((alphas_bar[[0, -1]], torch.tensor([0.0, 1.0], dtype=torch.float64)))
    x, output = normal(1, 4, 1, 4, 4).to(dtype), normal(2, 4, 1, 4, 4).to(dtype)
    prediction = made(name)
    x0 = prediction.to_x0(output, x, ends)
    assert x0.dtype == dtype and torch.isfinite(x0).all()
    target = prediction.target(x0.clamp(-1, 1), output, ends)
    assert target.dtype == dtype and torch.isfinite(target).all()
    assert torch.isfinite(process.to_noise(x0.clamp(-1, 1), x, ends)).all()


@every_prediction
def test_alpha_bar_may_be_a_scalar(name: str) -> None:
    x0, noise, prediction = normal(0, 6, 1, 4, 4), normal(1, 6, 1, 4, 4), made(name)
    one = torch.tensor(0.3, dtype=torch.float64)
    for method in (prediction.target, prediction.to_x0):
        assert torch.allclose(method(x0, noise, one), method(x0, noise, one.expand(6)), atol=1e-12)


def test_unknown_prediction_is_reported_with_the_choices() -> None:
    with pytest.raises(ValueError, match="prediction: got 'eps'; must be one of noise, x0, v, edm"):
        make_prediction("eps")


@pytest.mark.parametrize("name", WITH_MOMENTS)
def test_predictions_without_their_moments_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"prediction: got '{name}', which requires moments"):
        make_prediction(name)


@every_prediction
def test_docstrings_have_a_formula_and_a_source(name: str) -> None:
    text = PREDICTIONS[name.partition(",")[0]].__doc__ or ""
    assert re.search(r"\(?(19|20)\d\d\)?", text) and "x0 =" in text


# Preconditioned predictions


def white(variance: float) -> Moments:
    """Return moments of images whose values have one variance, are independent and have mean 0."""
    values = torch.full((1, 4, 4), variance, dtype=torch.float64)
    return Moments(torch.zeros_like(values), values, torch.eye(16, dtype=torch.float64))


@pytest.mark.parametrize("name", WITH_MOMENTS)
def test_preconditioning_for_unit_variance_is_minus_v(name: str) -> None:
    alpha_bar = COSINE.alphas_bar[[0, 300, 700, 999]]
    x0, noise = normal(0, 4, 1, 4, 4), normal(1, 4, 1, 4, 4)
    own, v = make_prediction(name, white(1.0)), VPrediction()
    assert torch.allclose(
        own.target(x0, noise, alpha_bar), -v.target(x0, noise, alpha_bar), atol=1e-9
    )
    x = process.q_sample(x0, noise, alpha_bar)
    assert torch.allclose(own.to_x0(noise, x, alpha_bar), v.to_x0(-noise, x, alpha_bar), atol=1e-9)
    assert torch.allclose(own.error(COSINE.snr), v.error(COSINE.snr), rtol=1e-12)


def test_edm_has_the_published_coefficients() -> None:
    s2, t = 0.25, [5, 300, 700, 990]
    alpha_bar, sigma2 = COSINE.alphas_bar[t], 1 / COSINE.snr[t]
    x, output = normal(0, 4, 1, 4, 4), normal(1, 4, 1, 4, 4)
    skip = s2 / (sigma2 + s2)
    out = (sigma2 * s2 / (sigma2 + s2)).sqrt()
    expected = skip.view(-1, 1, 1, 1) * x / alpha_bar.sqrt().view(-1, 1, 1, 1)
    expected = expected + out.view(-1, 1, 1, 1) * output
    found = make_prediction("edm", white(s2)).to_x0(output, x, alpha_bar)
    assert torch.allclose(found, expected, rtol=1e-9)


def test_wiener_for_one_variance_is_edm() -> None:
    alpha_bar, x0, noise = (
        COSINE.alphas_bar[[3, 500, 997]],
        normal(0, 3, 1, 4, 4),
        normal(1, 3, 1, 4, 4),
    )
    edm, wiener = (make_prediction(name, white(0.3)) for name in ("edm", "wiener"))
    expected = edm.target(x0, noise, alpha_bar)
    assert torch.allclose(wiener.target(x0, noise, alpha_bar), expected, atol=1e-9)


def noisy(moments: Moments, t: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return Gaussian images with these moments, noise, their x_t, and alpha_bar."""
    x0, noise = random_images(moments, 20_000), normal(12, 20_000, *moments.mean.shape)
    alpha_bar = COSINE.alphas_bar[t]
    return x0, noise, process.q_sample(x0, noise, alpha_bar), alpha_bar


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("t", [50, 400, 900])
def test_wiener_output_0_is_the_gaussian_posterior_mean(kind: str, t: int) -> None:
    """E[x0 | x] = m + a S (a^2 S + (1 - a^2) I)^-1 (x - a m), S the covariance, a^2 = alpha_bar."""
    moments = some_moments(3, 2, kind)
    _, _, x, alpha_bar = noisy(moments, t)
    unit = torch.eye(12, dtype=torch.float64)
    basis = moments.images(unit.view(12, 3, 2, 2)).flatten(1).T
    covariance = basis * moments.variances.double().flatten() @ basis.T
    mean, a = moments.mean.double().flatten(), alpha_bar.sqrt()
    gain = a * covariance @ torch.linalg.inv(alpha_bar * covariance + (1 - alpha_bar) * unit)
    expected = mean + (x.flatten(1) - a * mean) @ gain.T
    found = make_prediction("wiener", moments).to_x0(torch.zeros_like(x), x, alpha_bar)
    assert torch.allclose(found.flatten(1), expected, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("t", [50, 400, 900, 999])
def test_error_of_the_linear_denoiser_is_its_formula(kind: str, t: int) -> None:
    """Mean of l s^2 / (l + s^2) over the variances l; the target has unit variance."""
    moments = some_moments(3, 2, kind)
    x0, noise, x, alpha_bar = noisy(moments, t)
    prediction = make_prediction("wiener", moments)
    linear = prediction.to_x0(torch.zeros_like(x), x, alpha_bar)
    sigma2, variances = 1 / COSINE.snr[t], moments.variances.double()
    formula = float((variances * sigma2 / (variances + sigma2)).mean())
    assert float((linear - x0).square().mean()) == pytest.approx(formula, rel=0.02)
    assert 1 / float(prediction.error(COSINE.snr[t : t + 1])) == pytest.approx(formula, rel=1e-9)
    target = prediction.target(x0, noise, alpha_bar)
    assert float(target.square().mean()) == pytest.approx(1.0, rel=0.02)
    assert torch.allclose(target * formula**0.5, x0 - linear, atol=1e-5)


@pytest.mark.parametrize("t", [0, 400, 999])
def test_target_of_edm_has_unit_variance(t: int) -> None:
    moments = some_moments(3, 2)
    centred = Moments(torch.zeros_like(moments.mean), moments.variances, moments.basis)
    x0, noise, _, alpha_bar = noisy(centred, t)
    target = make_prediction("edm", centred).target(x0, noise, alpha_bar)
    assert float(target.square().mean()) == pytest.approx(1.0, rel=0.02)
