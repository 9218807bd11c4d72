"""Mean and covariance of the images x0, in a basis in which the covariance is diagonal.

The best linear denoiser and the scale of a preconditioned network's output follow from them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

# Variance of rounding to 8 bits in [-1, 1]. No direction has less, although a sample may show less.
SMALLEST_VARIANCE = (2 / 255) ** 2 / 12


@dataclass(frozen=True, eq=False)
class Moments:
    """Moments of square images (C, H, H): covariance = B diag(variances) B^T.

    Attributes:
        mean: (C, H, H).
        variances: (C, H, H), above 0, one for each coordinate.
        basis: (D, D) with D = C H H: the columns of B are the principal components. Or (C, C): the
            columns are the eigenvectors of the channels' covariance, and the coordinates are the
            two-dimensional orthonormal DCT-II of the channels that they mix. The covariance of
            photographs depends mostly on the distance of two pixels, which a DCT decorrelates.
    """

    mean: Tensor
    variances: Tensor
    basis: Tensor

    @property
    def variance(self) -> float:
        """Return the variance of all values about their one mean."""
        between = self.mean.cpu().double().var(correction=0)
        return float(self.variances.cpu().double().mean() + between)

    def linear_error(self, snr: Tensor) -> Tensor:
        """Return the mean squared error of x0 of the best linear denoiser for each SNR.

        It is mean_k l_k sigma^2 / (l_k + sigma^2) with the variances l_k and sigma^2 = 1 / SNR
        (Wiener 1949). Maps float64 (T,) to float64 (T,).
        """
        variances = self.variances.flatten().cpu().to(snr)
        # Not all timesteps at once: their number times that of the values may not fit in memory.
        parts = [
            (variances / (variances * part[:, None] + 1.0)).mean(1)
            for part in torch.split(snr, 500)
        ]
        return torch.cat(parts)

    @cached_property
    def _cosines(self) -> Tensor | None:
        """Return the matrix of the DCT-II in the dtype of the basis; None if B is (D, D)."""
        if len(self.basis) == self.mean.numel():
            return None
        return dct(self.mean.shape[-1]).to(self.basis)

    def coordinates(self, x: Tensor) -> Tensor:
        """Return B^T x for x (B, C, H, H), in the shape and dtype of x."""
        basis = self.basis.to(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            if self._cosines is None:
                return (x.flatten(1) @ basis).view_as(x)
            cosines = self._cosines.to(x.dtype)
            mixed = (basis.T @ x.flatten(2)).view_as(x)
            return cosines @ mixed @ cosines.T

    def images(self, z: Tensor) -> Tensor:
        """Return B z for coordinates z (B, C, H, H), in the shape and dtype of z."""
        basis = self.basis.to(z.dtype)
        with torch.autocast(z.device.type, enabled=False):
            if self._cosines is None:
                return (z.flatten(1) @ basis.T).view_as(z)
            cosines = self._cosines.to(z.dtype)
            mixed = cosines.T @ z @ cosines
            return (basis @ mixed.flatten(2)).view_as(z)

    def to(self, device: torch.device | str) -> Moments:
        """Return the moments on a device."""
        return Moments(*(tensor.to(device) for tensor in self.tensors().values()))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, for a file."""
        return {"mean": self.mean, "variances": self.variances, "basis": self.basis}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], channels: int, size: int) -> Moments:
        """Return moments of a file, for images (channels, size, size).

        Raises ValueError if names, shapes or dtypes do not match, or a variance is not positive.
        """
        shape, values = (channels, size, size), channels * size * size
        allowed: dict[str, list[tuple[int, ...]]] = {
            "mean": [shape],
            "variances": [shape],
            "basis": [(values, values), (channels, channels)],
        }
        for name, shapes in allowed.items():
            if name not in tensors:
                raise ValueError(f"{name} is missing")
            if tuple(tensors[name].shape) not in shapes:
                shape_found = tuple(tensors[name].shape)
                raise ValueError(f"{name} has shape {shape_found}; must be {shapes[0]}")
            if not tensors[name].is_floating_point():
                raise ValueError(f"{name} has dtype {tensors[name].dtype}; must be a float")
        if not bool((tensors["variances"] > 0).all()):
            raise ValueError("variances must be above 0")
        return cls(*(tensors[name] for name in allowed))


def principal_components(mean: Tensor, covariance: Tensor) -> Moments:
    """Return float32 moments from the mean (C, H, H) and the covariance (D, D), float64."""
    variances, basis = torch.linalg.eigh(covariance)
    return _moments(mean, variances.view_as(mean), basis)


def cosine_components(mean: Tensor, second: Tensor) -> Moments:
    """Return float32 moments from those of the channels' DCT coefficients, float64.

    Args:
        mean: (C, H, H), of the coefficients.
        second: (C, C, H, H), means of products of two channels' coefficients.
    """
    covariance = second - mean[:, None] * mean
    # The DCT is orthonormal, so the mean over frequencies is the covariance of the pixels.
    basis = torch.linalg.eigh(covariance.mean((2, 3)))[1]
    variances = torch.einsum("ik,ijhw,jk->khw", basis, covariance, basis)
    cosines = dct(mean.shape[-1])
    return _moments(cosines.T @ mean @ cosines, variances, basis)


def dct(size: int) -> Tensor:
    """Return the matrix of the orthonormal DCT-II, float64 (size, size), one row a frequency."""
    frequency = torch.arange(size, dtype=torch.float64)[:, None]
    place = torch.arange(size, dtype=torch.float64) + 0.5
    rows = torch.cos(math.pi / size * frequency * place) * math.sqrt(2 / size)
    rows[0] /= math.sqrt(2)
    return rows


def _moments(mean: Tensor, variances: Tensor, basis: Tensor) -> Moments:
    variances = variances.clamp(min=SMALLEST_VARIANCE)
    return Moments(*(t.to(torch.float32).contiguous() for t in (mean, variances, basis)))
