"""Check whether samples copy training images, and whether they repeat one another.

Both checks compare with real images. Samples closer to the training set than held-out images are
suspicious. So are samples with more near duplicates among them than as many training images have.

A distance is the root mean square difference of pixels of images averaged down to 32 per side, for
the image or its mirror image, whichever is nearer. It is divided by the contrast of the query:
otherwise a bird in an empty sky would be near every sky.
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
from ddpm_core.evaluation.features import flatten
from ddpm_core.sampling.images import Pixels
from ddpm_core.scores import Collapse, Memorisation

LARGEST = 32  # pixels per side
EXAMINED = 2000  # samples, and held-out images
CHUNK = 1000  # training images in memory at a time
PAIRS = 16  # nearest pairs in the report
LEAST_CONTRAST = 0.04  # for uniform images, with pixels in [-1, 1]

# Limits, as shares of the median distance of real images.
NEAR = 0.35  # below it two images are nearly the same
VERBATIM = 0.1  # below it two images are the same except for noise of two or three levels

QUANTILE = 0.01  # of the held-out distances; samples below it count towards `near`
SEVERAL = 3  # the fewest samples that make a verdict
CHANCE = 0.01  # p-values below it are significant
COLLAPSED = 0.25  # share of samples that repeat another one, beyond the share of real images
REPEATS = 0.01  # the same share, for a warning
FEWEST = 5  # images per set; with fewer, even identical images may be chance

Images = Pixels | PackedArray  # uint8 (n, H, W, C), indexed by row


@dataclass(frozen=True)
class Neighbours:
    """For each query its distance (n,), the index (n,) of its neighbour, and whether mirrored."""

    distance: NDArray[np.float64]
    index: NDArray[np.int64]
    mirrored: NDArray[np.bool_]


def nearest(
    queries: Pixels, train: PackedDataset, device: torch.device | None = None
) -> Neighbours:
    """Find the nearest training image of each query, uint8 (n, H, W, C).

    Holds one chunk of training images in memory at a time. The search is in float32. The distance
    to the image that was found is computed again from the difference, so it is exactly 0 for a
    copy.
    """
    return _neighbours(queries, train.images, device)


def nearest_other(images: Pixels, device: torch.device | None = None) -> Neighbours:
    """Find the nearest other image of each of at least two images, uint8 (n, H, W, C)."""
    return _neighbours(images, images, device, other=True)


def _neighbours(
    queries: Pixels, images: Images, device: torch.device | None, other: bool = False
) -> Neighbours:
    """Find the nearest of `images`. With `other`, query i is image i and skips itself."""
    if not len(queries):
        return Neighbours(np.empty(0), np.empty(0, np.int64), np.empty(0, np.bool_))
    # Queries and their mirror images are searched together, in one pass over the training images.
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
    """Return the index of the nearest image of each row (n, P); `other` as in `_neighbours`."""
    queries = queries.to(device)
    # With `other`, rows i and n + i are image i and its mirror image; both skip image i.
    own = torch.arange(len(queries), device=device) % len(images)
    best = torch.full((len(queries),), torch.inf, device=device)
    where = torch.zeros(len(queries), dtype=torch.int64, device=device)
    for start in range(0, len(images), CHUNK):
        rows = _flat(images[start : start + CHUNK]).to(device)
        # |q - r|^2 without |q|^2, which is the same for every r.
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
    """Return the root mean square differences (n,) float64 of rows (n, P) and images[index]."""
    parts = []
    for start in range(0, len(queries), CHUNK):
        part = slice(start, start + CHUNK)
        difference = queries[part].double() - _flat(images[index[part]]).double()
        parts.append(difference.square().mean(1).sqrt().numpy())
    return np.concatenate(parts)


def _contrast(images: Pixels) -> Any:
    """Return the deviation (n,) float64 of each image's pixels around their channel's mean."""
    # Flat rows hold one channel after the other.
    rows, count = _flat(images).double(), images.shape[3]
    channels = rows.view(len(rows), count, rows.shape[1] // count)
    return channels.var(2, correction=0).mean(1).sqrt().clamp(min=LEAST_CONTRAST).numpy()


def _flat(pixels: Pixels) -> Tensor:
    return flatten(torch.from_numpy(np.ascontiguousarray(pixels)), LARGEST)


def compare(samples: NDArray[np.float64], holdout: NDArray[np.float64]) -> Memorisation:
    """Compare the distances to the training set of samples (n,) and held-out images (m,).

    In the result, `share_below` is the share of samples that are nearer than 99 % of held-out
    images, and `expected_below` its expectation without memorisation. `p_value` is from the
    Mann-Whitney test with the alternative that samples are nearer. The other p-values are from
    Fisher's exact test with the alternative that samples have a larger share.

    Held-out images at distance 0 are also training images, which a source with its own splits may
    have. They are left out: every limit is then above 0, and a sample that is a training image
    always counts as verbatim.
    """
    untrained = holdout[holdout > 0]
    exact = {
        "exact": int((samples == 0).sum()),
        "holdout_exact": len(holdout) - len(untrained),
    }
    holdout = untrained
    if not len(samples) or not len(holdout):
        return Memorisation(count=len(samples), **exact, verdict="unknown")
    threshold, median = float(np.quantile(holdout, QUANTILE)), float(np.median(holdout))
    below, _, share_p_value = _count_below(threshold, samples, holdout)
    copies, holdout_copies, copies_p_value = _count_below(NEAR * median, samples, holdout)
    verbatim, holdout_verbatim, verbatim_p_value = _count_below(VERBATIM * median, samples, holdout)
    rank = require("scipy.stats", "eval").mannwhitneyu(samples, holdout, alternative="less")
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
    return Memorisation(**facts, verdict=_verdict(facts))


def _count_below(
    limit: float, samples: NDArray[np.float64], real: NDArray[np.float64]
) -> tuple[int, int, float]:
    """Return how many samples and real images are below a limit, and Fisher's p-value."""
    near, real_near = int((samples < limit).sum()), int((real < limit).sum())
    table = [[near, len(samples) - near], [real_near, len(real) - real_near]]
    test = require("scipy.stats", "eval").fisher_exact(table, alternative="greater")
    return near, real_near, float(test.pvalue)


def expected_below(count: int) -> float:
    """Return the expected share of images below the QUANTILE of `count` of them.

    On average the i-th smallest of `count` draws has i / (count + 1) below it, and the quantile
    is between two draws. The result is QUANTILE for very many draws, 0.017 for 100, 0.1 for 10.
    """
    return (QUANTILE * (count - 1) + 1) / (count + 1)


def _verdict(facts: dict[str, Any]) -> str:
    """Return `copies`, `near` or `none`, from what samples do beyond held-out images.

    `copies`: the share of samples that are nearly the same as a training image is significantly
    larger, by more than 1 % of samples. Or several samples are verbatim copies, which is
    significant, or more than 1 % of samples and no held-out image. `near`: significantly many
    samples are very near, or samples as a whole are nearer.

    Error rates, measured: if held-out images have as many near duplicates, at most 1 % of models
    are called copying. Of models with 5 % near copies, 80 % are found with 180 samples and 180
    held-out images. With 50 held-out images that takes 10 % near copies, with 10 it takes 40 %.
    Verbatim copies need no held-out images: with 2 % of them, 70 % of models are found with 180
    samples, and 90 % with 500. The price: if the data contain exact duplicates, such as blank
    images, then fewer than 500 held-out images may have none left after those at distance 0 are
    removed, and a model that draws duplicates as often as the data do is called copying.
    """
    share = facts["copies"] / facts["count"] - facts["holdout_copies"] / facts["holdout_count"]
    many_near = share > 0.01 and facts["copies_p_value"] < CHANCE
    only_samples = not facts["holdout_verbatim"] and facts["verbatim"] > 0.01 * facts["count"]
    significant = facts["verbatim_p_value"] < CHANCE or only_samples
    if many_near or (facts["verbatim"] >= SEVERAL and significant):
        return "copies"
    many = facts["share_below"] > 5 * facts["expected_below"] and facts["share_p_value"] < 0.001
    nearer = facts["nearer"] > 0.6 and facts["p_value"] < 0.01
    return "near" if many or nearer else "none"


def compare_repeats(samples: NDArray[np.float64], real: NDArray[np.float64]) -> Collapse:
    """Compare near duplicates among samples with those among as many real images.

    Both arguments are the distances (n,) of each image to its nearest other image in the same set.
    An image repeats another one if it is nearer than
    `limit`, 0.35 of the median of the real images. `p_value` is from Fisher's exact test with the
    alternative that a larger share of samples repeat one another.

    The verdict is `collapsed` if this share exceeds that of real images by more than 25 %, and
    `repeats` if by more than 1 % and there are at least 3 such samples; both only if significant.
    For comparison: 9 % of photographs blurred beyond recognition (a deviation of 8 of 32 pixels)
    repeat one another.
    """
    distinct = real[real > 0]
    exact = {"exact": int((samples == 0).sum()), "real_exact": len(real) - len(distinct)}
    if not len(distinct):
        return Collapse(count=len(samples), **exact, verdict="unknown")
    limit = NEAR * float(np.median(distinct))
    repeats, real_repeats, p_value = _count_below(limit, samples, real)
    beyond = repeats / len(samples) - real_repeats / len(real)
    verdict = "none"
    if p_value < CHANCE and repeats >= SEVERAL and beyond > REPEATS:
        verdict = "collapsed" if beyond > COLLAPSED else "repeats"
    return Collapse(
        count=len(samples),
        **exact,
        median=float(np.median(samples)),
        real_median=float(np.median(real)),
        limit=limit,
        repeats=repeats,
        real_repeats=real_repeats,
        p_value=p_value,
        verdict=verdict,
    )


def straddling(holdout: Neighbours) -> NDArray[np.int64]:
    """Return the held-out images that are (nearly) training images too, the nearest first."""
    order = np.argsort(holdout.distance, kind="stable")
    distance = holdout.distance[order]
    others = distance[distance > 0]
    limit = NEAR * np.median(others) if len(others) else 0.0
    near: NDArray[np.int64] = order[(distance == 0) | (distance < limit)]
    return near


def closest(neighbours: Neighbours) -> NDArray[np.int64]:
    """Return the 16 queries that are nearest to a training image, the nearest first."""
    return np.argsort(neighbours.distance, kind="stable")[:PAIRS]
