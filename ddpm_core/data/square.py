"""Pictures to squares of one size, with antialiasing. Runs in the workers: imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ddpm_core.data.decode import Color, Undecodable, decode
from ddpm_core.data.sources import Payload, Rejection

Pixels = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Square:
    """How a picture becomes a square of `size` pixels with 1 or 3 `channels`."""

    size: int
    resize: str  # crop | pad | squash
    background: Color
    channels: int


@dataclass(frozen=True, slots=True)
class Squares:
    """What became of a chunk: `pixels` (k, S, S, C) and, for each, position, digest and reason.

    A digest is the SHA-256 of the pixels, empty where there is a reason why there are none.
    """

    positions: list[int]
    pixels: Pixels
    digests: list[bytes]
    gray: list[bool]
    reasons: list[str]


def squares(rule: Square, chunk: Sequence[tuple[int, Payload]]) -> Squares:
    """Make squares of positions and payloads. One that can't be used never stops the others."""
    shape = (len(chunk), rule.size, rule.size, rule.channels)
    result = Squares([], np.zeros(shape, np.uint8), [], [], [])
    for pixels, (position, payload) in zip(result.pixels, chunk, strict=True):
        reason = _fill(pixels, rule, payload)
        result.positions.append(position)
        result.reasons.append(reason)
        result.digests.append(b"" if reason else hashlib.sha256(pixels).digest())
        result.gray.append(bool((pixels == pixels[:, :, :1]).all()))
    return result


def _fill(pixels: Pixels, rule: Square, payload: Payload) -> str:
    """Write one square into `pixels` (S, S, C); the reason where that is impossible, or ""."""
    if isinstance(payload, Rejection):
        return payload.reason
    try:
        if isinstance(payload, np.ndarray):
            image = Image.fromarray(payload).convert("RGB")
        else:
            image = decode(payload, rule.background, smallest=rule.size)
        square = make_square(image, rule)
    except Undecodable as error:
        return str(error)
    values = np.asarray(square if rule.channels == 3 else square.convert("L"))
    pixels[:] = values.reshape(pixels.shape)
    return ""


def make_square(image: Image.Image, rule: Square) -> Image.Image:
    """An RGB picture of any shape as S x S, by `rule.resize`.

    crop keeps the middle, pad keeps all of it on the background, squash changes its proportions.
    """
    width, height = image.size
    size, side = rule.size, min(image.size)
    if rule.resize == "squash" or width == height:
        return _scale(image, (size, size), (0, 0, width, height))
    if rule.resize == "crop":
        left, top = (width - side) / 2, (height - side) / 2
        return _scale(image, (size, size), (left, top, left + side, top + side))
    longest = max(image.size)
    inner = (max(1, round(width * size / longest)), max(1, round(height * size / longest)))
    canvas = Image.new("RGB", (size, size), rule.background)
    scaled = _scale(image, inner, (0, 0, width, height))
    canvas.paste(scaled, ((size - inner[0]) // 2, (size - inner[1]) // 2))
    return canvas


def _scale(
    image: Image.Image, size: tuple[int, int], box: tuple[float, float, float, float]
) -> Image.Image:
    """Lanczos when shrinking (its support grows with the factor: no moire), bicubic otherwise."""
    grows = size[0] >= box[2] - box[0] and size[1] >= box[3] - box[1]
    kernel = Image.Resampling.BICUBIC if grows else Image.Resampling.LANCZOS
    return image.resize(size, kernel, box=box)
