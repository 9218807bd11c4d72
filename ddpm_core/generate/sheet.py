"""A sheet of pictures in labelled rows, for people to look at."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ddpm_core.images import Pixels, to_pil

MARGIN, GAP, LABELS, LINE = 18, 8, 104, 22
PAPER, INK, FAINT, TRACK = 255, 30, 115, 225


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
    picture = Image.new("RGB" if channels == 3 else "L", size, _shade(PAPER, channels))
    draw = ImageDraw.Draw(picture)
    left = [LABELS + MARGIN + i * (width + GAP) for i in range(count)]
    if heading:
        _head(draw, heading, done, left[0], size[0] - MARGIN, channels)
    for x, column in zip(left, columns, strict=False):
        _text(draw, (x + width / 2, top - GAP), column, FAINT, channels, "ms")
    for index, (tiles, name) in enumerate(zip(rows, names, strict=True)):
        y = top + index * pitch
        _text(draw, (MARGIN, y + height / 2 - 4), name, INK, channels, "ls", 17)
        if notes:
            _text(draw, (MARGIN, y + height / 2 + 16), notes[index], FAINT, channels, "ls")
        for x, tile in zip(left, tiles, strict=True):
            picture.paste(to_pil(tile), (x, y))
        for x, caption in zip(left, captions[index] if captions else (), strict=False):
            _text(draw, (x + width / 2, y + height + 15), caption, FAINT, channels, "ms")
    return np.asarray(picture).reshape(size[1], size[0], channels)


def _head(
    draw: ImageDraw.ImageDraw,
    heading: str,
    done: float | None,
    left: int,
    right: int,
    channels: int,
) -> None:
    _text(draw, (left, MARGIN + 13), heading, INK, channels, "ls", 15)
    if done is not None:
        y = MARGIN + 22
        draw.rectangle((left, y, right - 1, y + 5), _shade(TRACK, channels))
        if done > 0.0:
            end = left + round(done * (right - 1 - left))
            draw.rectangle((left, y, end, y + 5), _shade(INK, channels))


def _text(
    draw: ImageDraw.ImageDraw,
    at: tuple[float, float],
    text: str,
    shade: int,
    channels: int,
    anchor: str,
    size: int = 13,
) -> None:
    draw.text(at, text, _shade(shade, channels), ImageFont.load_default(size), anchor=anchor)


def _shade(gray: int, channels: int) -> int | tuple[int, int, int]:
    return (gray, gray, gray) if channels == 3 else gray
