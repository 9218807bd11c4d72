"""Distances between the features of samples and of real images.

Features are float (N, D), one row per image; sums are float64. torch-fidelity computes the Fréchet
and kernel distances, the inception score, precision and recall.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ddpm_core.errors import require

KID_SUBSETS = 100
KID_SUBSET_SIZE = 1000
SPLITS = 10
FEWEST_FOR_IS = 2 * SPLITS  # the score of a split with one image is always 1
SMALL = 10_000  # with fewer images the bias is so large that only equal counts may be compared
_BLOCK = 1000  # rows per block of a distance matrix


@dataclass(frozen=True)
class Moments:
    """Mean (D,) and unbiased covariance (D, D), float64, of `count` rows of features."""

    count: int
    mean: Tensor
    covariance: Tensor


class Accumulator:
    """Moments of features that arrive in batches; memory is D x D for any number of rows."""

    def __init__(self) -> None:
        self._count = 0
        self._shift = self._sum = self._square = torch.zeros(0, dtype=torch.float64)

    def add(self, features: Tensor) -> None:
        """Add float (B, D)."""
        rows = features.to("cpu", torch.float64)
        if not self._count:
            # Subtracting the mean of the first batch keeps the squares small, and so the rounding.
            self._shift = rows.mean(0)
            self._sum = torch.zeros_like(self._shift)
            self._square = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.float64)
        rows = rows - self._shift
        self._count += len(rows)
        self._sum += rows.sum(0)
        self._square += rows.T @ rows

    def moments(self) -> Moments:
        """Return the moments of all rows. Raises ValueError for fewer than two."""
        if self._count < 2:
            raise ValueError(f"got {self._count} rows of features; a covariance requires 2")
        # These are moments of the shifted rows. A shift changes the mean and not the covariance.
        mean = self._sum / self._count
        covariance = (self._square - self._count * torch.outer(mean, mean)) / (self._count - 1)
        return Moments(self._count, self._shift + mean, covariance)


def moments(features: Tensor) -> Moments:
    """Return the moments of features (N, D), N >= 2."""
    accumulator = Accumulator()
    accumulator.add(features)
    return accumulator.moments()


def frechet_distance(a: Moments, b: Moments) -> float:
    """Return |mu_a - mu_b|^2 + tr(S_a + S_b - 2 (S_a S_b)^(1/2)), at least 0.

    Heusel et al. (2017).
    """
    module = require("torch_fidelity.metric_fid", "eval")
    statistics = [{"mu": m.mean.numpy(), "sigma": m.covariance.numpy()} for m in (a, b)]
    result = module.fid_statistics_to_metric(*statistics, verbose=False)
    return max(0.0, float(result[module.KEY_METRIC_FID]))


def kernel_distance(samples: Tensor, real: Tensor) -> tuple[float, float | None]:
    """Return mean and standard deviation of the unbiased MMD^2 over 100 subsets.

    The kernel is (x.y / D + 1)^3. A subset has 1,000 rows, or as many as the smaller set has (at
    least 2). If each subset contains all samples, the deviation is None, because it would say
    nothing about other samples. Values slightly below 0 are normal. Binkowski et al. (2018).
    """
    size = min(KID_SUBSET_SIZE, len(samples), len(real))
    module = require("torch_fidelity.metric_kid", "eval")
    result = module.kid_features_to_metric(
        samples.double(),
        real.double(),
        kid_subsets=KID_SUBSETS,
        kid_subset_size=size,
        verbose=False,
    )
    deviation = float(result[module.KEY_METRIC_KID_STD]) if size < len(samples) else None
    return float(result[module.KEY_METRIC_KID_MEAN]), deviation


def inception_score(logits: Tensor) -> tuple[float, float]:
    """Return mean and standard deviation of exp(E KL(p(y|x) || p(y))) over 10 splits.

    `logits` is (N, K) with N >= 20. The worst score is 1, the best K. Salimans et al. (2016).
    """
    module = require("torch_fidelity.metric_isc", "eval")
    result = module.isc_features_to_metric(logits.float(), splits=SPLITS)
    return float(result[module.KEY_METRIC_ISC_MEAN]), float(result[module.KEY_METRIC_ISC_STD])


def precision_recall(samples: Tensor, real: Tensor, neighbours: int) -> tuple[float, float]:
    """Return the share of samples in the real manifold, and of real rows in the samples' manifold.

    The manifold of a set is the union of balls around its rows that reach to the k-th nearest
    other row. Both sets need more than `neighbours` rows. Kynkäänniemi et al. (2019).
    """
    module = require("torch_fidelity.metric_prc", "eval")
    result = module.prc_features_to_metric(
        samples.double(),
        real.double(),
        prc_neighborhood=neighbours,
        prc_batch_size=_BLOCK,
        save_cpu_ram=True,
        verbose=False,
    )
    return float(result[module.KEY_METRIC_PRECISION]), float(result[module.KEY_METRIC_RECALL])


def density_coverage(samples: Tensor, real: Tensor, neighbours: int) -> tuple[float, float]:
    """Return density and coverage, equations 4 and 5 of Naeem et al. (2020).

    A real ball reaches from a real row to its k-th nearest other real row. Density counts the
    real balls that contain a sample, over k, averaged over samples: 1 for equal distributions, and
    possibly more than 1. Coverage is the share of real balls with at least one sample.
    """
    # cdist computes distances from scalar products that nearly cancel, hence float64. Blocks
    # bound the memory: all distances at once would be N^2 numbers.
    samples, real = samples.double(), real.double()
    holding, covered = 0, 0
    for block in torch.split(real, _BLOCK):
        # The row itself is the first neighbour, at distance 0.
        radius = _distances(block, real).kthvalue(neighbours + 1).values
        inside = _distances(block, samples) <= radius[:, None]
        holding += int(inside.sum())
        covered += int(inside.any(dim=1).sum())
    return holding / (neighbours * len(samples)), covered / len(real)


def _distances(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([torch.cdist(a, block) for block in torch.split(b, _BLOCK)], dim=1)
