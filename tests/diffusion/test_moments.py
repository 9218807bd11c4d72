"""Moments of images: coordinates, the two bases, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import fft
from support.moments import KINDS, covariance, normal, random_images, some_moments

from ddpm_core.diffusion.moments import (
    SMALLEST_VARIANCE,
    Moments,
    dct,
    principal_components,
)

every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
def test_coordinates_are_a_rotation_of_the_images(kind: str) -> None:
    moments, x = some_moments(3, 4, kind), normal(0, 5, 3, 4, 4)
    z = moments.coordinates(x)
    assert z.shape == x.shape and z.dtype == x.dtype
    assert torch.allclose(z.square().sum((1, 2, 3)), x.square().sum((1, 2, 3)), rtol=1e-5)
    assert torch.allclose(moments.images(z), x, atol=1e-6)


@every_kind
def test_covariance_of_random_images_is_that_of_the_moments(kind: str) -> None:
    moments = some_moments(3, 2, kind)
    x = random_images(moments, 100_000)
    assert torch.allclose(x.mean(0), moments.mean.double(), atol=0.01)
    z = moments.coordinates(x - x.mean(0)).flatten(1)
    expected = torch.diag(moments.variances.double().flatten())
    assert torch.allclose(z.T @ z / len(z), expected, atol=0.015)
    assert moments.variance == pytest.approx(float(x.var()), rel=0.02)


def test_principal_components_give_back_the_covariance() -> None:
    moments = principal_components(torch.zeros(1, 4, 4).double(), covariance(16))
    basis, variances = moments.basis.double(), moments.variances.double().flatten()
    assert torch.allclose(basis * variances @ basis.T, covariance(16), atol=1e-6)


def test_dct_is_that_of_scipy() -> None:
    x = normal(0, 8, 8)
    own = (dct(8) @ x @ dct(8).T).numpy()
    assert np.allclose(own, fft.dctn(x.numpy(), norm="ortho"), atol=1e-12)


def test_variance_is_at_least_that_of_rounding() -> None:
    moments = principal_components(torch.zeros(1, 2, 2).double(), torch.zeros(4, 4).double())
    assert float(moments.variances.min()) == pytest.approx(SMALLEST_VARIANCE)


@every_kind
def test_coordinates_keep_their_precision_under_autocast(kind: str) -> None:
    moments, x = some_moments(3, 4, kind), normal(0, 5, 3, 4, 4).float()
    expected = moments.images(moments.coordinates(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(moments.images(moments.coordinates(x)), expected)


@every_kind
def test_moments_survive_a_file(kind: str) -> None:
    moments = some_moments(3, 4, kind)
    again = Moments.from_tensors(moments.tensors(), 3, 4)
    assert all(torch.equal(t, again.tensors()[n]) for n, t in moments.tensors().items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"basis": torch.eye(5)}, r"basis has shape \(5, 5\); must be \(48, 48\)"),
        ({"mean": torch.zeros(3, 4, 5)}, r"mean has shape \(3, 4, 5\); must be \(3, 4, 4\)"),
        ({"variances": torch.zeros(3, 4, 4)}, "variances must be above 0"),
        ({"mean": torch.zeros(3, 4, 4, dtype=torch.int64)}, "mean has dtype torch.int64"),
        ({"basis": None}, "basis is missing"),
    ],
)
def test_tensors_of_other_images_are_refused(
    change: dict[str, torch.Tensor | None], message: str
) -> None:
    given = {**some_moments(3, 4).tensors(), **change}
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    with pytest.raises(ValueError, match=message):
        Moments.from_tensors(tensors, 3, 4)
