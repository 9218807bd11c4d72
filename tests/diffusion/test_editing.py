"""Sampling from given images: its ends, what a mask keeps, and the distribution under a mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ddpm_core import rng
from ddpm_core.diffusion.editing import Noise, Original, edit, route
from ddpm_core.diffusion.predictions import VPrediction, X0Prediction
from ddpm_core.diffusion.process import make_schedule
from ddpm_core.diffusion.samplers import SAMPLERS, SamplerSettings, sample

SHAPE = (5, 1, 4, 4)
KEY = rng.key(rng.Purpose.SAMPLE, 3)
IMAGES = torch.linspace(-1, 1, 80, dtype=torch.float64).view(SHAPE)
UPPER = torch.tensor([True, True, False, False]).view(1, 1, 4, 1).expand(5, 1, 4, 4)
SCHEDULE = make_schedule("cosine", 60)


def noise_of(numbers: list[int]) -> Noise:
    index = torch.tensor(numbers)
    return lambda step, stream=0: rng.normal(KEY, index, SHAPE[1:], step, stream).double()


NOISE = noise_of([0, 1, 2, 3, 4])


def some_network(x: Tensor, t: Tensor) -> Tensor:
    return torch.sin(3 * x + t.view(-1, 1, 1, 1).to(x.dtype) / 7) - 0.3 * x.roll(1, 3)


def settings_of(sampler: str, steps: int = 12) -> SamplerSettings:
    return SamplerSettings(sampler, steps, eta=0.5)


def edited(sampler: str, original: Original, noise: Noise = NOISE, steps: int = 12) -> Tensor:
    return edit(some_network, SCHEDULE, VPrediction(), settings_of(sampler, steps), noise, original)


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_full_strength_is_plain_sampling(sampler: str, zero: bool) -> None:
    """So is a mask that keeps nothing, without further passes."""
    schedule = make_schedule("cosine", 60, zero)
    process = (some_network, schedule, VPrediction(), settings_of(sampler))
    plain = sample(*process, lambda step: NOISE(step, 0))
    everything = torch.ones_like(UPPER)
    for original in (Original(IMAGES), Original(IMAGES, 1.0, everything, passes=1)):
        assert torch.equal(edit(*process, NOISE, original), plain)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_strength_goes_from_the_images_to_new_ones(sampler: str) -> None:
    """The network's estimate is the image itself, so that only the noise at the start counts."""
    assert torch.equal(edited(sampler, Original(IMAGES, 0.0)), IMAGES)
    denoised = [
        edit(
            lambda x, t: IMAGES * 0.9,
            SCHEDULE,
            X0Prediction(),
            settings_of(sampler),
            NOISE,
            Original(IMAGES, strength),
        )
        for strength in (0.01, 0.3, 0.6)
    ]
    assert all(torch.allclose(found, IMAGES * 0.9, atol=0.05) for found in denoised)
    away = [
        float((edited(sampler, Original(IMAGES, strength)) - IMAGES).square().mean())
        for strength in (0.01, 0.3, 0.9)
    ]
    assert away[0] < away[1] < away[2]


@pytest.mark.parametrize("steps", [1, 2, 60])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_any_number_of_steps_fits_any_strength(sampler: str, steps: int) -> None:
    for strength in (1e-6, 0.03, 0.5):
        for mask in (None, UPPER):
            found = edited(sampler, Original(IMAGES, strength, mask), steps=steps)
            assert found.isfinite().all()


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_kept_pixels_are_exactly_the_given_ones(sampler: str, strength: float) -> None:
    found = edited(sampler, Original(IMAGES, strength, UPPER))
    assert torch.equal(found[~UPPER], IMAGES[~UPPER])
    assert (strength == 0.0) == torch.equal(found[UPPER], IMAGES[UPPER])


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_an_image_does_not_depend_on_its_batch(sampler: str) -> None:
    original = Original(IMAGES, 0.8, UPPER)
    together = edited(sampler, original)
    rows = [3, 1]
    apart = edited(sampler, original.take(torch.tensor(rows)), noise_of(rows))
    assert torch.equal(together[rows], apart)


def test_every_draw_of_noise_is_different() -> None:
    drawn = []

    def noise(step: int, stream: int = 0) -> Tensor:
        drawn.append((step, stream))
        return NOISE(step, stream)

    edited("ddpm", Original(IMAGES, 1.0, UPPER, passes=4), noise)
    assert len(drawn) == len(set(drawn)) and {stream for _, stream in drawn} == {0, 1, 2}


@pytest.mark.parametrize(("levels", "length", "passes"), [(250, 10, 10), (20, 5, 3), (7, 3, 2)])
def test_route_is_the_published_one(levels: int, length: int, passes: int) -> None:
    """The reference is that of the authors' code, which counts timesteps down to -1."""
    jumps = dict.fromkeys(range(0, levels - length, length), passes - 1)
    t, published = levels, []
    while t >= 1:
        t -= 1
        published.append(t)
        if jumps.get(t, 0) > 0:
            jumps[t] -= 1
            for _ in range(length):
                t += 1
                published.append(t)
    published.append(-1)
    visited = route(levels, Original(IMAGES, 1.0, UPPER, passes, length))
    expected = [visited[0]]
    for position in visited[1:]:
        back = range(expected[-1] - 1, position, -1)
        expected += [*back, position]
    assert [levels - 1 - position for position in expected] == published


def test_passes_go_back_a_25th_of_the_updates() -> None:
    original = Original(IMAGES, 1.0, UPPER, passes=2)
    assert route(4, original) == [0, 1, 0, 1, 2, 1, 2, 3, 2, 3, 4]
    assert route(50, original) == route(50, replace(original, length=2))


@pytest.mark.parametrize(
    ("given", "message"),
    [({"strength": 1.1}, "strength: got 1.1"), ({"passes": 0}, "passes: got 0")],
)
def test_invalid_originals_are_refused(given: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(Original(IMAGES), **given)


# A Gaussian of two correlated pixels, whose conditional distribution is known

CORRELATION, DEVIATION = 0.9, 0.3


def gaussian_network(schedule_alphas: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the exact x0 of a Gaussian with equal variances and a correlation."""
    basis = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / 2**0.5
    variances = DEVIATION**2 * torch.tensor([1 + CORRELATION, 1 - CORRELATION]).double()

    def network(x: Tensor, t: Tensor) -> Tensor:
        a = schedule_alphas[t].view(-1, 1)
        z = x.flatten(1) @ basis.T
        shrunk = a.sqrt() * variances / (a * variances + 1 - a) * z
        return (shrunk @ basis).view_as(x)

    return network


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_passes_bring_the_conditional_distribution(sampler: str) -> None:
    """Given one pixel v, the other has mean 0.9 v and variance (1 - 0.9^2) of the data's.

    With a single pass, the drawn pixel knows little of the given one (Lugmayr et al. 2022, sec. 4).
    """
    count, value = 1000, 0.4
    schedule = make_schedule("cosine", 200)
    images = torch.full((count, 1, 2, 1), value, dtype=torch.float64)
    mask = torch.tensor([True, False]).view(1, 1, 2, 1).expand(count, 1, 2, 1)
    index = torch.arange(count)

    def drawn(passes: int) -> Tensor:
        found = edit(
            gaussian_network(schedule.alphas_bar),
            schedule,
            X0Prediction(),
            SamplerSettings(sampler, 20, clip=False),
            lambda step, stream=0: rng.normal(KEY, index, (1, 2, 1), step, stream).double(),
            Original(images, 1.0, mask, passes),
        )
        return found[:, 0, 0, 0]

    mean, deviation = CORRELATION * value, DEVIATION * (1 - CORRELATION**2) ** 0.5
    once, often = drawn(1), drawn(10)
    assert float(once.mean()) < mean - 0.12
    assert float(often.mean()) == pytest.approx(mean, abs=0.06)
    assert float(often.std()) == pytest.approx(deviation, abs=0.04)
