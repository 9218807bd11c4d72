"""Which images a training step takes: a pure function of the seed and the step."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ddpm_core import rng

Indices = NDArray[np.int64]


def batch_indices(seed: int, n: int, step: int, batch_size: int) -> Indices:
    """Indices (B,) into `n` images of the global batch of a step, from 0.

    Position p of the endless stream is element p mod n of the permutation of epoch p div n; step s
    takes positions [s B, (s + 1) B). A batch may end one epoch and begin the next.
    """
    positions = np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64)
    epochs, elements = np.divmod(positions, n)
    indices = np.empty(batch_size, np.int64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        indices[here] = _permutation(seed, n, int(epoch))[elements[here]]
    return indices


@lru_cache(maxsize=2)
def _permutation(seed: int, n: int, epoch: int) -> Indices:
    """Kept for the steps of an epoch, and for the batch between two."""
    order: Indices = rng.permutation(rng.key(rng.Purpose.ORDER, seed), n, epoch).numpy()
    return order
