"""Pictures to squares of one size, with antialiasing. Runs in the workers: imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ddpm_core.data.decode import Color, Undecodable, decode_and_know
from ddpm_core.data.sources.base import Payload, Rejection

Pixels = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Square:
    """How a picture becomes a square of `size` pixels with 1 or 3 `channels`."""

    size: int
    resize: str  # crop | pad | squash
    background: Color
    channels: int


# Pixels that lie in no file are known by this square of them: by another one the digits, which are
# of this size in the demo, would be split otherwise, and have other scores.
_KNOWN = Square(16, "squash", (255, 255, 255), 3)


@dataclass(frozen=True, slots=True)
class Squares:
    """What became of a chunk: `pixels` (k, S, S, C) and, for each, position, digest and reason.

    A digest tells a picture from others whatever it is made into, by every Square the same; it is
    empty where there is a reason why there are no pixels.
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
        digest, reason = _fill(pixels, rule, payload)
        result.positions.append(position)
        result.reasons.append(reason)
        result.digests.append(digest)
        result.gray.append(bool((pixels == pixels[:, :, :1]).all()))
    return result


def _fill(pixels: Pixels, rule: Square, payload: Payload) -> tuple[bytes, str]:
    """Write one square into `pixels` (S, S, C); its digest, and the reason where there is none."""
    if isinstance(payload, Rejection):
        return b"", payload.reason
    try:
        if isinstance(payload, np.ndarray):
            image = Image.fromarray(payload).convert("RGB")
            digest = hashlib.sha256(make_square(image, _KNOWN).tobytes()).digest()
        else:
            image, digest = decode_and_know(payload, rule.background, rule.size)
        square = make_square(image, rule)
    except Undecodable as error:
        return b"", str(error)
    values = np.asarray(square if rule.channels == 3 else square.convert("L"))
    pixels[:] = values.reshape(pixels.shape)
    return digest, ""


def make_square(image: Image.Image, rule: Square) -> Image.Image:
    """An RGB picture of any shape as S x S, by `rule.resize`.

    crop keeps the middle, pad keeps all of it on the background, squash changes its proportions.
    """
    width, height = image.size
    size, side = rule.size, min(image.size)
    if rule.resize == "squash" or width == height:
        return _scale(image, (size, size), (0, 0, width, height))
    if rule.resize == "crop":
        # Whole pixels: half of one would blur what has the wanted size already.
        left, top = (width - side) // 2, (height - side) // 2
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
