"""What one file is, without changing it: for check-data. Runs in the workers: imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ddpm_core.data.decode import TooLarge, Undecodable, decode, kind
from ddpm_core.data.sources.base import Payload, Rejection

_BACKGROUND = (255, 255, 255)
_SMALLEST = 16  # as prepare.image_size where nothing is said


@dataclass(frozen=True, slots=True)
class Examined:
    """A picture's size in pixels, what it is stored as, and its content; or why it is unusable."""

    position: int
    width: int = 0
    height: int = 0
    stored: str = ""
    digest: bytes = b""
    reason: str = ""


def examine(chunk: Sequence[tuple[int, Payload]]) -> list[Examined]:
    """Decode whole pictures: a file that is cut short shows itself only so."""
    return [_examine(position, payload) for position, payload in chunk]


def _examine(position: int, payload: Payload) -> Examined:
    if isinstance(payload, Rejection):
        return Examined(position, reason=payload.reason)
    if isinstance(payload, np.ndarray):
        height, width = payload.shape[:2]
        digest = hashlib.sha256(payload.tobytes()).digest()
        return Examined(position, width, height, "array", digest)
    try:
        return _decoded(position, payload)
    except Undecodable as error:
        return Examined(position, reason=str(error))


def _decoded(position: int, content: bytes | Path) -> Examined:
    try:
        image = decode(content, _BACKGROUND)
        stored, size = kind(content)[0], image.size
    except TooLarge:  # as a whole; prepare reduces a JPEG while it is decoded
        image = decode(content, _BACKGROUND, smallest=_SMALLEST)
        stored, size = kind(content)
        if (image.width < image.height) != (size[0] < size[1]):  # turned, as EXIF says
            size = size[::-1]
    digest = hashlib.sha256(repr(size).encode() + image.tobytes()).digest()
    return Examined(position, *size, stored, digest)
