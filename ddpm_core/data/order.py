"""The order of training: the images of each step, as a pure function of seed and step."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ddpm_core import rng

Indices = NDArray[np.int64]


def batch_indices(seed: int, n: int, step: int, batch_size: int) -> Indices:
    """Return the indices (B,) into `n` images of the global batch of a step; steps count from 0.

    Training reads an endless stream of images. Its position p is element p mod n of the
    permutation of epoch p // n, and step s takes the positions from s B to (s + 1) B - 1. So a
    batch may contain the end of one epoch and the beginning of the next.
    """
    positions = np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64)
    epochs, elements = np.divmod(positions, n)
    indices = np.empty(batch_size, np.int64)
    for epoch in np.unique(epochs):
        members = epochs == epoch
        indices[members] = _permutation(seed, n, int(epoch))[elements[members]]
    return indices


@lru_cache(maxsize=2)
def _permutation(seed: int, n: int, epoch: int) -> Indices:
    """Return the permutation of an epoch. Two are cached, for a batch that spans two epochs."""
    order: Indices = rng.permutation(rng.key(rng.Purpose.ORDER, seed), n, epoch).numpy()
    return order
