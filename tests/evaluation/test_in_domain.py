"""The in-domain classifier: repeatable, and its distance grows with every fault of the images."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from support.digits_workspace import (
    HELD_OUT,
    Pixels,
    digits,
)
from support.extractors import CPU, few, splits, trained, workspace_at

from ddpm_core.errors import Corrupt
from ddpm_core.evaluation.features import Extractor, PixelPCA, extract, flatten
from ddpm_core.evaluation.in_domain import (
    load_extractor,
    save_extractor,
    steps_for,
    train_extractor,
)
from ddpm_core.evaluation.metrics import Moments, frechet_distance, moments
from ddpm_core.storage import sha256_of


def test_training_is_repeatable_and_draws_nothing_from_torch(tmp_path: Path) -> None:
    data = splits(workspace_at(tmp_path))
    before = torch.get_rng_state()
    first, second = (train_extractor(*data, steps=4) for _ in range(2))
    other = train_extractor(*data, steps=4, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    for name, weight in first.network.state_dict().items():
        assert torch.equal(weight, second.network.state_dict()[name]), name
    assert not torch.equal(first.network.head.weight, other.network.head.weight)


@pytest.mark.slow
def test_classifier_is_accurate_on_held_out_digits() -> None:
    facts = trained().facts
    assert facts.accuracy > 0.95 and facts.holdout_count == HELD_OUT
    assert facts.task == "classes" and facts.outputs == 10


@pytest.mark.slow
@pytest.mark.parametrize("classes", [(), ("all",)])
def test_without_classes_it_learns_rotations(classes: tuple[str, ...], tmp_path: Path) -> None:
    images = digits()[0]
    labels = np.zeros(len(images), np.int64)
    workspace = workspace_at(tmp_path, labels=labels, classes=classes)
    found = train_extractor(*splits(workspace), steps=40)
    assert found.facts.task == "rotations" and found.facts.outputs == 4
    assert found.facts.accuracy > 0.6  # 0.25 by chance
    features, logits = found.extractor("x", CPU)(few())
    assert features.shape == (3, 128) and logits is None  # rotations have no class logits


@pytest.mark.parametrize("size", [4, 7, 28, 100])
def test_any_size_and_colour_has_128_features(size: int, tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (24, size, size, 3)).astype(np.uint8)
    labels = np.arange(24) % 3
    workspace = workspace_at(
        tmp_path, images=images, labels=labels, held_out=4, classes=("a", "b", "c")
    )
    found = train_extractor(*splits(workspace), steps=2)
    features, _ = found.extractor("x", CPU)(torch.from_numpy(images))
    assert features.shape == (24, 128) and bool(features.isfinite().all())


@pytest.mark.parametrize(
    ("count", "steps"),
    [(2, 25), (40, 25), (100, 62), (400, 250), (1388, 250), (1628, 254), (50_000, 600)],
)
def test_training_steps_depend_on_the_image_count(count: int, steps: int) -> None:
    assert steps_for(count) == steps


@pytest.mark.slow
def test_classifier_trained_on_few_images_ranks_samples(tmp_path: Path) -> None:
    images, labels = digits()
    workspace = workspace_at(tmp_path, images=images[:58], labels=labels[:58], held_out=10)
    found = train_extractor(*splits(workspace))
    assert found.facts.steps == 30
    extractor = found.extractor("x", CPU)
    real, held_out = images[10:58], images[100:148]
    noise = np.random.default_rng(0).normal(0, 60, held_out.shape)
    blurred = held_out.astype(float)
    for axis in (1, 2) * 3:
        blurred = (np.roll(blurred, 1, axis) + blurred + np.roll(blurred, -1, axis)) / 3
    one_class = images[labels == 3][:48]
    sets = [held_out, (held_out + noise).clip(0, 255), blurred, one_class]
    features = [extract(extractor, [images.astype(np.uint8)]) for images in (real, *sets)]
    real_moments, *others = [one.moments for one in features]
    good, *bad = [frechet_distance(one, real_moments) for one in others]
    assert 1.5 * good < min(bad)


def test_without_held_out_images_there_is_no_accuracy(tmp_path: Path) -> None:
    workspace = workspace_at(tmp_path, held_out=0)
    assert train_extractor(*splits(workspace), steps=2).facts.accuracy is None


@pytest.mark.slow
def test_saved_extractor_computes_the_same(tmp_path: Path) -> None:
    save_extractor(trained(), tmp_path)
    network, fingerprint = load_extractor(tmp_path)
    loaded = network.extractor(fingerprint, CPU)
    ours = trained().extractor("x", CPU)
    assert torch.equal(loaded(few())[0], ours(few())[0])
    assert loaded.accuracy == trained().facts.accuracy
    assert loaded.fingerprint == sha256_of(tmp_path / "extractor.safetensors")[:16]


@pytest.mark.parametrize("file", ["extractor.safetensors", "extractor.json"])
def test_corrupt_extractor_is_an_error(file: str, tmp_path: Path) -> None:
    save_extractor(trained(), tmp_path)
    content = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(content[: len(content) // 2])
    with pytest.raises(Corrupt, match="corrupt"):
        load_extractor(tmp_path)


def blurred(images: Pixels, radius: float) -> Pixels:
    blur = ImageFilter.GaussianBlur(radius)
    return np.stack([np.asarray(Image.fromarray(i[..., 0]).filter(blur)) for i in images])[
        ..., None
    ]


def noisy(images: Pixels, deviation: float) -> Pixels:
    noise = np.random.default_rng(0).normal(0, deviation, images.shape)
    return (images + noise).round().clip(0, 255).astype(np.uint8)


@functools.cache
def judge(seed: int) -> tuple[Extractor, Moments]:
    """Return a classifier, fully trained for seed 0 only, and the training digits' moments."""
    found = trained(seed, 60) if seed else trained()
    return with_moments(found.extractor("x", CPU))


def with_moments(extractor: Extractor) -> tuple[Extractor, Moments]:
    return extractor, moments(extractor(torch.from_numpy(digits()[0][HELD_OUT:]))[0])


def distances(judge: tuple[Extractor, Moments], sets: list[Pixels]) -> list[float]:
    """Return the distances of the training digits to each set, with 170 images each."""
    extractor, real = judge
    return [
        frechet_distance(real, moments(extractor(torch.from_numpy(some[:170]))[0])) for some in sets
    ]


def worse_and_worse() -> dict[str, list[Pixels]]:
    """Return held-out digits, then the same with more and more of one fault."""
    images, labels = digits()
    real, classes = images[:600], labels[:600]
    return {
        "blur": [real, *(blurred(real, radius) for radius in (0.6, 1.0, 2.0))],
        "noise": [real, *(noisy(real, deviation) for deviation in (20, 40, 80))],
        "dropped classes": [real, *(real[classes >= n] for n in (1, 3, 5))],
    }


@pytest.mark.parametrize("fault", ["blur", "noise", "dropped classes"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_distance_grows_with_every_fault(fault: str, seed: int) -> None:
    found = distances(judge(seed), worse_and_worse()[fault])
    assert found == sorted(found)
    assert found[1] > 1.3 * found[0] and found[-1] > 4 * found[0]


@pytest.mark.parametrize("fault", ["blur", "dropped classes"])
def test_the_distance_of_pixels_grows_too(fault: str) -> None:
    images = digits()[0]
    space = PixelPCA.fit(torch.from_numpy(images[HELD_OUT:])).extractor()
    found = distances(with_moments(space), worse_and_worse()[fault])
    assert found == sorted(found) and found[-1] > 1.5 * found[0]


def test_held_out_images_lie_near_the_floor_of_training_images() -> None:
    images = digits()[0]
    held_out, seen = distances(judge(0), [images[:HELD_OUT], images[HELD_OUT : 2 * HELD_OUT]])
    assert held_out < 1.5 * seen and held_out < 8  # percent of the features' spread


def test_three_classifiers_rank_faulty_sets_alike() -> None:
    images, labels = digits()
    real = images[:600]
    sets = [real, noisy(real, 20), blurred(real, 0.8), real[labels[:600] >= 3], noisy(real, 80)]
    for seed in range(3):
        order = np.argsort(distances(judge(seed), sets))
        assert (order[0], order[-1]) == (0, 4)


@pytest.mark.parametrize("count", [40, 500])
def test_components_are_orthonormal_with_largest_variances(count: int) -> None:
    images = torch.from_numpy(digits()[0][:count])
    pca = PixelPCA.fit(images)
    identity = torch.eye(pca.basis.shape[1])
    torch.testing.assert_close(pca.basis.T @ pca.basis, identity, atol=1e-4, rtol=0)
    variances = pca.project(images).var(0)
    rows = flatten(images, 64).double()
    exact = torch.linalg.svdvals(rows - rows.mean(0)).square() / (count - 1)
    torch.testing.assert_close(variances.double(), exact[: len(variances)], rtol=1e-3, atol=1e-5)


def test_few_images_have_few_components() -> None:
    assert PixelPCA.fit(few(5)).basis.shape == (256, 4)
