"""Whether mirrored images look different from the images themselves.

A linear classifier of simple features learns, from some of the images, which of an image and its
mirror image is the original. On the others it is right about half of the time if mirroring makes
no difference, as for most photographs. It is nearly always right for digits and text, which must
not be mirrored. Lin et al. (2020), "Visual chirality", ask the same question with large networks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

LIMIT = 2 / 3  # share of right answers from which on mirrored images are wrong
FEWEST = 50  # images; the share of right answers of fewer varies by more than 7 %
FOLDS = 5
_FILTERS = 128
_SIDE = 5  # pixels of a filter
_PATCHES = 20_000
_POOL = 2  # the mean responses in 2 x 2 parts of the image
_RIDGE = 1.0
_PART = 250  # images at a time


class Mirror(NamedTuple):
    """The share of images that the classifier could tell from their mirror image, of `images`."""

    share: float
    images: int

    @property
    def is_known(self) -> bool:
        """Return whether there were enough images for the test."""
        return self.images >= FEWEST

    @property
    def matters(self) -> bool:
        """Return whether mirrored images would be wrong."""
        return self.share >= LIMIT


def mirror_test(squares: NDArray[np.uint8]) -> Mirror:
    """Return how often a classifier tells images from their mirror images.

    `squares` are distinct images, uint8 (n, H, H, 3). No random numbers are used.
    """
    if len(squares) < FEWEST:
        return Mirror(0.5, len(squares))
    gray = _standardised(torch.from_numpy(squares).float().mean(3)[:, None])
    filters = _filters(gray)
    if not len(filters):
        return Mirror(0.5, len(squares))
    difference = _features(gray, filters) - _features(gray.flip(3), filters)
    scale = difference.std(0).clamp_min(1e-6) * math.sqrt(difference.shape[1])
    right = _right_answers(difference / scale)
    return Mirror(right / len(squares), len(squares))


def _standardised(images: Tensor) -> Tensor:
    """Return images (n, 1, H, H) with mean 0 and variance of about 1 each."""
    return (images - images.mean((1, 2, 3), keepdim=True)) / (
        images.std((1, 2, 3), keepdim=True) + 10.0
    )


def _filters(images: Tensor) -> Tensor:
    """Return filters (F, 1, 5, 5): decorrelated parts of the images, and their negatives.

    F is 2 x _FILTERS, or 0 for flat images.
    Such filters find strokes and edges as well as learned ones (Coates & Ng 2011, "The importance
    of encoding versus training with sparse coding and vector quantization").
    """
    some = images[:: max(1, len(images) // 500)]
    patches = F.unfold(some, _SIDE).transpose(1, 2).flatten(0, 1)
    patches = patches[:: max(1, len(patches) // _PATCHES)]
    patches = patches - patches.mean(1, keepdim=True)
    patches = patches[patches.norm(dim=1) > 0.5]  # flat ones show nothing
    variances, basis = torch.linalg.eigh(patches.T @ patches / max(1, len(patches)))
    whiten = basis * (variances + 0.01 * variances.max() + 1e-6).rsqrt() @ basis.T
    chosen = patches[:: max(1, len(patches) // _FILTERS)][:_FILTERS] @ whiten
    filters = F.normalize(chosen) @ whiten
    filters = filters - filters.mean(1, keepdim=True)
    return torch.cat([filters, -filters]).view(-1, 1, _SIDE, _SIDE)


def _features(images: Tensor, filters: Tensor) -> Tensor:
    """Return the mean positive responses (n, F) of the filters in each part of the images."""
    responses = (F.relu(F.conv2d(part, filters, stride=2)) for part in torch.split(images, _PART))
    return torch.cat([F.adaptive_avg_pool2d(part, _POOL).flatten(1) for part in responses])


def _right_answers(difference: Tensor) -> int:
    """Return how many images a classifier gets right that was fitted without them.

    `difference` (n, F) has the features of each image minus those of its mirror image. Ridge
    regression fits their product with weights to 1; exchanging the two changes only the sign. So
    the answer is right if the product is positive.
    """
    fold = torch.arange(len(difference)) % FOLDS
    right = 0
    for number in range(FOLDS):
        train, test = difference[fold != number], difference[fold == number]
        gram = train.T @ train + _RIDGE * torch.eye(train.shape[1])
        weights = torch.linalg.solve(gram, train.sum(0))
        right += int((test @ weights > 0).sum())
    return right
