"""Distances between features of samples and of real images: arithmetic alone, and their names.

Features are float (N, D), one row an image; sums are taken in float64. torch-fidelity does the
Fréchet and kernel distances, the inception score, precision and recall.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ddpm_core.errors import require

KID_SUBSETS = 100
KID_SUBSET_SIZE = 1000
SPLITS = 10
FEWEST_FOR_IS = 2 * SPLITS  # a split of one image always has the score 1
SMALL = 10_000  # below it a Fréchet distance is so biased that only equal N may be compared
_BLOCK = 1000


@dataclass(frozen=True)
class Moments:
    """Mean (D,) and unbiased covariance (D, D), float64, of `count` rows of features."""

    count: int
    mean: Tensor
    covariance: Tensor


class Accumulator:
    """Moments of features that come in pieces; holds D x D numbers however many there are."""

    def __init__(self) -> None:
        self._count = 0
        self._shift = self._sum = self._square = torch.zeros(0, dtype=torch.float64)

    def add(self, features: Tensor) -> None:
        """Count in float (B, D). The first rows' mean is taken off, so that squares stay small."""
        rows = features.to("cpu", torch.float64)
        if not self._count:
            self._shift = rows.mean(0)
            self._sum = torch.zeros_like(self._shift)
            self._square = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.float64)
        rows = rows - self._shift
        self._count += len(rows)
        self._sum += rows.sum(0)
        self._square += rows.T @ rows

    def moments(self) -> Moments:
        """Of at least two rows; fewer have no covariance."""
        if self._count < 2:
            raise ValueError(f"{self._count} rows of features; a covariance needs 2.")
        mean = self._sum / self._count
        covariance = (self._square - self._count * torch.outer(mean, mean)) / (self._count - 1)
        return Moments(self._count, self._shift + mean, covariance)


def moments(features: Tensor) -> Moments:
    """Moments of features (N, D) that are all at hand, N >= 2."""
    accumulator = Accumulator()
    accumulator.add(features)
    return accumulator.moments()


def frechet_distance(a: Moments, b: Moments) -> float:
    """|mu_a - mu_b|^2 + tr(S_a + S_b - 2 (S_a S_b)^(1/2)), Heusel et al. (2017); at least 0."""
    module = require("torch_fidelity.metric_fid", "eval")
    statistics = [{"mu": m.mean.numpy(), "sigma": m.covariance.numpy()} for m in (a, b)]
    result = module.fid_statistics_to_metric(*statistics, verbose=False)
    return max(0.0, float(result[module.KEY_METRIC_FID]))


def kernel_distance(samples: Tensor, real: Tensor) -> tuple[float, float | None]:
    """Mean and deviation of the unbiased MMD^2 with kernel (x.y / D + 1)^3 over 100 subsets.

    Subsets are of 1,000 rows, or as many as the smaller set has (at least 2). The deviation is None
    where each of them has all samples: it would say nothing of other samples. Binkowski et al.
    (2018); values slightly below 0 are ordinary.
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
    """Mean and deviation over 10 splits of exp(E KL(p(y|x) || p(y))), Salimans et al. (2016).

    `logits` (N, K), N >= 20. 1 is the worst, K the best.
    """
    module = require("torch_fidelity.metric_isc", "eval")
    result = module.isc_features_to_metric(logits.float(), splits=SPLITS)
    return float(result[module.KEY_METRIC_ISC_MEAN]), float(result[module.KEY_METRIC_ISC_STD])


def precision_recall(samples: Tensor, real: Tensor, neighbours: int) -> tuple[float, float]:
    """Shares of samples inside the real manifold and the reverse, Kynkäänniemi et al. (2019).

    A set's manifold is the union of balls around its rows out to the k-th other neighbour. Both
    sets need more than `neighbours` rows.
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
    """Naeem et al. (2020), equations 4 and 5, in blocks of 1,000 rows.

    Density: real balls (out to the k-th other real row) that hold a sample, over k, averaged over
    samples; 1 for equal distributions, and not bounded by 1. Coverage: the share of real balls
    that hold at least one sample.
    """
    samples, real = samples.double(), real.double()
    holding, covered = 0, 0
    for block in torch.split(real, _BLOCK):
        radius = _distances(block, real).kthvalue(neighbours + 1).values
        inside = _distances(block, samples) <= radius[:, None]
        holding += int(inside.sum())
        covered += int(inside.any(dim=1).sum())
    return holding / (neighbours * len(samples)), covered / len(real)


def _distances(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([torch.cdist(a, block) for block in torch.split(b, _BLOCK)], dim=1)


def metric_name(metric: str, space: str, count: int) -> str:
    """`fd_in_domain_500`, `kid_10k`: a number carries its feature space and N.

    `space` is empty for the standard Inception alone, and only there is the Fréchet distance
    called `fid`.
    """
    metric = "fid" if metric == "fd" and not space else metric
    return "_".join(part for part in (metric, space, count_label(count)) if part)


def count_label(count: int) -> str:
    """500 as 500, 10000 as 10k, 10500 as 10500."""
    return f"{count // 1000}k" if count and count % 1000 == 0 else str(count)
