"""Per-sample losses between prediction and target, before weighting.

Each loss maps output and target, (B, C, H, W), to the mean over each sample's values, (B,).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional


def l2(output: Tensor, target: Tensor) -> Tensor:
    """Return e^2 with e = output - target (Ho et al. 2020, eq. 14)."""
    return (output - target).square().mean((1, 2, 3))


def huber(output: Tensor, target: Tensor) -> Tensor:
    """Return e^2 where |e| <= 1 and 2 |e| - 1 elsewhere: single large errors have less influence.

    This is twice Huber's loss with delta 1, so that it equals l2 near 0. Huber (1964), "Robust
    estimation of a location parameter".
    """
    return 2 * functional.huber_loss(output, target, reduction="none").mean((1, 2, 3))


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"l2": l2, "huber": huber}
