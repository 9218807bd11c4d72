"""The embedded default: scikit-learn's handwritten digits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpm_core.data.sources import Entry, Found, Listing, Payload, make_listing
from ddpm_core.errors import require

DIGITS_STATE = {"digits": "UCI optical recognition of handwritten digits, 1,797 pictures"}


class Digits:
    """scikit-learn's 1,797 handwritten digits, 8 x 8, white on black; classes 0 to 9."""

    def __init__(self) -> None:
        bundle = require("sklearn.datasets", "eval").load_digits()
        # Values run from 0 to 16.
        self._pixels: NDArray[np.uint8] = np.rint(bundle.images * (255 / 16)).astype(np.uint8)
        self._labels: list[int] = bundle.target.tolist()
        checksum = hashlib.sha256(self._pixels.tobytes()).hexdigest()
        self.facts: dict[str, Any] = {"uri": "digits", "sha256": checksum, "state": DIGITS_STATE}

    def listing(self) -> Listing:
        return make_listing(
            Found(f"{label}/{number:04d}.png", 64, number, bytes)
            for number, label in enumerate(self._labels)
        )

    def read(self, entries: Sequence[Entry]) -> Iterator[tuple[int, Payload]]:
        for position, entry in enumerate(entries):
            yield position, self._pixels[entry.ref]
