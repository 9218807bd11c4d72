"""Which pictures are held out, and which are there more than once: by their content alone."""

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
    """True for the held-out pictures (N,).

    Where the source does not say, a picture is held out if its digest, as a number in [0, 1), is
    below `fraction`: the same whatever else is there, and the same for copies. A class whose every
    picture would be held out is kept for training, with all copies of its pictures; only they move
    when another picture comes to such a class.
    """
    chosen = np.array(
        [
            _as_fraction(digest) < fraction if held is None else held
            for digest, held in zip(digests, given, strict=True)
        ],
        dtype=bool,
    )
    trained = {name for name, held in zip(classes, chosen, strict=True) if not held}
    kept = {
        digest
        for digest, name, said in zip(digests, classes, given, strict=True)
        if name not in trained and said is None
    }
    if kept:
        undecided = np.array([said is None for said in given])
        chosen &= ~(undecided & np.array([digest in kept for digest in digests]))
    return chosen


def untrainable(given: Sequence[bool | None]) -> str:
    """Why `hold_out` would leave none of the usable pictures for training; empty where it does."""
    if not given:
        return "none of the pictures can be used"
    if all(given):
        return (
            f"all {len(given):,} usable pictures are held out, as the source says by names such "
            "as test or val: give pictures for training too, or name them otherwise"
        )
    return ""


def duplicates(digests: Sequence[bytes], held_out: NDArray[np.bool_]) -> dict[str, int]:
    """Counts of exact copies: pictures beyond the first of their kind, and held-out pictures that
    are also in train (possible only where the source names the splits)."""
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
