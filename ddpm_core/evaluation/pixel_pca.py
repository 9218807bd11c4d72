"""Pixels, projected on the leading principal components of the training set.

A feature space that nothing was trained for: it sees brightness, layout and blur, but no meaning.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ddpm_core.evaluation.features import Extractor
from ddpm_core.sampling.images import to_model

COMPONENTS = 64
IMAGES = 2000  # that the components are found from
LARGEST = 64  # pixels a side; larger images are averaged down to it


@dataclass(frozen=True)
class PixelPCA:
    """`mean` float32 (P,) and orthonormal `basis` float32 (P, K) of pixels in [-1, 1]."""

    mean: Tensor
    basis: Tensor

    def project(self, pixels: Tensor) -> Tensor:
        """uint8 (B, H, W, C) to float32 (B, K)."""
        return (flatten(pixels, LARGEST) - self.mean) @ self.basis

    def extractor(self) -> Extractor:
        digest = hashlib.sha256(self.basis.numpy().tobytes()).hexdigest()[:16]
        return Extractor("pixel_pca", "pixel_pca", digest, lambda x: (self.project(x), None))


def fit(pixels: Tensor) -> PixelPCA:
    """The components of images uint8 (N, H, W, C), N >= 2: 64, or as many as there are.

    In float64, from whichever of the covariance (P x P) and the Gram matrix (N x N) is smaller.
    """
    rows = flatten(pixels, LARGEST).double()
    mean = rows.mean(0)
    rows -= mean
    narrow = rows.shape[1] <= len(rows)
    values, vectors = torch.linalg.eigh(rows.T @ rows if narrow else rows @ rows.T)
    order = [i for i in reversed(range(len(values))) if values[i] > 1e-9 * values[-1]]
    values, vectors = values[order[:COMPONENTS]], vectors[:, order[:COMPONENTS]]
    basis = vectors if narrow else rows.T @ vectors / values.sqrt()
    return PixelPCA(mean.float(), basis.float())


def flatten(pixels: Tensor, largest: int) -> Tensor:
    """uint8 (B, H, W, C) to float32 (B, P) in [-1, 1], averaged down to `largest` a side."""
    x = to_model(pixels)
    if max(x.shape[2:]) > largest:
        x = F.adaptive_avg_pool2d(x, largest)
    return x.flatten(1)
