"""The contact sheet: some pictures of every class, to look at before hours of training.

Drawn with Pillow alone: prepare runs where torch is slow to import, or not there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

Pixels = NDArray[np.uint8]
Indices = NDArray[np.int64]

COLUMNS = 12
MOST_CLASSES = 60
_SMALLEST, _NARROWEST = 48, 480  # pixels
_TEXT, _TITLE, _GAP = 15, 22, 2
_PAPER, _INK = (255, 255, 255), (0, 0, 0)


def choose(labels: Indices, columns: int = COLUMNS, most: int = MOST_CLASSES) -> list[Indices]:
    """For each of the first classes the indices of pictures spread evenly over it."""
    chosen = []
    for label in np.unique(labels)[:most]:
        members = np.flatnonzero(labels == label)
        spread = np.linspace(0, len(members) - 1, min(columns, len(members)))
        chosen.append(members[np.unique(spread.round().astype(int))])
    return chosen


def sheet(rows: Sequence[tuple[str, Pixels]]) -> Image.Image:
    """Rows of a title and pictures (n, S, S, C) under one another, as RGB."""
    strips = [_strip(title, pixels) for title, pixels in rows]
    width = max(strip.width for strip in strips)
    canvas = Image.new("RGB", (width, sum(strip.height for strip in strips)), _PAPER)
    top = 0
    for strip in strips:
        canvas.paste(strip, (0, top))
        top += strip.height
    return canvas


def _strip(title: str, pixels: Pixels) -> Image.Image:
    """One row: the title above its pictures, small ones enlarged a whole number of times."""
    side = pixels.shape[1] * math.ceil(_SMALLEST / pixels.shape[1])
    width = max(_NARROWEST, len(pixels) * (side + _GAP) + _GAP)
    strip = Image.new("RGB", (width, side + _TITLE + _GAP), _PAPER)
    ImageDraw.Draw(strip).text((_GAP, 2), title, fill=_INK, font=ImageFont.load_default(_TEXT))
    for column, tile in enumerate(pixels):
        picture = Image.fromarray(tile[:, :, 0] if tile.shape[2] == 1 else tile)
        large = picture.resize((side, side), Image.Resampling.NEAREST)
        strip.paste(large, (_GAP + column * (side + _GAP), _TITLE))
    return strip
