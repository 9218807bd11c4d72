"""The contact sheet: some pictures of every class, to look at before hours of training.

Drawn with Pillow alone: prepare runs where torch is slow to import, or not there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from ddpm_core.data.lettering import fonts_for, lettered

Pixels = NDArray[np.uint8]
Indices = NDArray[np.int64]

COLUMNS = 12
MOST_CLASSES = 60
LARGEST = 128  # pixels a side of a tile: the largest sheet is 1,562 x 9,142
_SMALLEST, _NARROWEST = 48, 480  # pixels
_TITLE, _GAP = 22, 2
_PAPER, _INK = (255, 255, 255), (0, 0, 0)


def choose(labels: Indices, columns: int = COLUMNS, most: int = MOST_CLASSES) -> list[Indices]:
    """For each of the first classes the indices of pictures spread evenly over it."""
    chosen = []
    for label in np.unique(labels)[:most]:
        members = np.flatnonzero(labels == label)
        spread = np.linspace(0, len(members) - 1, min(columns, len(members)))
        chosen.append(members[np.unique(spread.round().astype(int))])
    return chosen


def shrunk(pixels: Pixels) -> Pixels:
    """Pictures (n, S, S, C) as tiles (n, s, s, C), s at most LARGEST: a sheet holds hundreds."""
    if pixels.shape[1] <= LARGEST:
        return pixels
    tiles = [_picture(tile).resize((LARGEST, LARGEST), Image.Resampling.LANCZOS) for tile in pixels]
    return np.stack([np.asarray(tile).reshape(LARGEST, LARGEST, -1) for tile in tiles])


def sheet(rows: Sequence[tuple[str, Pixels]], more: str = "") -> Image.Image:
    """Rows of a title and tiles (n, s, s, C) under one another, as RGB; `more` stands below.

    Small tiles are enlarged a whole number of times.
    """
    side = rows[0][1].shape[1] * math.ceil(_SMALLEST / rows[0][1].shape[1])
    widest = max(len(tiles) for _, tiles in rows)
    size = (
        max(_NARROWEST, widest * (side + _GAP) + _GAP),
        len(rows) * (side + _TITLE + _GAP) + (_TITLE if more else 0),
    )
    canvas, fonts = Image.new("RGB", size, _PAPER), fonts_for("".join(t for t, _ in rows))
    draw, top = ImageDraw.Draw(canvas), 0
    for title, tiles in rows:
        text, font = lettered(title, fonts)
        draw.text((_GAP, top + 2), text, fill=_INK, font=font)
        for column, tile in enumerate(tiles):
            large = _picture(tile).resize((side, side), Image.Resampling.NEAREST)
            canvas.paste(large, (_GAP + column * (side + _GAP), top + _TITLE))
        top += side + _TITLE + _GAP
    text, font = lettered(more, fonts)
    draw.text((_GAP, top + 2), text, fill=_INK, font=font)
    return canvas


def _picture(tile: Pixels) -> Image.Image:
    return Image.fromarray(tile[:, :, 0] if tile.shape[2] == 1 else tile)
