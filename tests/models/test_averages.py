"""Power-function averages: their formulas, and the least squares that reconstruct a width."""

from __future__ import annotations

import numpy as np
import pytest

from ddpm_core.models.averages import (
    SOURCES,
    Profile,
    exponent,
    power_decay,
    problem,
    profiles,
    reconstruct,
    source_steps,
)

PAIR = [0.05, 0.1]


def profile(step: int, width: float, count: int) -> np.ndarray:
    """Return the weight of each of `count` steps in the average at `step`, by running it."""
    weights, gamma = np.zeros(count), exponent(width)
    for number in range(1, step + 1):
        decay = power_decay(gamma, number)
        weights *= decay
        weights[number - 1] += 1 - decay
    return weights


@pytest.mark.parametrize(("width", "gamma"), [(0.05, 16.97), (0.1, 6.94)])
def test_gamma_has_the_published_values(width: float, gamma: float) -> None:
    assert exponent(width) == pytest.approx(gamma, abs=5e-3)


@pytest.mark.parametrize("width", [0.01, 0.05, 0.1, 0.2, 0.28])
def test_gamma_solves_its_equation(width: float) -> None:
    g = exponent(width)
    assert (g + 1) / ((g + 2) ** 2 * (g + 3)) == pytest.approx(width**2, rel=1e-10)


@pytest.mark.parametrize("width", [0.05, 0.1, 0.2])
def test_running_average_has_the_profile_and_its_width(width: float) -> None:
    count, g = 400, exponent(width)
    weights, edges = profile(count, width, count), np.arange(count + 1) / count
    assert weights == pytest.approx(np.diff(edges ** (g + 1)), rel=1e-9)
    middle = (np.arange(count) + 0.5) / count
    mean = weights @ middle
    assert (weights @ (middle - mean) ** 2) ** 0.5 == pytest.approx(width, rel=1e-4)


def test_stored_width_is_reconstructed_as_it_is() -> None:
    stored = profiles(PAIR, [100, 200, 300], 400)
    coefficients, error = reconstruct(stored, Profile(400, 0.1))
    assert coefficients == pytest.approx([0.0] * 7 + [1.0], abs=1e-9)
    assert error < 1e-6


def test_coefficients_minimize_the_error_and_sum_to_one() -> None:
    """The same minimum by brute force, on profiles of 2,000 steps."""
    count = 2000
    stored = profiles(PAIR, [500, 1000, 1500], count)
    coefficients, error = reconstruct(stored, Profile(count, 0.07))
    assert sum(coefficients) == pytest.approx(1.0, abs=1e-12)
    basis = np.stack([profile(p.step, p.width, count) for p in stored], 1)
    wanted = profile(count, 0.07, count)
    # With the last coefficient replaced by one minus the others, the condition disappears.
    free, *_ = np.linalg.lstsq(basis[:, :-1] - basis[:, -1:], wanted - basis[:, -1], rcond=None)
    assert coefficients == pytest.approx([*free, 1 - free.sum()], abs=2e-3)
    distance = np.linalg.norm(basis @ coefficients - wanted) / np.linalg.norm(wanted)
    assert error == pytest.approx(distance, rel=1e-2)
    assert 0.02 < error < 0.05


def test_more_checkpoints_represent_more_widths() -> None:
    several = profiles(PAIR, range(100, 800, 100), 800)
    assert problem(profiles(PAIR, [], 800), 800, 0.07) == ""
    assert problem(profiles(PAIR, [], 800), 800, 0.15).endswith("; the nearest is 0.12")
    assert problem(several, 800, 0.15) == ""
    for width, nearest in ((0.02, 0.035), (0.5, 0.215)):
        assert problem(several, 800, width) == (
            f"must be a width that the averages up to step 800 represent; the nearest is {nearest}"
        )
    assert problem([Profile(800, 0.0123)], 800, 0.02).endswith("the nearest is 0.0123")


@pytest.mark.parametrize("every", [1, 7, 100])
def test_sources_are_few_and_spread_over_the_run(every: int) -> None:
    steps = source_steps(range(every, 10**6, every), 800)
    assert steps[-1] == 800 and len(steps) == SOURCES
    assert all(abs(s - 100 * (i + 1)) <= every / 2 for i, s in enumerate(steps[:-1]))
    assert source_steps([], 800) == [800]
    assert source_steps([200, 400, 600], 800) == [200, 400, 600, 800]
