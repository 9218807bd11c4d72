"""Whether samples repeat one another: near duplicates among them, against those of real images.

Real images may have duplicates too, such as blank pictures. So as many real images, of the same
classes, are looked at in the same way. Distances are those of `memorisation`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpm_core.errors import require
from ddpm_core.evaluation.memorisation import CHANCE, NEAR, SEVERAL

COLLAPSED = 0.25  # of samples repeat another one, beyond what real images do
REPEATS = 0.01  # the same, from which on it is reported
FEWEST = 5  # images of each set: of fewer even identical ones may be chance


def compare(samples: NDArray[np.float64], real: NDArray[np.float64]) -> dict[str, Any]:
    """Return the facts about samples and as many real images.

    Both arguments are the distances (n,) of each image to its nearest other one in the same set.
    An image nearer to another one than `limit`, 0.35 of the median of the real images, repeats it.
    `p_value` is that of Fisher's exact test that no larger share of samples repeat one another.

    The verdict is `collapsed` if over 25 % of samples do beyond the share of real images, and
    `repeats` if over 1 % and at least 3 samples do; both only where that is no chance. Photographs
    blurred beyond recognition (a deviation of 8 of 32 pixels) repeat one another in 9 %.
    """
    apart = real[real > 0]
    exact = {"exact": int((samples == 0).sum()), "real_exact": len(real) - len(apart)}
    if not len(apart):
        return {"count": len(samples), **exact, "verdict": "unknown"}
    limit = NEAR * float(np.median(apart))
    ours, theirs = int((samples < limit).sum()), int((real < limit).sum())
    table = [[ours, len(samples) - ours], [theirs, len(real) - theirs]]
    chance = require("scipy.stats", "eval").fisher_exact(table, alternative="greater").pvalue
    beyond = ours / len(samples) - theirs / len(real)
    verdict = "none"
    if chance < CHANCE and ours >= SEVERAL and beyond > REPEATS:
        verdict = "collapsed" if beyond > COLLAPSED else "repeats"
    return {
        "count": len(samples),
        **exact,
        "median": float(np.median(samples)),
        "real_median": float(np.median(real)),
        "limit": limit,
        "repeats": ours,
        "real_repeats": theirs,
        "p_value": float(chance),
        "verdict": verdict,
    }
