"""Identities of Gaussian diffusion that the process satisfies."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ddpm_core import rng
from ddpm_core.diffusion import process
from ddpm_core.diffusion.process import SCHEDULES, make_schedule

every_schedule = pytest.mark.parametrize("name", SCHEDULES)
any_length = pytest.mark.parametrize("timesteps", [21, 50, 100, 1000, 4000, 100_000])


def normal(stream: int, *shape: int) -> Tensor:
    key = rng.key(rng.Purpose.NOISE, 0)
    return rng.normal(key, torch.arange(shape[0]), shape[1:], stream=stream).double()


def images() -> Tensor:
    return normal(0, 6, 1, 4, 4).clamp(-1, 1)


# Schedules


@every_schedule
@any_length
def test_alpha_bar_falls_at_every_step(name: str, timesteps: int) -> None:
    schedule = make_schedule(name, timesteps)
    assert schedule.timesteps == timesteps
    assert schedule.betas.dtype == torch.float64
    assert bool((schedule.betas > 0).all()) and bool((schedule.betas < 1).all())
    assert bool((schedule.alphas_bar.diff() < 0).all())
    assert bool((schedule.snr.diff() < 0).all())
    assert torch.isfinite(schedule.snr).all() and torch.isfinite(schedule.noise_to_signal).all()


@every_schedule
@any_length
def test_last_step_is_close_to_a_unit_gaussian(name: str, timesteps: int) -> None:
    alpha_bar = float(make_schedule(name, timesteps).alphas_bar[-1])
    worst_mean = alpha_bar  # squared, of a pixel at 1
    divergence = 0.5 * (worst_mean + (1 - alpha_bar) - 1 - math.log1p(-alpha_bar))
    assert divergence / math.log(2) < 1e-4  # bits a dimension


@every_schedule
def test_every_image_ends_with_unit_gaussian_moments(name: str) -> None:
    schedule = make_schedule(name, 1000)
    x = process.q_sample(torch.ones(1000, 100), normal(1, 1000, 100), schedule.alphas_bar[-1:])
    assert float(x.mean()) == pytest.approx(0.0, abs=0.02)
    assert float(x.std()) == pytest.approx(1.0, abs=0.02)


def test_linear_is_hos_at_1000_steps_and_scales_with_the_number() -> None:
    schedule = make_schedule("linear", 1000)
    assert float(schedule.betas[0]) == pytest.approx(1e-4, rel=1e-12)
    assert float(schedule.betas[-1]) == pytest.approx(0.02, rel=1e-12)
    log_end = float(schedule.alphas_bar[-1].log())
    assert float(make_schedule("linear", 100_000).alphas_bar[-1].log()) == pytest.approx(
        log_end, rel=0.01
    )


def test_cosine_follows_its_curve_until_beta_is_clipped() -> None:
    schedule = make_schedule("cosine", 1000)
    t = torch.arange(1, 1001, dtype=torch.float64) / 1000
    curve = ((t + 0.008) / 1.008 * math.pi / 2).cos() ** 2
    curve = curve / math.cos(0.008 / 1.008 * math.pi / 2) ** 2
    assert torch.allclose(schedule.alphas_bar[:-1], curve[:-1], rtol=1e-9, atol=0)
    assert float(schedule.betas.max()) == float(schedule.betas[-1]) == 0.999
    assert 15_000 < float(schedule.noise_to_signal[-1]) < 25_000
    assert float(schedule.noise_to_signal[-2]) == pytest.approx(640, rel=0.01)


@pytest.mark.parametrize("timesteps", range(2, 30))
def test_cosine_works_from_two_steps_on(timesteps: int) -> None:
    schedule = make_schedule("cosine", timesteps)
    assert float(schedule.alphas_bar[-1]) < 1e-3
    assert bool((schedule.alphas_bar.diff() < 0).all())


@pytest.mark.parametrize(
    ("name", "timesteps", "message"),
    [
        ("linear", 20, "timesteps: got 20; schedule linear requires at least 21"),
        ("linear", 1, "timesteps: got 1; must be at least 2"),
        ("cosine", 0, "timesteps: got 0"),
        ("cosine", -5, "timesteps: got -5"),
        ("cosin", 100, "schedule: got 'cosin'; must be one of linear, cosine"),
    ],
)
def test_invalid_schedules_are_reported(name: str, timesteps: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_schedule(name, timesteps)


# The forward process


@every_schedule
def test_variance_is_preserved(name: str) -> None:
    alpha_bar = make_schedule(name, 100).alphas_bar
    unit = torch.ones(100, 1, dtype=torch.float64)
    signal = process.q_sample(unit, torch.zeros_like(unit), alpha_bar)
    sigma = process.q_sample(torch.zeros_like(unit), unit, alpha_bar)
    assert torch.allclose(signal**2 + sigma**2, unit, rtol=0, atol=1e-14)


@every_schedule
def test_chain_of_q_equals_its_marginal(name: str) -> None:
    schedule = make_schedule(name, 100)
    mean, variance = 1.0, 0.0
    for t in range(100):
        alpha = float(schedule.alphas[t])
        mean, variance = math.sqrt(alpha) * mean, alpha * variance + 1 - alpha
        assert mean**2 == pytest.approx(float(schedule.alphas_bar[t]), rel=1e-12)
        assert variance == pytest.approx(1 - float(schedule.alphas_bar[t]), rel=1e-12)


@every_schedule
@pytest.mark.parametrize("stride", [1, 7])
def test_posterior_satisfies_bayes_rule(name: str, stride: int) -> None:
    """q(prev | x, x0) prop. to q(x | prev) q(prev | x0): the precisions add."""
    alpha_bar = make_schedule(name, 100).alphas_bar[stride::stride]
    prev = make_schedule(name, 100).alphas_bar[:-stride:stride][: len(alpha_bar)]
    alpha = alpha_bar / prev
    x0, x = normal(2, len(alpha), 3), normal(3, len(alpha), 3)
    precision = alpha / (1 - alpha) + 1 / (1 - prev)
    of_x = (alpha.sqrt() / (1 - alpha) / precision)[:, None]
    of_x0 = (prev.sqrt() / (1 - prev) / precision)[:, None]
    mean = process.posterior_mean(x0, x, alpha_bar, prev)
    assert torch.allclose(mean, of_x * x + of_x0 * x0, rtol=1e-9, atol=1e-9)
    variance = process.posterior_variance(alpha_bar, prev)
    assert torch.allclose(variance, 1 / precision, rtol=1e-9, atol=0)


@every_schedule
def test_posterior_at_the_first_step_is_the_clean_image(name: str) -> None:
    schedule = make_schedule(name, 100)
    x0 = images()
    x = process.q_sample(x0, normal(1, *x0.shape), schedule.alphas_bar[:1])
    mean = process.posterior_mean(x0, x, schedule.alphas_bar[:1], schedule.alphas_bar_prev[:1])
    assert torch.allclose(mean, x0, rtol=0, atol=1e-12)
    assert float(schedule.posterior_variance[0]) == 0.0
    assert bool((schedule.posterior_variance[1:] > 0).all())
    assert bool((schedule.posterior_variance <= schedule.betas).all())


# Zero terminal SNR


@every_schedule
@any_length
def test_rescaled_schedule_ends_without_signal(name: str, timesteps: int) -> None:
    plain, rescaled = make_schedule(name, timesteps), make_schedule(name, timesteps, True)
    assert float(rescaled.alphas_bar[-1]) == 0.0 and float(rescaled.snr[-1]) == 0.0
    assert float(rescaled.alphas_bar[0]) == pytest.approx(float(plain.alphas_bar[0]), rel=1e-12)
    assert bool((rescaled.alphas_bar.diff() < 0).all())
    assert torch.allclose(rescaled.alphas.cumprod(0), rescaled.alphas_bar, rtol=1e-9)
    assert torch.allclose(rescaled.betas, 1 - rescaled.alphas)
    assert bool((rescaled.betas > 0).all()) and float(rescaled.betas[-1]) == 1.0
    assert torch.isfinite(rescaled.posterior_variance).all()


def test_rescaling_is_linear_in_the_signal() -> None:
    """Lin et al. (2024), algorithm 1: the signal is shifted by its last value and stretched."""
    plain, rescaled = make_schedule("linear", 1000), make_schedule("linear", 1000, True)
    ratio = rescaled.alphas_bar.sqrt().diff() / plain.alphas_bar.sqrt().diff()
    assert torch.allclose(ratio, ratio[0].expand(999), rtol=1e-6)
    assert float(ratio[0]) > 1.0


# Precision and shape of the coefficients


def test_coefficients_keep_the_precision_of_alpha_bar() -> None:
    alpha_bar = make_schedule("linear", 100_000).alphas_bar[:1]
    sigma = process.q_sample(torch.zeros(1, 1), torch.ones(1, 1), alpha_bar)
    assert float(sigma) == pytest.approx(math.sqrt(1e-6), rel=1e-6)


def test_alpha_bar_may_be_per_sample_or_a_scalar() -> None:
    x0, noise = images(), normal(1, 6, 1, 4, 4)
    alpha_bar = torch.tensor(0.3, dtype=torch.float64)
    for shape in ((1,), (6,), (6, 1, 1, 1)):
        spread = process.q_sample(x0, noise, alpha_bar.expand(shape))
        assert torch.equal(spread, process.q_sample(x0, noise, alpha_bar))
