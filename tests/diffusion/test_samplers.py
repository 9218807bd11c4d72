"""Samplers agree with exact scores, exact solutions and each other."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import stats
from support.moments import some_moments
from torch import Tensor

from ddpm_core import rng
from ddpm_core.diffusion import process, samplers, spacings
from ddpm_core.diffusion.predictions import PREDICTIONS, VPrediction, X0Prediction, make_prediction
from ddpm_core.diffusion.process import SCHEDULES, Schedule, make_schedule
from ddpm_core.diffusion.samplers import SAMPLERS, Level, SamplerSettings, sample
from ddpm_core.diffusion.spacings import SPACINGS

OWN_SPACINGS = ("uniform", "quadratic")
Network = Callable[[Tensor, Tensor], Tensor]
V = VPrediction()


def noise_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Callable[[int], Tensor]:
    key = rng.key(rng.Purpose.SAMPLE, 0)
    return lambda step: rng.normal(key, torch.arange(shape[0]), shape[1:], step).to(dtype)


def only_the_start(shape: tuple[int, ...]) -> Callable[[int], Tensor]:
    draw = noise_of(shape)

    def noise(step: int) -> Tensor:
        assert step == 0, "a deterministic rule asked for noise"
        return draw(step)

    return noise


def some_network(x: Tensor, t: Tensor) -> Tensor:
    """Return a smooth function of x and t that is no denoiser and differs at every timestep."""
    return torch.sin(3 * x + t.view(-1, 1, 1, 1).to(x.dtype) / 7) - 0.3 * x.roll(1, 3)


def silent(x: Tensor, t: Tensor) -> Tensor:
    return torch.zeros_like(x)


# A Gaussian mixture, whose optimal denoiser is known exactly


MEANS = torch.tensor([[-0.6, -0.5], [0.5, -0.4], [0.1, 0.6]], dtype=torch.float64)
SHARES = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
SPREAD = 0.2


def exact_x0(x: Tensor, alpha_bar: Tensor) -> Tensor:
    """Return E[x0 | x] of the mixture for x (B, 2, 1, 1), by Bayes' rule."""
    a = alpha_bar.view(-1, 1, 1)
    signal, variance = a.sqrt(), a * SPREAD**2 + 1 - a
    away = x.flatten(1)[:, None] - signal * MEANS
    likelihood = SHARES.log() - (away**2).sum(2) / (2 * variance[:, :, 0])
    each = MEANS + signal * SPREAD**2 / variance * away
    return (likelihood.softmax(1)[:, :, None] * each).sum(1).view_as(x)


def exact_network(schedule: Schedule, prediction: str) -> Network:
    def network(x: Tensor, t: Tensor) -> Tensor:
        alpha_bar = schedule.alphas_bar[t]
        x0 = exact_x0(x, alpha_bar)
        noise = process.to_noise(x0, x, alpha_bar)
        return make_prediction(prediction).target(x0, noise, alpha_bar)

    return network


SAMPLED_MIXTURE = {
    "ddpm, large": SamplerSettings("ddpm", 500, variance="large"),
    "ddpm, small": SamplerSettings("ddpm", 500, variance="small"),
    "ddpm, shortened": SamplerSettings("ddpm", 200),
    "ddim": SamplerSettings("ddim", 100),
    "ddim, quadratic": SamplerSettings("ddim", 60, spacing="quadratic"),
    "ddim, official": SamplerSettings("ddim", 100, spacing="quadratic_official"),
    "ddim, eta 0.5": SamplerSettings("ddim", 100, eta=0.5),
    "ddim, eta 1": SamplerSettings("ddim", 200, eta=1.0),
    "dpmpp": SamplerSettings("dpmpp", 20),
    "heun": SamplerSettings("heun", 20),
}
every_setting = pytest.mark.parametrize("settings", SAMPLED_MIXTURE.values(), ids=SAMPLED_MIXTURE)


@every_setting
@pytest.mark.parametrize(("name", "prediction"), [("cosine", "v"), ("linear", "noise")])
def test_every_sampler_reproduces_a_mixture_with_exact_score(
    name: str, prediction: str, settings: SamplerSettings
) -> None:
    schedule, count = make_schedule(name, 500), 3000
    network = exact_network(schedule, prediction)
    made = make_prediction(prediction)
    drawn = sample(network, schedule, made, settings, noise_of((count, 2, 1, 1))).flatten(1)
    mode = torch.cdist(drawn, MEANS).argmin(1)
    starts_in_the_middle = name == "cosine" and settings.spacing == "quadratic_official"
    off = (torch.bincount(mode, minlength=3) / count - SHARES).abs()
    assert float(off.max()) < (0.05 if starts_in_the_middle else 0.025)
    for k in range(3):
        members = drawn[mode == k]
        assert torch.allclose(members.mean(0), MEANS[k], atol=0.03)
        assert torch.allclose(members.std(0) / SPREAD, torch.ones(2).double(), atol=0.1)


@pytest.mark.slow
def test_full_chain_reproduces_the_distribution() -> None:
    schedule = make_schedule("cosine", 1000)
    settings = SamplerSettings("ddpm", 1000)
    drawn = sample(exact_network(schedule, "v"), schedule, V, settings, noise_of((2000, 2, 1, 1)))
    centres, shares = MEANS[:, 0].numpy(), SHARES.numpy()

    def cdf(value: np.ndarray) -> np.ndarray:
        return stats.norm.cdf(value[:, None], centres, SPREAD) @ shares

    assert stats.kstest(drawn[:, 0].flatten().numpy(), cdf).pvalue > 1e-3


@every_setting
def test_samplers_start_from_pure_noise_with_zero_snr(settings: SamplerSettings) -> None:
    if settings.spacing == "quadratic_official":
        pytest.skip("starts at 0.8 T with any schedule")
    schedule, count, visited = make_schedule("linear", 500, True), 3000, list[int]()
    exact = exact_network(schedule, "v")

    def network(x: Tensor, t: Tensor) -> Tensor:
        visited.append(int(t[0]))
        return exact(x, t)

    drawn = sample(network, schedule, V, settings, noise_of((count, 2, 1, 1))).flatten(1)
    assert visited[0] == 499 and visited[-1] == 0 and len(set(visited)) == settings.steps
    mode = torch.cdist(drawn, MEANS).argmin(1)
    off = (torch.bincount(mode, minlength=3) / count - SHARES).abs()
    assert float(off.max()) < 0.03
    for k in range(3):
        assert torch.allclose(drawn[mode == k].mean(0), MEANS[k], atol=0.03)


# Compared with each other


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("clip", [True, False])
def test_ddim_with_eta_1_equals_ddpm_with_small_variance(
    name: str, prediction: str, clip: bool
) -> None:
    schedule = make_schedule(name, 100)
    paths: list[list[Tensor]] = []
    for settings in (
        SamplerSettings("ddim", 100, eta=1.0, clip=clip),
        SamplerSettings("ddpm", 100, variance="small", clip=clip),
    ):
        path: list[Tensor] = []

        def network(x: Tensor, t: Tensor, path: list[Tensor] = path) -> Tensor:
            path.append(x)
            return some_network(x, t)

        made = make_prediction(prediction, some_moments())
        last = sample(network, schedule, made, settings, noise_of((3, 1, 4, 4)))
        paths.append([*path, last])
    for a, b in zip(*paths, strict=True):
        assert float((a - b).abs().max()) < 1e-10 * max(1.0, float(a.abs().max()))


@every_setting
def test_perfect_network_yields_its_image(settings: SamplerSettings) -> None:
    schedule = make_schedule("cosine", 500)
    image = noise_of((2, 1, 4, 4))(9).clamp(-1, 1)
    drawn = sample(lambda x, t: image, schedule, X0Prediction(), settings, noise_of((2, 1, 4, 4)))
    assert torch.allclose(drawn, image, rtol=0, atol=1e-12)


# Order of convergence, on a Gaussian whose probability flow has a closed form


def flow_error(sampler: str, steps: int) -> float:
    """Return the distance from the exact flow after `steps` updates with equal steps in log-SNR."""
    schedule = make_schedule("cosine", 100_000)
    mean, spread = 0.3, 0.5
    settings = SamplerSettings(sampler, steps)
    levels = [
        Level(int(t), schedule.alphas_bar[t])
        for t in spacings.log_snr(schedule, steps + 1).flip(0)
        if schedule.noise_to_signal[t] < 20
    ]
    rule = SAMPLERS[sampler](schedule, settings)[1]
    seen: list[Tensor] = []

    def denoise(x: Tensor, level: Level) -> Tensor:
        seen.append(x)
        a = level.alpha_bar
        gain = a.sqrt() * spread**2 / (a * spread**2 + 1 - a)
        return mean + gain * (x - a.sqrt() * mean)

    def standard(x: Tensor, level: Level) -> Tensor:
        return (x - level.signal * mean) / math.sqrt(level.signal**2 * spread**2 + level.sigma**2)

    samplers.run(rule, denoise, noise_of((50, 1, 1, 1))(0), levels, only_the_start((50, 1, 1, 1)))
    return float((standard(seen[-1], levels[-1]) - standard(seen[0], levels[0])).abs().max())


@pytest.mark.parametrize(("sampler", "order"), [("ddim", 1.0), ("dpmpp", 2.0), ("heun", 2.0)])
def test_error_falls_with_the_order_of_the_rule(sampler: str, order: float) -> None:
    errors = [flow_error(sampler, steps) for steps in (40, 80, 160)]
    for coarse, fine in pairwise(errors):
        assert math.log2(coarse / fine) == pytest.approx(order, abs=0.2)


# Fresh noise is drawn only where a rule uses it


@pytest.mark.parametrize("steps", [1, 2, 7, 50])
@pytest.mark.parametrize("sampler", ["ddim", "dpmpp", "heun"])
def test_deterministic_rules_draw_no_fresh_noise(sampler: str, steps: int) -> None:
    schedule = make_schedule("cosine", 50)
    shape = (2, 1, 4, 4)
    drawn = sample(
        some_network, schedule, V, SamplerSettings(sampler, steps), only_the_start(shape)
    )
    assert drawn.shape == shape


@pytest.mark.parametrize(
    "settings",
    [
        SamplerSettings("ddpm", 50),
        SamplerSettings("ddpm", 9, variance="large"),
        SamplerSettings("ddim", 9, eta=0.5),
    ],
)
def test_each_update_but_the_last_draws_noise_once(settings: SamplerSettings) -> None:
    asked: list[int] = []
    draw = noise_of((2, 1, 4, 4))

    def noise(step: int) -> Tensor:
        asked.append(step)
        return draw(step)

    sample(some_network, make_schedule("cosine", 50), V, settings, noise)
    assert asked == list(range(settings.steps))


# The variance of the reverse process


def test_large_variance_starts_with_the_second_posterior_one() -> None:
    schedule = make_schedule("linear", 100)
    large = samplers.reverse_variance(schedule.alphas_bar, "large")
    assert torch.allclose(large[1:], schedule.betas[1:], rtol=1e-9)
    assert float(large[0]) == float(schedule.posterior_variance[1])
    small = samplers.reverse_variance(schedule.alphas_bar, "small")
    assert torch.equal(small, schedule.posterior_variance)


@pytest.mark.parametrize(("steps", "kind"), [(50, "large"), (49, "small"), (1, "small")])
def test_auto_variance_is_large_for_full_chains_only(steps: int, kind: str) -> None:
    schedule, noise = make_schedule("cosine", 50), noise_of((2, 1, 4, 4))
    settings = SamplerSettings("ddpm", steps)
    by_name = sample(some_network, schedule, V, replace(settings, variance=kind), noise)
    assert torch.equal(sample(some_network, schedule, V, settings, noise), by_name)


# Clipping, dtype, the loop


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_estimate_is_clipped_before_use(sampler: str) -> None:
    schedule, seen = make_schedule("cosine", 50), []
    settings = SamplerSettings(sampler, 25, eta=0.0)

    def wild(x: Tensor, t: Tensor) -> Tensor:
        seen.append(float(x.abs().max()))
        return 1e4 * some_network(x, t)

    drawn = sample(wild, schedule, V, settings, noise_of((2, 1, 4, 4)))
    assert float(drawn.abs().max()) == 1.0
    assert max(seen) < 10
    loose = sample(wild, schedule, V, replace(settings, clip=False), noise_of((2, 1, 4, 4)))
    assert float(loose.abs().max()) > 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_images_have_the_dtype_of_the_noise(sampler: str, dtype: torch.dtype) -> None:
    schedule = make_schedule("cosine", 50)

    def network(x: Tensor, t: Tensor) -> Tensor:
        assert x.dtype == dtype and t.dtype == torch.int64 and t.shape == (2,)
        return silent(x, t).to(torch.bfloat16)

    settings = SamplerSettings(sampler, 10, eta=1.0)
    assert sample(network, schedule, V, settings, noise_of((2, 1, 4, 4), dtype)).dtype == dtype


@pytest.mark.parametrize("zero_snr", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 27, 99, 100])
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("spacing", SPACINGS)
def test_every_number_of_steps_up_to_all_works(
    sampler: str, spacing: str, steps: int, zero_snr: bool
) -> None:
    schedule = make_schedule("cosine", 100, zero_snr)
    visited: list[int] = []
    done: list[int] = []

    def network(x: Tensor, t: Tensor) -> Tensor:
        visited.append(int(t[0]))
        return some_network(x, t)

    settings = SamplerSettings(sampler, steps, spacing=spacing)
    drawn = sample(network, schedule, V, settings, noise_of((2, 1, 4, 4)), done.append)
    assert torch.isfinite(drawn).all()
    assert visited == sorted(visited, reverse=True)
    assert done == list(range(1, len(set(visited)) + 1))
    assert visited[-1] == 0 or steps == 1
    if sampler in ("dpmpp", "heun") or spacing != "quadratic_official":
        assert len(set(visited)) == steps
    # Heun evaluates each level but the first twice, and with zero SNR the second one, too.
    twice = sampler == "heun" and steps > 1
    assert len(visited) == len(set(visited)) + (steps - 1 - zero_snr) * twice


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 101}, "steps: got 101; must be from 1 to the number of timesteps, 100"),
        ({"steps": 0}, "steps: got 0"),
        ({"eta": 1.5}, "eta: got 1.5; must be from 0 to 1"),
        ({"eta": math.nan}, "eta: got nan"),
        ({"variance": "huge"}, "variance: got 'huge'; must be one of auto, large, small"),
        ({"sampler": "plms"}, "sampler: got 'plms'; must be one of ddpm, ddim, dpmpp, heun"),
        ({"spacing": "cubic"}, "spacing: got 'cubic'; must be one of uniform, quadratic"),
    ],
)
def test_invalid_sampler_settings_are_reported(change: dict[str, object], message: str) -> None:
    settings = replace(SamplerSettings("ddim", 50), **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=re.escape(message)):
        sample(some_network, make_schedule("cosine", 100), V, settings, noise_of((1, 1, 4, 4)))


# Spacings


@pytest.mark.parametrize("spacing", OWN_SPACINGS)
@pytest.mark.parametrize("timesteps", [2, 3, 10, 100, 1000])
def test_spacing_has_exactly_the_requested_steps(spacing: str, timesteps: int) -> None:
    for steps in {1, 2, 3, 10, 27, 50, timesteps // 2, timesteps - 1, timesteps}:
        if not 1 <= steps <= timesteps:
            continue
        t = SPACINGS[spacing](timesteps, steps)
        assert len(t) == steps and t.dtype == torch.int64
        assert bool((t.diff() > 0).all())
        assert int(t[-1]) == timesteps - 1
        assert int(t[0]) == (0 if steps > 1 else timesteps - 1)


def test_quadratic_is_denser_than_uniform_at_low_noise() -> None:
    assert spacings.uniform(1000, 4).tolist() == [0, 333, 666, 999]
    assert spacings.quadratic(1000, 4).tolist() == [0, 111, 444, 999]
    assert spacings.quadratic(1000, 100)[:6].tolist() == [0, 1, 2, 3, 4, 5]


def test_official_quadratic_spacing_is_the_published_one() -> None:
    published = [int(s) for s in np.linspace(0, np.sqrt(1000 * 0.8), 100) ** 2]
    t = spacings.quadratic_official(1000, 100)
    assert t.tolist() == sorted(set(published))
    assert len(published) == 100 and len(t) == 96 and int(t[-1]) == 800
    for timesteps, steps in ((1000, 11), (1000, 10), (1000, 50), (100, 5), (4000, 200)):
        other = np.linspace(0, np.sqrt(timesteps * 0.8), steps) ** 2
        assert set(spacings.quadratic_official(timesteps, steps).tolist()) == set(other.astype(int))


def test_equal_timesteps_are_moved_apart_within_their_ends() -> None:
    assert spacings.distinct(torch.tensor([0, 0, 0, 1, 5, 9, 9, 9])).tolist() == [
        0,
        1,
        2,
        3,
        5,
        7,
        8,
        9,
    ]
    assert spacings.distinct(torch.tensor([3])).tolist() == [3]


@pytest.mark.parametrize("timesteps", [100, 1000, 4000])
@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_dpmpp_starts_at_sigma_80_to_120_in_equal_log_snr_steps(name: str, timesteps: int) -> None:
    schedule = make_schedule(name, timesteps)
    t = spacings.log_snr(schedule, 20)
    assert len(t) == 20 and bool((t.diff() > 0).all()) and int(t[0]) == 0
    if timesteps > 100:
        assert 80 < float(schedule.noise_to_signal[t[-1]]) < 120
        steps = schedule.noise_to_signal[t].log().diff()[5:]
        assert float(steps.max() / steps.min()) < 1.2


@pytest.mark.parametrize("zero_snr", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_dpmpp_supports_every_number_of_steps(name: str, zero_snr: bool) -> None:
    schedule = make_schedule(name, 50, zero_snr)
    for steps in range(1, 51):
        t = spacings.log_snr(schedule, steps)
        assert len(t) == steps and bool((t.diff() > 0).all()) and 0 <= int(t[0]) <= int(t[-1]) < 50
    assert t.tolist() == list(range(50))


@pytest.mark.parametrize("entry", [*SAMPLERS.values(), *SPACINGS.values()])
def test_docstrings_have_a_formula_and_a_source(entry: object) -> None:
    assert re.search(r"et al\.,? \(?20\d\d", entry.__doc__ or "")
