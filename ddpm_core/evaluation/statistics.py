"""Features of many images, a batch at a time: memory is bounded whatever there is to read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddpm_core import rng
from ddpm_core.evaluation.features import Extractor
from ddpm_core.evaluation.metrics import Accumulator, Moments, moments
from ddpm_core.rng import Purpose
from ddpm_core.sampling.images import Pixels

BATCH = 100
KEPT = 10_000  # rows of features that are kept for the metrics that need them all


@dataclass(frozen=True)
class Features:
    """What the metrics need of a set of images.

    `kept` float32 (n, D) are the features of the first n = min(N, 10,000); `logits` float32
    (N, K) those of a classifier, or None.
    """

    moments: Moments | None  # None of fewer than two images
    kept: Tensor
    logits: Tensor | None

    def first(self, count: int) -> Features:
        """Of the first `count` images alone, which must be among the kept ones."""
        kept = self.kept[:count]
        logits = None if self.logits is None else self.logits[:count]
        return Features(moments(kept) if len(kept) > 1 else None, kept, logits)


def extract(
    extractor: Extractor,
    batches: Iterable[Pixels],
    advance: Callable[[int], None] = lambda n: None,
    keep_logits: bool = True,
) -> Features:
    """Features of batches of images, uint8 (B, H, W, C) each; `advance(B)` after each."""
    accumulator, kept, logits, count = Accumulator(), [], [], 0
    for pixels in batches:
        features, scores = extractor(torch.from_numpy(np.array(pixels)))
        accumulator.add(features)
        kept.append(features[: max(0, KEPT - count)])
        count += len(features)
        if scores is not None and keep_logits:
            logits.append(scores)
        advance(len(features))
    return Features(
        moments=accumulator.moments() if count > 1 else None,
        kept=torch.cat(kept) if kept else torch.empty(0, 0),
        logits=torch.cat(logits) if logits else None,
    )


def batches(arrays: Sequence[Pixels]) -> Iterator[Pixels]:
    """Arrays of images, one after the other, in the batches of BATCH that one array would give.

    Rounding in a network depends on the batch: so a score does not depend on the shards.
    """
    ends = np.cumsum([len(array) for array in arrays])
    for start in range(0, int(ends[-1]) if len(ends) else 0, BATCH):
        parts = []
        for array, end in zip(arrays, ends.tolist(), strict=True):
            first = start - (end - len(array))
            parts.append(array[max(0, first) : max(0, first + BATCH)])
        yield np.concatenate(parts)


def shuffled(count: int, most: int | None = None) -> NDArray[np.int64]:
    """Indices 0..count-1 in an order that is always the same, or the first `most` of them.

    Prepared images may lie class by class: whatever takes only some of them takes these.
    """
    order = rng.permutation(rng.key(Purpose.EVALUATE, 0), count, epoch=0)
    indices: NDArray[np.int64] = order[: count if most is None else most].numpy()
    return indices
