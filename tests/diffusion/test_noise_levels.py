"""Timesteps are drawn and weighted according to their tables."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy import stats
from support.moments import some_moments
from torch import Tensor

from ddpm_core import rng
from ddpm_core.diffusion import process
from ddpm_core.diffusion.adaptive import LEARNED
from ddpm_core.diffusion.noise_levels import NoiseLevels, NoiseLevelSettings, Statistics
from ddpm_core.diffusion.objective import make_noise_levels
from ddpm_core.diffusion.predictions import PREDICTIONS, make_prediction
from ddpm_core.diffusion.probed import PROBED
from ddpm_core.diffusion.process import SCHEDULES, make_schedule
from ddpm_core.diffusion.timestep_samplers import TIMESTEP_SAMPLERS
from ddpm_core.diffusion.weightings import WEIGHTINGS

SCHEDULE = make_schedule("cosine", 1000)
SNR = SCHEDULE.snr
ALL_T = torch.arange(1000)
MOMENTS = some_moments()


def uniforms(index: Tensor) -> Tensor:
    return rng.uniform(rng.key(rng.Purpose.TIMESTEP, 0), index, ())


def drawn_by(levels: NoiseLevels, count: int) -> Tensor:
    return levels.draw(uniforms, torch.arange(count))


def weights(weighting: str, prediction: str, **settings: float) -> Tensor:
    return made(weighting, prediction, **settings).weight(ALL_T).double()


def made(
    weighting: str, prediction: str, schedule: process.Schedule = SCHEDULE, **settings: Any
) -> NoiseLevels:
    chosen = NoiseLevelSettings(weighting=weighting, moments=MOMENTS, **settings)
    return make_noise_levels(chosen, schedule, make_prediction(prediction, MOMENTS))


def near(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a.double(), b.double(), rtol=1e-6, atol=0)


# Timesteps


@pytest.mark.parametrize("timesteps", [2, 21, 1000])
def test_uniform_draws_every_timestep_equally_often(timesteps: int) -> None:
    schedule = make_schedule("cosine", timesteps)
    drawn = drawn_by(made("uniform", "v", schedule), 200_000)
    assert drawn.dtype == torch.int64
    assert stats.chisquare(torch.bincount(drawn, minlength=timesteps).numpy()).pvalue > 1e-3


def test_draws_follow_any_probability_and_never_zero() -> None:
    p = torch.tensor([0.0, 0.5, 0.0, 0.0, 0.2, 0.3, 0.0], dtype=torch.float64)
    counts = torch.bincount(drawn_by(NoiseLevels(p, torch.ones(7)), 100_000), minlength=7)
    assert int(counts[p == 0].sum()) == 0
    assert stats.chisquare(counts[p > 0].numpy(), (p[p > 0] * 100_000).numpy()).pvalue > 1e-3


def test_ends_of_the_unit_interval_are_timesteps() -> None:
    edge = torch.tensor([0.0, 1.0 - 2.0**-24, 1.0])
    levels = made("uniform", "v")
    assert levels.draw(lambda index: edge[index], torch.arange(3)).tolist() == [0, 999, 999]


def mass(coordinate: Tensor, density: Tensor) -> Tensor:
    """Return the probability of each timestep for a density along a coordinate of theirs."""
    found = density * torch.gradient(coordinate)[0].abs()
    return found / found.sum()


def test_log_normal_and_laplace_have_their_published_densities() -> None:
    log_sigma, log_snr = SCHEDULE.noise_to_signal.log(), SNR.log()
    normal = stats.norm(-1.2, 1.2).pdf(log_sigma.numpy())
    p = made("edm", "v", sampler="log_normal").probability
    assert torch.allclose(p.double(), mass(log_sigma, torch.from_numpy(normal)), atol=1e-9)
    double_exponential = stats.laplace(0, 0.5).pdf(log_snr.numpy())
    p = made("uniform", "v", sampler="laplace").probability
    assert torch.allclose(
        p.double(), mass(log_snr, torch.from_numpy(double_exponential)), atol=1e-9
    )


def test_speed_draws_pairs_with_the_published_density() -> None:
    """Of all timesteps from 700 on, 3.95 % are drawn (linear schedule, T = 1000)."""
    levels = made("uniform", "noise", make_schedule("linear", 1000), sampler="speed")
    assert levels.probability[699] == pytest.approx(5 * float(levels.probability[700]))
    t = drawn_by(levels, 400_000)
    first, second = t[::2], t[1::2]
    assert torch.equal(second, torch.where(first < 642, 642 - first, first - 642))
    assert float((t >= 700).double().mean()) == pytest.approx(0.0395, abs=0.002)


def test_speed_weighs_by_the_increase_of_noise_below_tau() -> None:
    schedule = make_schedule("linear", 1000)
    weight = made("uniform", "noise", schedule, sampler="speed").weights
    assert float(weight[:700].min()) == pytest.approx(0.4, abs=0.01)
    assert float(weight[:700].max()) == pytest.approx(0.6)
    assert int(weight[:700].argmax()) == pytest.approx(219, abs=2)
    assert weight[700:].tolist() == [1.0] * 300


# Weights


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_uniform_weight_is_one_on_every_prediction(prediction: str) -> None:
    assert near(weights("uniform", prediction), torch.ones(1000))


def test_min_snr_has_its_published_forms() -> None:
    bounded = SNR.clamp(max=5.0)
    assert near(weights("min_snr", "x0"), bounded)
    assert near(weights("min_snr", "noise"), bounded / SNR)
    assert near(weights("min_snr", "v"), bounded / (SNR + 1))
    assert near(weights("min_snr", "x0", gamma=2.0), SNR.clamp(max=2.0))


def test_p2_has_its_published_form() -> None:
    assert near(weights("p2", "noise"), 1 / (1 + SNR))
    assert near(weights("p2", "noise", gamma=0.5, k=2.0), 1 / (2 + SNR) ** 0.5)


def test_debias_and_edm_have_their_published_forms() -> None:
    assert near(weights("debias", "noise"), SNR.rsqrt())
    sigma2, data = 1 / SNR, MOMENTS.variance
    assert near(weights("edm", "x0"), (sigma2 + data) / (sigma2 * data))


def test_edm_weight_is_one_on_the_error_of_prediction_edm() -> None:
    """The weighting and the prediction have one definition of the variance of the images."""
    assert torch.equal(weights("edm", "edm"), torch.ones(1000))
    assert MOMENTS.variance > 1.1 * float(MOMENTS.variances.mean()), "the mean is not constant"


@pytest.mark.parametrize("sampler", TIMESTEP_SAMPLERS)
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_levels_of_a_terminal_snr_of_zero_are_finite(sampler: str, weighting: str) -> None:
    schedule = make_schedule("cosine", 1000, zero_terminal_snr=True)
    levels = made(weighting, "v", schedule, sampler=sampler)
    assert bool((levels.probability > 0).all())
    assert float(levels.probability.sum()) == pytest.approx(1.0, abs=1e-5)
    assert torch.isfinite(levels.weights).all() and bool((levels.weights >= 0).all())


@pytest.mark.parametrize("weighting", ["min_snr", "p2", "debias", "edm"])
def test_weighting_is_one_objective_for_all_predictions(weighting: str) -> None:
    """Networks whose predictions imply the same x0 have the same loss."""
    key = rng.key(rng.Purpose.NOISE, 0)
    x0, noise, wrong = (rng.normal(key, ALL_T, (1, 4, 4), stream=i).double() for i in range(3))
    alpha_bar = SCHEDULE.alphas_bar
    implied = process.to_noise(wrong, process.q_sample(x0, noise, alpha_bar), alpha_bar)

    def losses(name: str) -> Tensor:
        prediction = make_prediction(name, some_moments())
        output = prediction.target(wrong, implied, alpha_bar)
        error = (output - prediction.target(x0, noise, alpha_bar)).square().mean((1, 2, 3))
        return weights(weighting, name) * error

    for name in PREDICTIONS:
        assert torch.allclose(losses(name), losses("x0"), rtol=1e-4, atol=1e-12), name


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("timesteps", "zero_snr"), [(21, False), (100_000, False), (1000, True)])
def test_weights_are_finite_and_positive(
    weighting: str, prediction: str, schedule: str, timesteps: int, zero_snr: bool
) -> None:
    weight = made(weighting, prediction, make_schedule(schedule, timesteps, zero_snr)).weights
    assert torch.isfinite(weight).all() and bool((weight > 0).all())


def test_weights_at_zero_and_infinite_snr_are_the_limits() -> None:
    snr = torch.tensor([float("inf"), 1.0, 0.0], dtype=torch.float64)
    ends = process.Schedule(
        "ends", snr, snr, snr, snr, snr=snr, noise_to_signal=snr, posterior_variance=snr
    )
    noise = made("min_snr", "noise", ends).weights
    assert noise.tolist() == pytest.approx([0.0, 1.0, 1.0], abs=1e-12)
    v = made("p2", "v", ends).weights
    assert v.tolist() == pytest.approx([0.0, 0.25, 0.0], abs=1e-12)


def test_mean_weight_of_min_snr_is_the_expected_one() -> None:
    levels = made("min_snr", "v")
    drawn = levels.weight(drawn_by(levels, 100_000)).double()
    expected = float((levels.probability * levels.weights).sum())
    assert float(drawn.mean()) == pytest.approx(expected, abs=5 * float(drawn.std()) / 1e5**0.5)


# State


def test_state_survives_saving_and_loading(tmp_path: Path) -> None:
    p = torch.arange(1, 11, dtype=torch.float64) / 55
    saved = NoiseLevels(p, p * 3)
    save_file(saved.state_dict(), tmp_path / "levels.safetensors")
    loaded = NoiseLevels(torch.full((10,), 0.1), torch.ones(10))
    loaded.load_state_dict(load_file(tmp_path / "levels.safetensors"))
    assert torch.equal(drawn_by(loaded, 1000), drawn_by(saved, 1000))
    assert torch.equal(loaded.weights, saved.weights)


def test_state_of_a_different_process_is_rejected() -> None:
    state = NoiseLevels(torch.full((10,), 0.1), torch.ones(10)).state_dict()
    levels = made("uniform", "v")
    with pytest.raises(ValueError, match=r"got tables .*\(10,\).*must be .*\(1000,\)"):
        levels.load_state_dict(state)


def test_static_levels_do_not_change() -> None:
    levels = made("min_snr", "v").to("cpu")
    before = {name: tensor.clone() for name, tensor in levels.state_dict().items()}
    levels.update(Statistics(step=1, t=ALL_T, error=torch.ones(1000)))
    assert not levels.adaptive
    assert all(torch.equal(before[name], now) for name, now in levels.state_dict().items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weighting": "snr"}, "weighting: got 'snr'; must be one of uniform, min_snr"),
        ({"sampler": "even"}, "timesteps.sampler: got 'even'; must be one of uniform"),
        ({"gamma": -1.0}, "gamma: got -1.0; must be a finite number above 0"),
        ({"k": 0.0}, "k: got 0.0; must be a finite number above 0"),
    ],
)
def test_invalid_noise_level_settings_are_reported(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_noise_levels(NoiseLevelSettings(**settings), SCHEDULE, make_prediction("v"))


@pytest.mark.parametrize(
    "entry",
    [*WEIGHTINGS.values(), *TIMESTEP_SAMPLERS.values(), *LEARNED.values(), *PROBED.values()],
)
def test_docstrings_have_a_formula_and_a_source(entry: object) -> None:
    assert re.search(r"(et al\.|and \w+) \(?20\d\d", entry.__doc__ or "")
