"""Augmentations against their formulas, and what of them reaches training and sampling."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.models import weights
from torch import Tensor
from torch.nn import functional

from ddpm_core import rng
from ddpm_core.config import load as params
from ddpm_core.models.config import UNetConfig
from ddpm_core.models.unet import UNet
from ddpm_core.runtime.distributed import World
from ddpm_core.training import augment
from ddpm_core.training.augment import AUGMENTATIONS, PARAMETERS, crop, edm
from ddpm_core.training.init import initial_weights
from ddpm_core.training.optim import Execution
from ddpm_core.training.state import TrainState
from ddpm_core.training.step import Batch, step

KEY = rng.key(rng.Purpose.AUGMENT, 3)
NOW = torch.tensor(5)
NETWORK = UNetConfig(8, 3, 8, (1, 2), 1, (4,), dropout=0.1)
NAMES = ("flip", "scale", "r", "stretch", "a", "x", "y")
COLORS = ("brightness", "contrast", "luma", "h", "saturation")


def images(count: int, channels: int = 3, size: int = 8) -> Tensor:
    key = rng.key(rng.Purpose.NOISE, 1)
    return 2 * rng.uniform(key, torch.arange(count), (channels, size, size)) - 1


def moved(x0: Tensor, **given: float) -> Tensor:
    """Return images after the geometric transforms with some parameters."""
    parameters = [torch.full((len(x0),), given.get(name, 0.0)) for name in NAMES]
    return augment._resampled(x0, augment._inverse(*parameters), "bicubic")


# Formulas


def test_quarter_turns_and_flips_move_whole_pixels() -> None:
    x0 = images(2, size=16)
    close = {"rtol": 0.0, "atol": 1e-4}
    for quarters in (1, 2, 3):
        turned = moved(x0, r=quarters * math.pi / 2)
        torch.testing.assert_close(turned, x0.rot90(quarters, (2, 3)), **close)
    torch.testing.assert_close(moved(x0, flip=1.0), x0.flip(2), **close)
    # 1/8 of 16 pixels to the right and down; the rest continues as a mirror image.
    shifted = moved(x0, x=1.0, y=1.0)
    torch.testing.assert_close(shifted[:, :, 2:, 2:], x0[:, :, :-2, :-2], **close)
    torch.testing.assert_close(shifted[:, :, 2:, :2], x0[:, :, :-2, :2].flip(3), **close)


def test_geometric_transforms_have_the_published_matrix() -> None:
    """Table 6 of Karras et al. (2022), from the first transform to the last, inverted."""
    key = rng.key(rng.Purpose.NOISE, 2)
    given = rng.normal(key, torch.arange(20), (7,)).double().unbind(1)
    given = [(given[0] > 0).double(), *given[1:]]

    def turn(angle: float) -> np.ndarray:
        c, s = math.cos(angle), math.sin(angle)
        return np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]])

    for row, found in zip(torch.stack(given, 1), augment._inverse(*given), strict=True):
        flip, scale, r, stretch, a, x, y = row.tolist()
        forward = np.diag([1, 1 - 2 * flip, 1])
        forward = np.diag([2 ** (0.2 * scale), 2 ** (0.2 * scale), 1]) @ forward
        forward = turn(-r) @ forward
        s = 2 ** (0.2 * stretch)
        forward = turn(a) @ np.diag([s, 1 / s, 1]) @ turn(-a) @ forward
        forward = np.array([[1, 0, x / 4], [0, 1, y / 4], [0, 0, 1]]) @ forward
        assert np.allclose(found, np.linalg.inv(forward)[:2], atol=1e-12)


def test_colors_have_the_matrices_of_ada() -> None:
    """Karras et al. (2020), appendix B: 4x4 matrices on homogeneous colors, one after the other."""
    axis = np.full(3, 3**-0.5)
    onto, cross = np.outer(axis, axis), np.cross(np.eye(3), axis)  # cross @ c is axis x c
    key = rng.key(rng.Purpose.NOISE, 3)
    given = rng.normal(key, torch.arange(9), (5,)).unbind(1)
    given = [*given[:2], (given[2] > 0).float(), *given[3:]]
    x0 = images(9)
    found = augment._recolored(x0, *given)
    for image, colored, row in zip(x0.numpy(), found.numpy(), torch.stack(given, 1), strict=True):
        brightness, contrast, luma, h, saturation = row.tolist()
        flat = (image.reshape(3, -1) + 0.2 * brightness) * 2 ** (0.5 * contrast)
        flat = (np.eye(3) - 2 * luma * onto) @ flat
        flat = (np.cos(h) * np.eye(3) + np.sin(h) * cross + (1 - np.cos(h)) * onto) @ flat
        flat = (onto + (np.eye(3) - onto) * 2**saturation) @ flat
        np.testing.assert_allclose(colored.reshape(3, -1), flat, atol=1e-5)
    gray = augment._recolored(x0[:, :1], *given)
    wanted = augment._recolored(x0[:, :1].expand(-1, 3, -1, -1), *given)
    torch.testing.assert_close(gray.expand_as(wanted), wanted)


def test_crops_are_enlarged_parts_of_the_image() -> None:
    """In an image of its own coordinates, a crop shows which part of them it took."""
    size, count = 16, 4000
    places = (2 * torch.arange(size) + 1.0) / size - 1
    x0 = torch.stack([places.expand(size, size), places[:, None].expand(size, size)])
    found, parameters = crop(x0.expand(count, -1, -1, -1), KEY, torch.arange(count), NOW)
    assert parameters is None
    middle = found[:, :, 2:-2, 2:-2]  # the outer pixels may be beyond the outer centers
    across = (middle[:, 0, 0, -1] - middle[:, 0, 0, 0]) / (places[-3] - places[2])
    down = (middle[:, 1, -1, 0] - middle[:, 1, 0, 0]) / (places[-3] - places[2])
    area, ratio = across * down, across / down
    assert area.min() > 0.6 - 1e-5 and area.max() < 1 + 1e-5 and abs(area.mean() - 0.8) < 0.008
    assert ratio.min() > 0.75 - 1e-5 and ratio.max() < 4 / 3 + 1e-5
    assert ratio.min() < 0.76 and ratio.max() > 1.32
    assert across.max() <= 1 + 1e-5 and down.max() <= 1 + 1e-5
    center = middle[:, 0].mean((1, 2))
    most = 1 - across
    assert (center.abs() <= most + 1e-5).all() and abs(
        (center / most.clamp(min=0.05)).mean()
    ) < 0.04


def test_a_crop_of_whole_pixels_is_a_resize_of_the_part() -> None:
    x0 = images(1, size=16)
    # Columns 2 to 13 and rows 1 to 12.
    matrix = torch.tensor([[[0.75, 0.0, 0.0], [0.0, 0.75, -0.125]]])
    found = augment._resampled(x0, matrix, "bilinear")
    wanted = functional.interpolate(x0[:, :, 1:13, 2:14], 16, mode="bilinear", align_corners=False)
    torch.testing.assert_close(found[:, :, 1:-1, 1:-1], wanted[:, :, 1:-1, 1:-1])


# Draws


def test_each_transform_is_drawn_as_often_as_it_should_be() -> None:
    count = 20_000
    x0 = images(count, size=2)
    found, parameters = edm(x0, KEY, torch.arange(count), NOW)
    assert parameters.shape == (count, PARAMETERS["edm"])
    shares = (parameters != 0).double().mean(0).tolist()
    # y-flip, scale, 2 of rotation, 2 of anisotropy, 2 of translation, brightness, contrast, luma,
    # 2 of hue, saturation; half of the flips of each kind are drawn but change nothing.
    expected = [0.06] + [0.12] * 9 + [0.06] + [0.12] * 3
    assert shares == pytest.approx(expected, abs=4 * (0.12 * 0.88 / count) ** 0.5)
    for column in (1, 6, 7, 8, 9, 13):  # standard normals where drawn
        drawn = parameters[:, column][parameters[:, column] != 0]
        assert abs(drawn.mean()) < 0.1 and abs(drawn.std() - 1) < 0.06
    both = ((parameters[:, 1] != 0) & (parameters[:, 9] != 0)).double().mean()
    assert abs(both - 0.12**2) < 0.004  # independent
    # Without parameters, an image is the same bit by bit; nearly all others are not.
    unchanged = (parameters == 0).all(1)
    assert 0.25 < unchanged.double().mean() < 0.4
    assert torch.equal(found[unchanged], x0[unchanged])
    differs = (found != x0).flatten(1).any(1)
    assert differs[~unchanged].double().mean() > 0.999


def test_gray_images_have_no_parameters_of_hue_and_saturation() -> None:
    _, parameters = edm(images(500, channels=1), KEY, torch.arange(500), NOW)
    assert (parameters[:, 11:] == 0).all() and (parameters[:, :11] != 0).any(0).all()


@pytest.mark.parametrize("name", ["crop", "edm"])
def test_images_do_not_depend_on_the_rest_of_the_batch(name: str) -> None:
    x0, index = images(40), torch.arange(40)
    whole, _ = AUGMENTATIONS[name](x0, KEY, index, NOW)
    for rows in (slice(0, 1), slice(7, 20), slice(20, 40)):
        part, _ = AUGMENTATIONS[name](x0[rows], KEY, index[rows], NOW)
        assert torch.equal(part, whole[rows])
    again, _ = AUGMENTATIONS[name](x0, KEY, index, NOW + 1)
    assert not torch.equal(again, whole)


# The network


def test_zero_parameters_contribute_nothing() -> None:
    config = replace(NETWORK, augmentation=14)
    network, tensors = UNet(config).eval(), weights(config, 1)
    network.load_state_dict(tensors)
    plain = UNet(NETWORK).eval()
    plain.load_state_dict({n: t for n, t in tensors.items() if n != "augmentation.weight"})
    x0, t, zeros = images(2), torch.tensor([3, 40]), torch.zeros(2, 14)
    with torch.no_grad():
        sampled = network(x0, t)
        assert torch.equal(sampled, network(x0, t, augmentation=zeros))
        assert torch.equal(sampled, plain(x0, t))
        assert not torch.allclose(sampled, network(x0, t, augmentation=zeros + 0.5))


def test_other_weights_start_the_same_with_parameters() -> None:
    plain, network = UNet(NETWORK), UNet(replace(NETWORK, augmentation=14))
    for model in (plain, network):
        initial_weights(model, params.load())
    extra = dict(network.named_parameters())
    assert extra.pop("augmentation.weight").std() > 0
    assert list(extra) == [name for name, _ in plain.named_parameters()]
    assert all(torch.equal(extra[name], weight) for name, weight in plain.named_parameters())


def trained(steps: int, **train: Any) -> TrainState:
    """Return the state after some steps on the same 8 images."""
    given = {"batch_size": 8, "ema": [0.5], "precision": "fp32", "reduction": "exact"} | train
    given |= {"optimizer": {"warmup": 0}, "flip": True}
    config = params.validate({"train": given})
    count = PARAMETERS.get(config.train.augment, 0)
    model = UNet(replace(NETWORK, augmentation=count))
    initial_weights(model, config)
    world = World(0, 1, torch.device("cpu"))
    state = TrainState.create(config, world, Execution("fp32", compile=False), model)
    pixels = ((images(8) + 1) * 127).to(torch.uint8).permute(0, 2, 3, 1)
    for _ in range(steps):
        step(state, Batch(pixels, None, torch.arange(8)), torch.zeros(()))
    return state


@pytest.mark.parametrize("name", ["crop", "edm"])
def test_microbatches_do_not_change_augmented_training(name: str) -> None:
    one, four = (trained(3, augment=name, microbatches=count) for count in (1, 4))
    plain = trained(3)
    for own, other in zip(one.parameters, four.parameters, strict=True):
        assert torch.equal(own, other)
    assert float(one.totals.loss) == float(four.totals.loss) != float(plain.totals.loss)


def test_weights_for_parameters_are_trained_and_averaged() -> None:
    begun, state = trained(0, augment="edm"), trained(8, augment="edm")
    name = "augmentation.weight"
    start, now = (s.model.state_dict()[name] for s in (begun, state))
    averaged = state.emas[0].tensors[name]
    assert now.shape == (32, 14) and not torch.equal(start, now)
    assert not torch.equal(averaged, now) and not torch.equal(averaged, start)
