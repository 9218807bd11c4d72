"""Features of images: the extractor interface, features of many images, and the pixel PCA."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ddpm_core import rng
from ddpm_core.evaluation.metrics import Accumulator, Moments, moments
from ddpm_core.rng import Purpose
from ddpm_core.sampling.images import Pixels, to_model

BATCH = 100  # images per batch
KEPT = 10_000  # feature rows that are kept for metrics that need all rows at once

PCA_COMPONENTS = 64
PCA_IMAGES = 2000  # training images that the components are computed from
PCA_LARGEST = 64  # pixels per side; larger images are averaged down to it


@dataclass(frozen=True)
class Extractor:
    """A function from images to features, and its identity.

    `run` maps uint8 (B, H, W, C) with 1 or 3 channels to float32 features (B, D) on the CPU.
    Classifiers also return logits (B, K). `space` is part of each score's name, and empty for the
    standard Inception only. `accuracy` is in [0, 1], on held-out images.
    """

    name: str
    space: str
    fingerprint: str
    run: Callable[[Tensor], tuple[Tensor, Tensor | None]]
    accuracy: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def __call__(self, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.run(pixels)


@dataclass(frozen=True)
class Features:
    """The features of a set of images, as the metrics need them.

    `kept` float32 (n, D) are the features of the first n = min(N, 10,000) images. `logits`
    float32 (N, K) come from a classifier, otherwise None.
    """

    moments: Moments | None  # None for fewer than two images
    kept: Tensor
    logits: Tensor | None

    def first(self, count: int) -> Features:
        """Return the features of the first `count` images, at most as many as are kept."""
        kept = self.kept[:count]
        logits = None if self.logits is None else self.logits[:count]
        return Features(moments(kept) if len(kept) > 1 else None, kept, logits)


def extract(
    extractor: Extractor,
    batches: Iterable[Pixels],
    advance: Callable[[int], None] = lambda n: None,
    keep_logits: bool = True,
) -> Features:
    """Return the features of batches of images, uint8 (B, H, W, C) each.

    Calls `advance(B)` after each batch. Memory does not grow with the number of images, except for
    the logits.
    """
    accumulator, kept, logits, count = Accumulator(), [], [], 0
    for pixels in batches:
        # Copy: memory-mapped arrays are read-only, which torch does not support.
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


def in_batches(arrays: Sequence[Pixels]) -> Iterator[Pixels]:
    """Yield the images of several arrays in batches of BATCH, as if they were one array.

    A network's rounding depends on the batch. This way a score does not depend on the shards.
    """
    ends = np.cumsum([len(array) for array in arrays])
    for start in range(0, int(ends[-1]) if len(ends) else 0, BATCH):
        parts = []
        for array, end in zip(arrays, ends.tolist(), strict=True):
            first = start - (end - len(array))
            parts.append(array[max(0, first) : max(0, first + BATCH)])
        yield np.concatenate(parts)


def shuffled(count: int, most: int | None = None) -> NDArray[np.int64]:
    """Return the indices 0..count-1 in a fixed random order, at most `most` of them.

    Prepared images may be sorted by class, so every selection of a few images uses this order.
    """
    order = rng.permutation(rng.key(Purpose.EVALUATE, 0), count, epoch=0)
    indices: NDArray[np.int64] = order[: count if most is None else most].numpy()
    return indices


@dataclass(frozen=True)
class PixelPCA:
    """Pixels projected onto the leading principal components of the training set.

    A feature space without any training: it measures brightness, layout and blur, but no meaning.
    `mean` is float32 (P,), `basis` orthonormal float32 (P, K), for pixels in [-1, 1].
    """

    mean: Tensor
    basis: Tensor

    @classmethod
    def fit(cls, pixels: Tensor) -> PixelPCA:
        """Compute the components of uint8 (N, H, W, C), N >= 2: 64, or as many as there are.

        Works in float64 on the smaller one of covariance (P x P) and Gram matrix (N x N).
        """
        rows = flatten(pixels, PCA_LARGEST).double()
        mean = rows.mean(0)
        rows -= mean
        narrow = rows.shape[1] <= len(rows)
        values, vectors = torch.linalg.eigh(rows.T @ rows if narrow else rows @ rows.T)
        order = [i for i in reversed(range(len(values))) if values[i] > 1e-9 * values[-1]]
        order = order[:PCA_COMPONENTS]
        values, vectors = values[order], vectors[:, order]
        # An eigenvector u of the Gram matrix gives the component X^T u / sqrt(eigenvalue).
        basis = vectors if narrow else rows.T @ vectors / values.sqrt()
        return cls(mean.float(), basis.float())

    def project(self, pixels: Tensor) -> Tensor:
        """Map uint8 (B, H, W, C) to float32 (B, K)."""
        return (flatten(pixels, PCA_LARGEST) - self.mean) @ self.basis

    def extractor(self) -> Extractor:
        """Return the projection as an extractor; its fingerprint is that of the basis."""
        digest = hashlib.sha256(self.basis.numpy().tobytes()).hexdigest()[:16]
        return Extractor("pixel_pca", "pixel_pca", digest, lambda x: (self.project(x), None))


def flatten(pixels: Tensor, largest: int) -> Tensor:
    """Map uint8 (B, H, W, C) to float32 (B, P) in [-1, 1], averaged down to `largest` per side."""
    x = to_model(pixels)
    if max(x.shape[2:]) > largest:
        x = F.adaptive_avg_pool2d(x, largest)
    return x.flatten(1)
