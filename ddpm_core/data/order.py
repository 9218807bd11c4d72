"""The order of training: the images of each step, as a pure function of seed and step."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
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


class BalancedOrder:
    """The order that draws every class equally often (`train.balance: classes`).

    The endless stream consists of rounds, in which every class occurs once, in random order. So
    position p belongs to round p // C of C classes. Round r takes element r mod n of the
    permutation r // n of a class of n images. Classes without images do not count.
    """

    def __init__(self, labels: Indices) -> None:
        counts = np.bincount(labels)
        members = np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])
        self._members = [images for images in members if len(images)]
        self._recent: dict[int, tuple[tuple[int, int], Indices]] = {}  # the last one of each class

    def indices(self, seed: int, step: int, batch_size: int) -> Indices:
        """Return the indices (B,) of the global batch of a step; steps count from 0."""
        classes = len(self._members)
        rounds, places = np.divmod(
            np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64), classes
        )
        every = torch.arange(int(rounds[0]), int(rounds[-1]) + 1)
        key = rng.key(rng.Purpose.BALANCE, seed)
        # Equal bits are rare, and then classes keep their order.
        orders = rng.bits(key, every, classes).argsort(dim=1, stable=True).numpy()
        drawn = orders[rounds - rounds[0], places]
        indices = np.empty(batch_size, np.int64)
        for number in np.unique(drawn):
            chosen = drawn == number
            indices[chosen] = self._images(seed, int(number), rounds[chosen])
        return indices

    def _images(self, seed: int, number: int, rounds: Indices) -> Indices:
        """Return the images (n,) that a class contributes to rounds, (n,) ascending."""
        members = self._members[number]
        epochs, elements = np.divmod(rounds, len(members))
        images = np.empty(len(rounds), np.int64)
        for epoch in np.unique(epochs):
            address = seed, int(epoch)
            if self._recent.get(number, (None,))[0] != address:
                key = rng.key(rng.Purpose.BALANCE, seed)
                order = rng.permutation(key, len(members), int(epoch), stream=1 + number)
                self._recent[number] = address, members[order.numpy()]
            images[epochs == epoch] = self._recent[number][1][elements[epochs == epoch]]
        return images
