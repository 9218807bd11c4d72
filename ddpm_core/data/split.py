"""The split into training and held-out images, and duplicates: decided by content alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def hold_out(
    digests: Sequence[bytes],
    classes: Sequence[str | None],
    given: Sequence[bool | None],
    fraction: float,
) -> NDArray[np.bool_]:
    """Return True for each held-out image: shape (N,).

    `given` is the split in the source. Where it is None, an image is held out if its digest, read
    as a number in [0, 1), is below `fraction`. So the result for an image does not depend on other
    images, and copies are always on the same side.

    A class whose images would all be held out is used for training instead, with all copies of its
    images. Only the images of such a class can move when others are added to it.
    """
    chosen = np.array(
        [
            _as_fraction(digest) < fraction if held is None else held
            for digest, held in zip(digests, given, strict=True)
        ],
        dtype=bool,
    )
    trained = {name for name, held in zip(classes, chosen, strict=True) if not held}
    # Keep copies in other classes too: an image must not be in both splits.
    kept = {
        digest
        for digest, name, split in zip(digests, classes, given, strict=True)
        if name not in trained and split is None
    }
    if kept:
        undecided = np.array([split is None for split in given])
        chosen &= ~(undecided & np.array([digest in kept for digest in digests]))
    return chosen


def untrainable(given: Sequence[bool | None]) -> str:
    """Return why `hold_out` would leave no usable image for training, or an empty string."""
    if not given:
        return "none of the images can be used"
    if all(given):
        return (
            f"all {len(given):,} usable images are held out, because their folders have names such "
            "as test or val. Add images for training, or rename the folders"
        )
    return ""


def count_duplicates(digests: Sequence[bytes], held_out: NDArray[np.bool_]) -> dict[str, int]:
    """Count exact copies, as the manifest records them.

    `copies` counts the images beyond the first of each content, and `in_both_splits` the held-out
    images that are also in training, which can happen only if the source defines the splits.
    """
    counts = Counter(digests)
    trained = {digest for digest, held in zip(digests, held_out, strict=True) if not held}
    return {
        "copies": len(digests) - len(counts),
        "pictures_with_copies": sum(1 for count in counts.values() if count > 1),
        "in_both_splits": sum(
            1 for digest, held in zip(digests, held_out, strict=True) if held and digest in trained
        ),
    }


def _as_fraction(digest: bytes) -> float:
    return int.from_bytes(digest[:8], "big") / 2**64
