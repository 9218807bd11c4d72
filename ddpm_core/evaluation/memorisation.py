"""Whether samples are copies: their nearest training images, against those of held-out images.

Samples that lie closer to the training set than real images that were not trained on do are
suspicious. A distance is the root mean square difference of pixels in units of the query's own
contrast (or else a bird in an empty sky would be near to every sky), of images averaged down to 32
a side, the smaller one of the query and its mirror image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddpm_core.data.dataset import PackedArray, PackedDataset
from ddpm_core.errors import require
from ddpm_core.evaluation.pixel_pca import flatten
from ddpm_core.sampling.images import Pixels

LARGEST = 32  # pixels a side
EXAMINED = 2000  # samples, and held-out images
CHUNK = 1000  # training images at a time
QUANTILE = 0.01
NEAR = 0.35  # of held-out images' median distance: nearer is nearly the same picture
VERBATIM = 0.1  # of the same: nearer is the same picture, but for noise of two or three levels
SEVERAL = 3
CHANCE = 0.01  # a p-value below it is no chance
LEAST = 0.04  # contrast of an even image, of pixels in [-1, 1]
PAIRS = 16

Images = Pixels | PackedArray  # uint8 (n, H, W, C), of which rows are taken by their numbers


@dataclass(frozen=True)
class Neighbours:
    """For each query its distance (n,), the training image's index (n,), and whether mirrored."""

    distance: NDArray[np.float64]
    index: NDArray[np.int64]
    mirrored: NDArray[np.bool_]


def nearest(
    queries: Pixels, train: PackedDataset, device: torch.device | None = None
) -> Neighbours:
    """The nearest training image of each query, uint8 (n, H, W, C).

    A chunk of training images is in memory at a time. The search is in float32; the distance of
    the image found is computed anew from the difference, so that a copy has exactly 0.
    """
    return _neighbours(queries, train.images, device)


def nearest_other(images: Pixels, device: torch.device | None = None) -> Neighbours:
    """Find the nearest other one of each of at least two images, uint8 (n, H, W, C)."""
    return _neighbours(images, images, device, other=True)


def _neighbours(
    queries: Pixels, images: Images, device: torch.device | None, other: bool = False
) -> Neighbours:
    """Find the nearest of `images`; if `other`, query i is image i, which does not count."""
    if not len(queries):
        return Neighbours(np.empty(0), np.empty(0, np.int64), np.empty(0, np.bool_))
    both = torch.cat([_flat(queries), _flat(queries[:, :, ::-1])])
    found = _search(both, images, device or torch.device("cpu"), other)
    straight, mirrored = _distances(both, images, found).reshape(2, -1) / _contrast(queries)
    flip = mirrored < straight
    plain, turned = found.reshape(2, -1)
    index = np.where(flip, turned, plain)
    return Neighbours(np.minimum(straight, mirrored), index, flip)


def _search(
    queries: Tensor, images: Images, device: torch.device, other: bool
) -> NDArray[np.int64]:
    """The index of the nearest image of each row (n, P); `other` as in `_neighbours`."""
    queries = queries.to(device)
    own = torch.arange(len(queries), device=device) % len(images)
    best = torch.full((len(queries),), torch.inf, device=device)
    where = torch.zeros(len(queries), dtype=torch.int64, device=device)
    for start in range(0, len(images), CHUNK):
        rows = _flat(images[start : start + CHUNK]).to(device)
        # |q - r|^2 without |q|^2, which is the same for all r.
        table = torch.addmm(rows.square().sum(1), queries, rows.T, alpha=-2)
        if other:
            columns = torch.arange(start, start + len(rows), device=device)
            table.masked_fill_(own[:, None] == columns, torch.inf)
        squares, places = table.min(1)
        where = torch.where(squares < best, places + start, where)
        best = torch.minimum(squares, best)
    found: NDArray[np.int64] = where.cpu().numpy()
    return found


def _distances(queries: Tensor, images: Images, index: NDArray[np.int64]) -> Any:
    """Root mean square differences (n,) float64 of rows (n, P) in [-1, 1] and images."""
    parts = []
    for start in range(0, len(queries), CHUNK):
        part = slice(start, start + CHUNK)
        difference = queries[part].double() - _flat(images[index[part]]).double()
        parts.append(difference.square().mean(1).sqrt().numpy())
    return np.concatenate(parts)


def _contrast(images: Pixels) -> Any:
    """The deviation (n,) float64 of each image's pixels around the mean of their channel."""
    rows, count = _flat(images).double(), images.shape[3]
    channels = rows.view(len(rows), count, rows.shape[1] // count)
    return channels.var(2, correction=0).mean(1).sqrt().clamp(min=LEAST).numpy()


def compare(samples: NDArray[np.float64], holdout: NDArray[np.float64]) -> dict[str, Any]:
    """Facts about distances to the training set, of samples (n,) and held-out images (m,).

    `share_below` is the share of samples nearer than 99 % of held-out images are, `expected_below`
    where nothing is memorised; `p_value` that of Mann and Whitney's test that samples are not
    nearer. The other p-values are those of Fisher's exact test that samples have no larger share.

    Held-out images at distance 0 are training images too, as a source with splits of its own may
    have them. They say nothing of nearness without memory and are left out, so that every limit is
    above 0 and a sample that is a training image always counts as verbatim.
    """
    untrained = holdout[holdout > 0]
    exact = {
        "exact": int((samples == 0).sum()),
        "holdout_exact": len(holdout) - len(untrained),
    }
    holdout = untrained
    if not len(samples) or not len(holdout):
        return {"count": len(samples), **exact, "verdict": "unknown"}
    stats = require("scipy.stats", "eval")

    def counted(limit: float) -> tuple[int, int, float]:
        """How many samples and held-out images are nearer, and the p-value."""
        ours, theirs = int((samples < limit).sum()), int((holdout < limit).sum())
        table = [[ours, len(samples) - ours], [theirs, len(holdout) - theirs]]
        return ours, theirs, float(stats.fisher_exact(table, alternative="greater").pvalue)

    threshold, median = float(np.quantile(holdout, QUANTILE)), float(np.median(holdout))
    below, _, share_p_value = counted(threshold)
    copies, holdout_copies, copies_p_value = counted(NEAR * median)
    verbatim, holdout_verbatim, verbatim_p_value = counted(VERBATIM * median)
    rank = stats.mannwhitneyu(samples, holdout, alternative="less")
    facts: dict[str, Any] = {
        "count": len(samples),
        "holdout_count": len(holdout),
        **exact,
        "median": float(np.median(samples)),
        "holdout_median": median,
        "threshold": threshold,
        "share_below": below / len(samples),
        "expected_below": expected_below(len(holdout)),
        "share_p_value": share_p_value,
        "p_value": float(rank.pvalue),
        "nearer": 1 - float(rank.statistic) / (len(samples) * len(holdout)),
        "copies": copies,
        "holdout_copies": holdout_copies,
        "copies_p_value": copies_p_value,
        "verbatim": verbatim,
        "holdout_verbatim": holdout_verbatim,
        "verbatim_p_value": verbatim_p_value,
    }
    return {**facts, "verdict": _verdict(facts)}


def expected_below(count: int) -> float:
    """The share of all images that lies, on average, below the quantile of `count` of them.

    Of `count` draws the i-th smallest has i / (count + 1) below it on average; the quantile lies
    between two of them. It is QUANTILE of very many, 0.017 of 100 and 0.1 of 10.
    """
    return (QUANTILE * (count - 1) + 1) / (count + 1)


def _verdict(facts: dict[str, Any]) -> str:
    """`copies`, `near` or `none`, by what samples do beyond what held-out images do.

    `copies`: more than one in a hundred beyond the share of held-out images is nearly the same as a
    training image, and that is no chance; or several are the same to the eye, which is no chance,
    or more than one in a hundred and no held-out image. `near`: many lie among the nearest, or all
    of them lie nearer, by more than chance.

    Where near-duplicates are as frequent among held-out images, at most 1 % of models are said to
    copy. Of models of which 5 % of samples are nearly the same as a training image 8 in 10 are
    found by 180 samples and as many held-out images; with 50 held-out images it takes 10 %, and
    with 10 of them 40 %. Verbatim copies need no held-out images: where 2 % are,
    7 in 10 models are found by 180 samples, and 9 in 10 by 500. The price: where the data hold
    such twins themselves, as blank pictures are, fewer than 500 held-out images may have none (and
    exact ones are left out), and what draws them as often as they occur is said to copy.
    """
    share = facts["copies"] / facts["count"] - facts["holdout_copies"] / facts["holdout_count"]
    nearly = share > 0.01 and facts["copies_p_value"] < CHANCE
    untold = not facts["holdout_verbatim"] and facts["verbatim"] > 0.01 * facts["count"]
    no_chance = facts["verbatim_p_value"] < CHANCE or untold
    if nearly or (facts["verbatim"] >= SEVERAL and no_chance):
        return "copies"
    many = facts["share_below"] > 5 * facts["expected_below"] and facts["share_p_value"] < 0.001
    nearer = facts["nearer"] > 0.6 and facts["p_value"] < 0.01
    return "near" if many or nearer else "none"


def straddling(holdout: Neighbours) -> NDArray[np.int64]:
    """Held-out images that are the same as a training image, or nearly, the nearest first."""
    order = np.argsort(holdout.distance, kind="stable")
    distance = holdout.distance[order]
    others = distance[distance > 0]
    limit = NEAR * np.median(others) if len(others) else 0.0
    near: NDArray[np.int64] = order[(distance == 0) | (distance < limit)]
    return near


def closest(neighbours: Neighbours) -> NDArray[np.int64]:
    """The 16 queries that are nearest to a training image, the nearest first."""
    return np.argsort(neighbours.distance, kind="stable")[:PAIRS]


def _flat(pixels: Pixels) -> Tensor:
    return flatten(torch.from_numpy(np.ascontiguousarray(pixels)), LARGEST)
