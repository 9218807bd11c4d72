"""How far what a network said lies from what it should have said, before it is weighted.

Each takes output and target (B, C, H, W) and gives the mean over each sample's values, (B,).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional


def l2(output: Tensor, target: Tensor) -> Tensor:
    """e^2, e = output - target (Ho et al. 2020, eq. 14)."""
    return (output - target).square().mean((1, 2, 3))


def huber(output: Tensor, target: Tensor) -> Tensor:
    """e^2 where |e| <= 1, 2 |e| - 1 beyond: single large errors pull less.

    Twice Huber's, with delta 1, so that it agrees with l2 near 0. Huber (1964), "Robust estimation
    of a location parameter".
    """
    return 2 * functional.huber_loss(output, target, reduction="none").mean((1, 2, 3))


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"l2": l2, "huber": huber}
