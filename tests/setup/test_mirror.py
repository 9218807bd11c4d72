"""The mirror test finds that digits and text have a direction, and that textures have none."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from ddpm_core.data.check import inspect
from ddpm_core.setup.mirror import FEWEST, mirror_test

WORDS = ("quick", "brown", "fox", "jumps", "over", "lazy", "dog", "seven", "zebras", "fix", "jar")


def text(seed: int) -> Image.Image:
    """Return two words in black on white, at any place."""
    draws = np.random.default_rng(seed)
    image = Image.new("RGB", (32, 32), "white")
    draw = ImageDraw.Draw(image)
    for line in range(2):
        word = WORDS[draws.integers(len(WORDS))]
        at = (int(draws.integers(-4, 8)), int(draws.integers(0, 6)) + 14 * line)
        draw.text(at, word, "black", ImageFont.load_default(size=12))
    return image


def texture(seed: int) -> Image.Image:
    """Return smooth noise, which is as likely as its mirror image."""
    values = np.random.default_rng(seed).integers(0, 256, (32, 32, 3), np.uint8)
    return Image.fromarray(values).filter(ImageFilter.GaussianBlur(2))


def lit(seed: int) -> Image.Image:
    """Return smooth noise that is slightly brighter on the left."""
    shade = np.linspace(4, -4, 32)[None, :, None]
    return Image.fromarray((np.asarray(texture(seed)) + shade).clip(0, 255).astype(np.uint8))


def stack(images: list[Image.Image]) -> NDArray[np.uint8]:
    return np.stack([np.asarray(image) for image in images])


@pytest.mark.slow
def test_digits_have_a_direction() -> None:
    found = mirror_test(inspect("digits", sample=2000).squares)
    assert found.images == 1797
    assert 0.88 < found.share < 0.95 and found.matters


@pytest.mark.parametrize("count", [FEWEST, 400])
def test_text_has_a_direction_at_any_place(count: int) -> None:
    found = mirror_test(stack([text(seed) for seed in range(count)]))
    assert found.matters, found


@pytest.mark.parametrize("count", [FEWEST, 400])
def test_textures_have_no_direction(count: int) -> None:
    found = mirror_test(stack([texture(seed) for seed in range(count)]))
    assert found.is_known and not found.matters, found


def test_light_from_one_side_is_a_direction() -> None:
    found = mirror_test(stack([lit(seed) for seed in range(400)]))
    assert found.matters, found


def test_mirroring_the_images_gives_the_same_share() -> None:
    squares = stack([text(seed) for seed in range(100)])
    assert mirror_test(squares[:, :, ::-1].copy()).share == pytest.approx(
        mirror_test(squares).share, abs=0.1
    )


def test_few_images_are_not_tested() -> None:
    found = mirror_test(stack([text(seed) for seed in range(FEWEST - 1)]))
    assert not found.is_known and not found.matters


@pytest.mark.parametrize("color", [0, 255])
def test_flat_images_have_no_direction(color: int) -> None:
    assert mirror_test(np.full((60, 32, 32, 3), color, np.uint8)).share <= 0.5
