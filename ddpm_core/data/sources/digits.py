"""The default source: scikit-learn's handwritten digits, which need no download."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpm_core.data.sources.base import Entry, Found, Listing, Payload, make_listing
from ddpm_core.errors import require

# Manifests contain this text: with other words, data prepared earlier would become stale.
DIGITS_STATE = {"digits": "UCI optical recognition of handwritten digits, 1,797 pictures"}


class Digits:
    """1,797 handwritten digits, 8 x 8 pixels, white on black, in classes 0 to 9."""

    def __init__(self) -> None:
        values, self._labels = _load()
        # Values range from 0 to 16.
        self._pixels: NDArray[np.uint8] = np.rint(values * (255 / 16)).astype(np.uint8)
        checksum = hashlib.sha256(self._pixels.tobytes()).hexdigest()
        self.facts: dict[str, Any] = {"uri": "digits", "sha256": checksum, "state": DIGITS_STATE}

    def listing(self) -> Listing:
        """Return the digits as images in one folder per class."""
        return make_listing(
            Found(f"{label}/{number:04d}.png", 64, number, bytes)
            for number, label in enumerate(self._labels)
        )

    def read(self, entries: Sequence[Entry]) -> Iterator[tuple[int, Payload]]:
        """Yield pixels uint8 (8, 8), in order."""
        for position, entry in enumerate(entries):
            yield position, self._pixels[entry.ref]


def _load() -> tuple[NDArray[np.float64], list[int]]:
    """Return pixel values (N, 8, 8) and labels from the file in the scikit-learn package.

    Importing scikit-learn takes seconds, and reading the file takes milliseconds. It is imported
    only if the installed version stores the file elsewhere.
    """
    package = importlib.util.find_spec("sklearn")
    path = Path(package.origin or "").parent / "datasets/data/digits.csv.gz" if package else None
    if path is None or not path.is_file():
        bundle = require("sklearn.datasets", "eval").load_digits()
        return bundle.images, bundle.target.tolist()
    rows = np.loadtxt(path, delimiter=",")
    return rows[:, :-1].reshape(-1, 8, 8), rows[:, -1].astype(int).tolist()
