"""Measure the moments of the training images when a run starts, for methods that use them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ddpm_core.config import Config
from ddpm_core.data.dataset import PackedDataset
from ddpm_core.diffusion.moments import Moments, cosine_components, dct, principal_components
from ddpm_core.runtime.distributed import World

# The limits were chosen by measurements (docs/performance.md).
LARGEST_PCA = 768  # values of an image, 16 x 16 x 3; above it the DCT is cheaper and small to store
IMAGES_PER_VALUE = 2  # fewer images than this do not determine principal components
MOST_IMAGES = 50_000  # evenly spaced ones represent a larger data set
_ROWS = 256  # sums of so many products of 8-bit numbers are exact in float32


def run_moments(config: Config, data: PackedDataset, world: World) -> Moments | None:
    """Return the moments of the training images, the same bits on every worker.

    None if the settings do not use them. Rank 0 measures them.
    """
    if not config.measures_moments:
        return None
    values = data.channels * data.image_size**2
    pca = uses_pca(len(data), values)
    shape = (data.channels, data.image_size, data.image_size)
    if world.rank == 0:
        moments = _on_one_thread(data, config.train.flip)
    else:
        side = values if pca else data.channels
        moments = Moments(torch.zeros(shape), torch.zeros(shape), torch.zeros(side, side))
    moments = moments.to(world.device)
    for tensor in moments.tensors().values():
        world.all_reduce_(tensor)  # the other workers add zeros
    return moments


def _on_one_thread(data: PackedDataset, flip: bool) -> Moments:
    """Return `measure(data, flip)`; the bits do not depend on the number of threads or workers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return measure(data, flip)
    finally:
        torch.set_num_threads(threads)


def uses_pca(images: int, values: int) -> bool:
    """Return whether to use principal components for `images` of so many values, not the DCT."""
    return values <= LARGEST_PCA and images >= IMAGES_PER_VALUE * values


def measure(data: PackedDataset, flip: bool) -> Moments:
    """Return the moments of the images of a split as the network sees them, in [-1, 1].

    With `flip`, they are those of the images and their mirror images together. The covariance of
    few images has directions without variance, which no other image shares. So few images, and
    large ones, have DCT coefficients as coordinates: one variance each takes few images to measure.
    """
    values = data.channels * data.image_size**2
    if uses_pca(len(data), values):
        return _principal(data, flip)
    return _cosine(data, flip)


def _principal(data: PackedDataset, flip: bool) -> Moments:
    shape = (data.channels, data.image_size, data.image_size)
    values = int(np.prod(shape))
    total = torch.zeros(values, dtype=torch.float64)
    products = torch.zeros(values, values, dtype=torch.float64)
    count = 0
    for pixels in _parts(data):
        # Sums of integers are exact, so they do not depend on their order.
        rows = pixels.flatten(1).float()
        total += rows.sum(0).double()
        products += (rows.T @ rows).double()
        count += len(rows)
    mean, second = total / count, products / count
    if flip:
        mirrored = torch.arange(values).view(shape).flip(2).flatten()
        mean = (mean + mean[mirrored]) / 2
        second = (second + second[mirrored][:, mirrored]) / 2
    covariance = (second - mean[:, None] * mean) / 127.5**2
    return principal_components(mean.view(shape) / 127.5 - 1.0, covariance)


def _cosine(data: PackedDataset, flip: bool) -> Moments:
    channels, size = data.channels, data.image_size
    total = torch.zeros(channels, size, size, dtype=torch.float64)
    products = torch.zeros(channels, channels, size, size, dtype=torch.float64)
    cosines, count = dct(size), 0
    for pixels in _parts(data):
        z = cosines @ (pixels.double() / 127.5 - 1.0) @ cosines.T
        total += z.sum(0)
        products += torch.stack([(z[:, [i]] * z).sum(0) for i in range(channels)])
        count += len(z)
    mean = total / count
    if flip:
        mean[:, :, 1::2] = 0.0  # a mirror image has the opposite sign at odd frequencies
    return cosine_components(mean, products / count)


def _parts(data: PackedDataset) -> Iterator[Tensor]:
    """Yield the images, or MOST_IMAGES of them, as uint8 (n, C, H, W) on the CPU."""
    count = min(len(data), MOST_IMAGES)
    chosen = np.arange(count) * len(data) // count
    rows = min(_ROWS, max(1, 2**22 // (data.channels * data.image_size**2)))
    for start in range(0, count, rows):
        pixels = data.take(chosen[start : start + rows])
        yield torch.from_numpy(pixels).permute(0, 3, 1, 2)
