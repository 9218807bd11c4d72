"""Moments of images with a known covariance, for predictions that use them."""

from __future__ import annotations

import torch
from torch import Tensor

from ddpm_core import rng
from ddpm_core.diffusion.moments import Moments, cosine_components, principal_components

KINDS = ("pca", "dct")


def normal(stream: int, *shape: int) -> Tensor:
    """Return random numbers of the standard normal distribution, float64."""
    key = rng.key(rng.Purpose.NOISE, 0)
    return rng.normal(key, torch.arange(shape[0]), shape[1:], stream=stream).double()


def covariance(values: int) -> Tensor:
    """Return a covariance with variances from about 0.001 to 0.6, float64 (values, values)."""
    basis = torch.linalg.qr(normal(7, values, values))[0]
    variances = torch.logspace(-3, -0.2, values, dtype=torch.float64)
    return basis * variances @ basis.T


def some_moments(channels: int = 1, size: int = 4, kind: str = "pca") -> Moments:
    """Return moments of images (channels, size, size)."""
    shape, values = (channels, size, size), channels * size * size
    mean = 0.2 * normal(8, *shape)
    if kind == "pca":
        return principal_components(mean, covariance(values))
    z = normal(9, 4 * channels + 4, *shape)
    falling = 1.0 / (1.0 + torch.arange(size)[:, None] + torch.arange(size))
    second = torch.einsum("nihw,njhw->ijhw", z, z) / len(z) * falling
    return cosine_components(mean, second + mean[:, None] * mean)


def random_images(moments: Moments, count: int) -> Tensor:
    """Return Gaussian images with these moments, float64 (count, C, H, H)."""
    z = normal(11, count, *moments.mean.shape)
    return moments.mean + moments.images(z * moments.variances.double().sqrt())
