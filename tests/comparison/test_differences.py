"""The verdict of a comparison: paired statistics against values computed by hand."""

from __future__ import annotations

import pytest

from ddpm_core.comparison.report import chance
from ddpm_core.comparison.verdict import best_rate, contest, judge, paired

SPACES = ("x", "y", "z")


def scores(*rows: tuple[float, float, float]) -> dict[int, dict[str, float]]:
    """Return the scores of an arm by seed, from (x, y, z) of each seed."""
    return {seed: dict(zip(SPACES, row, strict=True)) for seed, row in enumerate(rows)}


BASE = scores((10, 5, 3), (20, 6, 4), (30, 7, 5))
BETTER = scores((8, 4, 3), (17, 5, 4), (26, 6, 5.1))  # x and y lower in every seed


def test_paired_difference_by_hand() -> None:
    """Differences -2, -3, -4: mean -3, deviation 1, standard error 1 / sqrt(3)."""
    found = paired({0: 8, 1: 17, 2: 26, 9: 0}, {0: 10, 1: 20, 2: 30, 8: 0})
    assert found is not None and found.seeds == 3 and found.mean == -3
    assert found.error == pytest.approx(3**-0.5)
    assert found.is_clear


def test_two_standard_errors_exactly_are_not_clear() -> None:
    """Differences 1 and 3: mean 2, deviation sqrt(2), standard error 1."""
    found = paired({0: 1, 1: 3}, {0: 0, 1: 0})
    assert found is not None and (found.mean, found.error) == (2, pytest.approx(1))
    assert not found.is_clear
    assert paired({0: 1}, {1: 1}) is None


def test_one_seed_is_never_clear() -> None:
    found = paired({0: 1}, {0: 100})
    assert found is not None and found.error is None and not found.is_clear


def test_a_win_requires_two_spaces_and_no_opposite() -> None:
    assert contest(BETTER, BASE, SPACES).sign == 1
    assert contest(BASE, BETTER, SPACES).sign == -1
    assert contest(BETTER, BASE, ("x", "z")).sign == 0
    mixed = {seed: {**found, "z": found["z"] + 5} for seed, found in BETTER.items()}
    assert contest(mixed, BASE, SPACES).worse == ["z"]
    assert contest(mixed, BASE, SPACES).sign == 0


def test_a_win_counts_only_if_it_survives_its_controls() -> None:
    arms = {"base": BASE, "new": BETTER, "equal": BETTER, "poor": BASE}
    assert judge("new", arms, "base", ["poor"], SPACES).level == "good"
    found = judge("new", arms, "base", ["poor", "equal"], SPACES)
    assert found.level == "caution" and found.detail.endswith("its controls: equal.")
    assert judge("new", arms, "base", ["missing"], SPACES).level == "caution"
    assert judge("base", arms, "new", [], SPACES).level == "bad"
    assert judge("equal", arms, "new", [], SPACES).word == "no clear difference"
    assert judge("new", {"new": scores((1, 1, 1))}, "base", [], SPACES).word == "unknown"


def test_best_rate_has_the_lowest_geometric_mean() -> None:
    """Of (1, 16) and (3, 5), the geometric means are 4 and sqrt(15), the means 8.5 and 4."""
    wide, narrow = {0: {"x": 1.0, "y": 16.0}}, {0: {"x": 3.0, "y": 5.0}}
    assert best_rate({0.1: wide, 0.2: narrow}, ("x", "y")) == 0.2
    assert best_rate({0.1: wide, 0.2: {0: {"x": 1.0, "y": 17.0}}}, ("x", "y")) == 0.1
    assert best_rate({0.1: {}, 0.2: narrow}, ("x", "y")) == 0.2


def test_chance_is_that_of_students_t() -> None:
    """With 2 degrees of freedom, P(|t| > 2) = 1 - 2 / sqrt(6)."""
    assert chance(3) == pytest.approx(1 - 2 / 6**0.5)
    assert chance(1) is None
