"""Metrics equal their definitions, and their names contain feature space and count."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor
from torch_fidelity.metric_prc import prc_features_to_metric

from ddpm_core.evaluation import metrics
from ddpm_core.evaluation.metrics import (
    Accumulator,
    density_coverage,
    frechet_distance,
    inception_score,
    kernel_distance,
    moments,
    precision_recall,
)
from ddpm_core.scores import metric_name


def gaussian(count: int, size: int, seed: int, shift: float = 0.0, scale: float = 1.0) -> Tensor:
    numbers = np.random.default_rng(seed).normal(shift, scale, (count, size))
    return torch.from_numpy(numbers).float()


def test_moments_of_batches_equal_those_of_all_rows() -> None:
    rows = gaussian(1000, 7, seed=0)
    accumulator = Accumulator()
    for piece in rows.split([1, 99, 400, 500]):
        accumulator.add(piece)
    found = accumulator.moments()
    assert found.count == 1000
    np.testing.assert_allclose(found.mean, rows.double().mean(0), atol=1e-12)
    np.testing.assert_allclose(found.covariance, np.cov(rows.double().T), atol=1e-12)


def test_moments_are_precise_far_from_zero() -> None:
    rows = gaussian(5000, 3, seed=1).double() * 1e-3 + 1e4
    np.testing.assert_allclose(moments(rows).covariance, np.cov(rows.T), rtol=1e-6, atol=1e-12)


def test_one_image_has_no_covariance() -> None:
    with pytest.raises(ValueError, match="a covariance requires 2"):
        moments(gaussian(1, 3, seed=0))


def test_frechet_distance_of_one_dimension_is_known() -> None:
    a = gaussian(500, 1, seed=0)
    b = gaussian(500, 1, seed=1, shift=2.0, scale=3.0)
    means = (a.double().mean() - b.double().mean()) ** 2
    deviations = (a.double().std() - b.double().std()) ** 2
    assert frechet_distance(moments(a), moments(b)) == pytest.approx(float(means + deviations))


def test_frechet_distance_equals_its_formula() -> None:
    a, b = gaussian(300, 12, seed=2), gaussian(200, 12, seed=3, shift=0.5, scale=2.0)
    first, second = moments(a), moments(b)
    root = scipy.linalg.sqrtm(first.covariance.numpy() @ second.covariance.numpy()).real
    distance = float((first.mean - second.mean).square().sum())
    distance += float(np.trace(first.covariance + second.covariance)) - 2 * float(np.trace(root))
    assert frechet_distance(first, second) == pytest.approx(distance, rel=1e-9)


def test_frechet_distance_to_itself_is_zero() -> None:
    few = moments(gaussian(20, 64, seed=4))
    assert frechet_distance(few, few) == pytest.approx(0.0, abs=1e-5)


def test_kernel_distance_equals_its_formula() -> None:
    x, y = gaussian(40, 6, seed=5).double(), gaussian(40, 6, seed=6, shift=0.3).double()

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return (a @ b.T / 6 + 1) ** 3

    off_diagonal = ~torch.eye(40, dtype=torch.bool)
    within = kernel(x, x)[off_diagonal].mean() + kernel(y, y)[off_diagonal].mean()
    mean, deviation = kernel_distance(x, y)
    assert mean == pytest.approx(float(within - 2 * kernel(x, y).mean()))
    assert deviation is None  # every subset contains all rows


def test_kernel_distance_takes_subsets_that_fit_the_smaller_set() -> None:
    few, many = gaussian(30, 6, seed=7), gaussian(3000, 6, seed=8)
    mean, deviation = kernel_distance(many, few)
    assert abs(mean) < 0.2 and deviation is not None and 0 < deviation < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("count", [100, 1000])
def test_subsets_of_all_samples_have_no_deviation(count: int) -> None:
    mean, deviation = kernel_distance(gaussian(count, 6, seed=7), gaussian(3000, 6, seed=8))
    assert abs(mean) < 0.2 and deviation is None


def test_inception_score_of_uniform_logits_is_one() -> None:
    assert inception_score(torch.zeros(100, 10)) == pytest.approx((1.0, 0.0))


def test_inception_score_of_certain_classes_is_their_number() -> None:
    logits = 100.0 * torch.eye(10)[torch.arange(5000) % 10]
    mean, deviation = inception_score(logits)
    assert 9.8 < mean < 10.0 and deviation < 0.1


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def by_hand(samples: Tensor, real: Tensor, k: int) -> tuple[float, float, float, float]:
    """Return precision, recall, density and coverage from a full distance matrix."""
    x, y = samples.double().numpy(), real.double().numpy()

    def radii(rows: np.ndarray) -> np.ndarray:
        return np.array([np.sort(np.linalg.norm(rows - row, axis=1))[k] for row in rows])

    distance = np.linalg.norm(x[:, None] - y[None], axis=2)
    in_real, in_fake = distance <= radii(y)[None], distance <= radii(x)[:, None]
    return (
        float(in_real.any(1).mean()),
        float(in_fake.any(0).mean()),
        float(in_real.sum() / (k * len(x))),
        float(in_real.any(0).mean()),
    )


@pytest.mark.parametrize("k", [1, 3, 5])
def test_precision_recall_density_coverage_equal_definitions(k: int) -> None:
    samples, real = gaussian(150, 4, seed=9, shift=0.4), gaussian(130, 4, seed=10)
    found = (*precision_recall(samples, real, k), *density_coverage(samples, real, k))
    assert found == pytest.approx(by_hand(samples, real, k), abs=1e-6)


def test_density_and_coverage_do_not_depend_on_their_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples, real = gaussian(333, 4, seed=11), gaussian(250, 4, seed=12)
    whole = density_coverage(samples, real, 5)
    monkeypatch.setattr(metrics, "_BLOCK", 64)
    assert density_coverage(samples, real, 5) == whole


def test_three_neighbours_are_torch_fidelitys_default() -> None:
    samples, real = gaussian(100, 4, seed=13), gaussian(100, 4, seed=14)
    theirs = prc_features_to_metric(samples.double(), real.double(), verbose=False)
    assert precision_recall(samples, real, 3) == (theirs["precision"], theirs["recall"])


def test_equal_distributions_have_density_one_and_full_coverage() -> None:
    density, coverage = density_coverage(gaussian(1500, 8, seed=15), gaussian(1500, 8, seed=16), 5)
    assert density == pytest.approx(1.0, abs=0.08)
    assert coverage == pytest.approx(1 - 2.0**-5, abs=0.03)  # Naeem et al. (2020), section 3.4


def test_a_collapsed_generator_is_precise_and_covers_little() -> None:
    real = gaussian(500, 8, seed=17)
    samples = real[:1] + 0.01 * gaussian(500, 8, seed=18)
    precision, recall = precision_recall(samples, real, 5)
    _, coverage = density_coverage(samples, real, 5)
    assert precision > 0.99
    assert recall < 0.05 and coverage < 0.1


def test_distant_samples_score_zero() -> None:
    far, real = gaussian(100, 8, seed=19, shift=50.0), gaussian(100, 8, seed=20)
    assert (*precision_recall(far, real, 5), *density_coverage(far, real, 5)) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("metric", "space", "count", "name"),
    [
        ("fd", "", 10_000, "fid_10k"),
        ("fd", "", 500, "fid_500"),
        ("fd", "inception", 50_000, "fd_inception_50k"),
        ("fd", "in_domain", 500, "fd_in_domain_500"),
        ("fd", "pixel_pca", 1_541, "fd_pixel_pca_1541"),
        ("kid_mean", "in_domain", 10_500, "kid_mean_in_domain_10500"),
        ("is", "", 5_000, "is_5k"),
    ],
)
def test_metric_name_contains_features_and_count(
    metric: str, space: str, count: int, name: str
) -> None:
    assert metric_name(metric, space, count) == name
