"""A sheet of pictures in labelled rows, for people to look at."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ddpm_core.sampling.images import Pixels, to_pil

MARGIN, GAP, LABELS, LINE = 18, 8, 104, 22
PAPER, INK, FAINT, TRACK = "#ffffff", "#1e1e1e", "#737373", "#e1e1e1"


def sheet(
    rows: Sequence[Pixels],
    names: Sequence[str],
    notes: Sequence[str] = (),
    captions: Sequence[Sequence[str]] = (),
    columns: Sequence[str] = (),
    heading: str = "",
    done: float | None = None,
) -> Pixels:
    """Draw rows of tiles uint8 (N, h, w, C) on one sheet (H, W, C).

    Left of each row stand its name and note; above the tiles `columns`, below each its caption.
    `heading` and a bar that is filled to `done`, 0..1, stand on top.
    """
    count, height, width, channels = rows[0].shape
    lines = (heading != "") + (done is not None) + (len(columns) > 0)
    top = MARGIN + lines * LINE
    pitch = height + GAP + (LINE if captions else 0)
    size = (
        LABELS + MARGIN + count * (width + GAP) - GAP + MARGIN,
        top + len(rows) * pitch - GAP + MARGIN,
    )
    picture = Image.new("RGB" if channels == 3 else "L", size, PAPER)
    draw = ImageDraw.Draw(picture)
    left = [LABELS + MARGIN + i * (width + GAP) for i in range(count)]
    if heading:
        _head(draw, heading, done, left[0], size[0] - MARGIN)
    for x, column in zip(left, columns, strict=False):
        _text(draw, (x + width / 2, top - GAP), column, FAINT, "ms")
    for index, (tiles, name) in enumerate(zip(rows, names, strict=True)):
        y = top + index * pitch
        _text(draw, (MARGIN, y + height / 2 - 4), name, INK, "ls", 17)
        if notes:
            _text(draw, (MARGIN, y + height / 2 + 16), notes[index], FAINT, "ls")
        for x, tile in zip(left, tiles, strict=True):
            picture.paste(to_pil(tile), (x, y))
        for x, caption in zip(left, captions[index] if captions else (), strict=False):
            _text(draw, (x + width / 2, y + height + 15), caption, FAINT, "ms")
    return np.asarray(picture).reshape(size[1], size[0], channels)


def _head(
    draw: ImageDraw.ImageDraw,
    heading: str,
    done: float | None,
    left: int,
    right: int,
) -> None:
    _text(draw, (left, MARGIN + 13), heading, INK, "ls", 15)
    if done is not None:
        y = MARGIN + 22
        draw.rectangle((left, y, right - 1, y + 5), TRACK)
        if done > 0.0:
            end = left + round(done * (right - 1 - left))
            draw.rectangle((left, y, end, y + 5), INK)


def _text(
    draw: ImageDraw.ImageDraw,
    at: tuple[float, float],
    text: str,
    color: str,
    anchor: str,
    size: int = 13,
) -> None:
    draw.text(at, text, color, ImageFont.load_default(size), anchor=anchor)
