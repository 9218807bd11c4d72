"""Drawing a batch in two halves: equal images, and PyTorch's threads are restored."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ddpm_core import rng
from ddpm_core.checkpoint import TrainingData
from ddpm_core.config import Diffusion, Sample
from ddpm_core.models.config import UNetConfig
from ddpm_core.models.unet import UNet
from ddpm_core.sampling.sampler import Conditions, ImageSampler, in_halves

NETWORK = UNetConfig(8, 1, 16, (1, 2), 1, (4,), conditioning="class", classes=3)
DATA = TrainingData(
    fingerprint="0",
    classes=["a", "b", "c"],
    class_counts=[1, 2, 3],
    captions=[],
    image_size=NETWORK.image_size,
    channels=1,
    source={},
)


@pytest.fixture(autouse=True)
def one_thread_again() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


@torch.no_grad()
def network() -> UNet:
    """Return a network with random weights, its last layers too, so that images depend on all."""
    made = UNet(NETWORK)
    for number, weight in enumerate(made.parameters()):
        key = rng.key(rng.Purpose.INIT, number)
        weight.copy_(0.2 * rng.normal(key, torch.tensor([0]), weight.shape)[0])
    return made.eval().requires_grad_(False)


@pytest.mark.parametrize("guidance", [1.0, 2.0])
@pytest.mark.parametrize("count", [1, 5])
def test_two_threads_draw_the_same_images_as_one(count: int, guidance: float) -> None:
    settings = Sample(steps=3, guidance=guidance)
    sampler = ImageSampler(network(), DATA, settings, Diffusion())
    alone = sampler.images(range(7, 7 + count))
    torch.set_num_threads(2)
    assert np.array_equal(sampler.images(range(7, 7 + count)), alone)
    assert len(np.unique(alone)) > 10


def test_guidance_interval_limits_where_guidance_applies() -> None:
    """Sampling in 8 steps starts at sigma of about 100 and ends below 0.01."""

    def drawn(**given: Any) -> np.ndarray:
        settings = Sample(steps=8, **given)
        return ImageSampler(network(), DATA, settings, Diffusion()).images(range(5))

    plain, guided = drawn(), drawn(guidance=3.0)
    assert np.array_equal(drawn(guidance=3.0, guidance_interval=(0.0, 1e5)), guided)
    assert np.array_equal(drawn(guidance=3.0, guidance_interval=(1e4, 1e5)), plain)
    partly = drawn(guidance=3.0, guidance_interval=(0.3, 3.0))
    assert not np.array_equal(partly, plain) and not np.array_equal(partly, guided)


@pytest.mark.parametrize(("low", "evaluated"), [(0.0, 10), (0.5, 8), (50.0, 6)])
def test_guidance_costs_nothing_outside_its_interval(low: float, evaluated: int) -> None:
    settings = Sample(steps=5, guidance=2.0, guidance_interval=(low, 1e3))
    sampler = ImageSampler(network(), DATA, settings, Diffusion())
    counts: list[int] = []
    inner = sampler._network

    def counting(x: Tensor, *others: Any) -> Tensor:
        counts.append(len(x))
        return inner(x, *others)

    sampler._network = counting
    sampler.images([0])
    assert sum(counts) == evaluated


@pytest.mark.parametrize(("threads", "shares"), [(1, [1]), (2, [1, 1]), (3, [3]), (4, [2, 2])])
def test_each_half_has_half_of_the_threads(threads: int, shares: list[int]) -> None:
    seen: list[int] = []

    def work(rows: Tensor) -> Tensor:
        seen.append(torch.get_num_threads())
        return rows * 2

    torch.set_num_threads(threads)
    assert in_halves(work, torch.arange(5), "cpu").tolist() == [0, 2, 4, 6, 8]
    assert seen == shares


def test_thread_count_is_restored_after_an_error() -> None:
    def work(rows: Tensor) -> Tensor:
        raise ValueError("no images")

    torch.set_num_threads(2)
    with pytest.raises(ValueError, match="no images"):
        in_halves(work, torch.arange(2), "cpu")
    seen: list[int] = []
    later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert [torch.get_num_threads(), *seen] == [2, 2]


@pytest.mark.parametrize(("balance", "counts"), [("none", [1, 0, 3]), ("classes", [1, 0, 1])])
def test_classes_are_drawn_as_often_as_in_training(balance: str, counts: list[int]) -> None:
    data = DATA.model_copy(update={"class_counts": [1, 0, 3], "balance": balance})
    labels = Conditions("class", data, Sample()).labels(range(4000))
    assert labels is not None
    shares = np.bincount(labels, minlength=3) / 4000
    assert shares == pytest.approx(np.array(counts) / sum(counts), abs=0.03)
