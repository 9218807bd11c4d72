"""Power-function averages of weights, and their reconstruction at any width after training.

An average of width sigma_rel at step T weights step tau by tau^gamma, so it always covers the same
share of the run: the standard deviation of tau is sigma_rel T. Karras et al. (2024), "Analyzing and
improving the training dynamics of diffusion models", section 3.1 and appendix C. Imports no torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

WIDTHS = (0.01, 0.28)  # those allowed; at 1 / sqrt(12) = 0.289 all steps count alike
MAX_ERROR = 0.1  # of a reconstructed profile, relative to the norm of the wanted one
SOURCES = 8  # checkpoints that a reconstruction reads, at most


def exponent(width: float) -> float:
    """Return gamma of a width in WIDTHS: (gamma + 1) / ((gamma + 2)^2 (gamma + 3)) = width^2.

    Karras et al. (2024), eq. 123 and algorithm 2.
    """
    inverse = width**-2
    return float(np.roots([1, 7, 16 - inverse, 12 - inverse]).real.max())


def power_decay(gamma: float, step: int) -> float:
    """Return the decay (1 - 1 / step)^(gamma + 1) of a power-function average at a step (from 1).

    It gives step i of n the weight (i^(gamma + 1) - (i - 1)^(gamma + 1)) / n^(gamma + 1), the
    integral of the profile over that step. Karras et al. (2024), eq. 127.
    """
    return float((1 - 1 / step) ** (gamma + 1))


@dataclass(frozen=True)
class Profile:
    """The weights of the steps up to `step`, from 1, in the average of a width."""

    step: int
    width: float


def reconstruct(stored: Sequence[Profile], wanted: Profile) -> tuple[list[float], float]:
    """Return one coefficient per stored profile, and the relative error of their combination.

    The coefficients minimize the squared error between the combination and the wanted profile,
    under the condition that their sum is 1, so that weights that do not change stay as they are.
    Karras et al. (2024), algorithm 3, divides the unconditional minimum by its sum instead, which
    is worse for few profiles. The error is relative to the norm of the wanted profile.
    """
    profiles = [*stored, wanted]
    products = _inner_products(profiles) * wanted.step
    scale = products[-1, -1]
    count = len(stored)
    # The multiplier of the condition on the sum is the last unknown.
    equations = np.ones((count + 1, count + 1))
    equations[:count, :count] = products[:-1, :-1] / scale
    equations[count, count] = 0.0
    right = np.append(products[:-1, -1] / scale, 1.0)
    found = np.linalg.lstsq(equations, right, rcond=1e-13)[0][:count]
    square = 1 - 2 * right[:count] @ found + found @ equations[:count, :count] @ found
    return found.tolist(), float(max(square, 0.0) ** 0.5)


def problem(stored: Sequence[Profile], step: int, width: float) -> str:
    """Return "" if the stored profiles represent a width at `step`, else which width they do."""
    low, high = WIDTHS
    if low <= width <= high and _represents(stored, step, width):
        return ""
    known = [profile.width for profile in stored]
    steps = range(round(low / 0.005), round(high / 0.005) + 1)
    others = [w for number in steps if _represents(stored, step, w := number * 5 / 1000)]
    nearest = min([*known, *others], key=lambda w: abs(w - width))
    return (
        f"must be a width that the averages up to step {step} represent; the nearest is {nearest:g}"
    )


def _represents(stored: Sequence[Profile], step: int, width: float) -> bool:
    return reconstruct(stored, Profile(step, width))[1] <= MAX_ERROR


def source_steps(milestones: Sequence[int], step: int) -> list[int]:
    """Return the steps whose stored averages reconstruct others at `step`, ascending.

    They are `step` and of its earlier milestones, ascending, those nearest to equal parts of it.
    """
    chosen = {step}
    for part in range(1, SOURCES):
        target = step * part / SOURCES
        place = bisect_left(milestones, target)
        near = [s for s in milestones[max(0, place - 1) : place + 1] if s < step]
        if near:
            chosen.add(min(near, key=lambda s: abs(s - target)))
    return sorted(chosen)


def profiles(widths: Sequence[float], milestones: Sequence[int], step: int) -> list[Profile]:
    """Return the profiles of the averages that reconstruct others at `step`.

    `widths` are those of the averages that each checkpoint has; `milestones` is as in
    `source_steps`.
    """
    return [Profile(s, width) for s in source_steps(milestones, step) for width in widths]


def _inner_products(profiles: Sequence[Profile]) -> NDArray[np.float64]:
    """Return the integral of the product of each pair of profiles.

    Karras et al. (2024), eq. 151: for t_a <= t_b it is (gamma_a + 1) (gamma_b + 1) / (gamma_a +
    gamma_b + 1) (t_a / t_b)^gamma_b / t_b.
    """
    step = np.array([float(profile.step) for profile in profiles])
    gamma = np.array([exponent(profile.width) for profile in profiles])
    earlier = step[:, None] <= step
    power = np.where(earlier, gamma[None], gamma[:, None])  # the exponent of the later one
    ratio = np.minimum(step[:, None], step) / np.maximum(step[:, None], step)
    numerator = (gamma[:, None] + 1) * (gamma + 1) * ratio**power
    denominator = (gamma[:, None] + gamma + 1) * np.maximum(step[:, None], step)
    products: NDArray[np.float64] = numerator / denominator
    return products
