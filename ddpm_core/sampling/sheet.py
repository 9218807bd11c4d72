"""Draw labelled rows of images, and curves below them, on one sheet; write an animation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ddpm_core.sampling.images import Pixels, to_pil

MARGIN, GAP, LABELS, LINE = 18, 8, 104, 22  # pixels
CHART = 200  # pixels, the height of a chart
PAPER, INK, FAINT, TRACK = "#ffffff", "#1e1e1e", "#737373", "#e1e1e1"


def sheet(
    rows: Sequence[Pixels],
    names: Sequence[str],
    notes: Sequence[str] = (),
    captions: Sequence[Sequence[str]] = (),
    columns: Sequence[str] = (),
    heading: str = "",
    progress: float | None = None,
) -> Pixels:
    """Draw labelled rows of tiles uint8 (N, h, w, C) on one sheet, uint8 (H, W, C).

    Args:
        names: The label to the left of each row.
        notes: A smaller text below each name.
        captions: The texts below the tiles of each row.
        columns: The texts above the tiles.
        heading: The text at the top.
        progress: How far a bar below the heading is filled, 0 to 1. None: no bar.
    """
    count, height, width, channels = rows[0].shape
    lines = (heading != "") + (progress is not None) + (len(columns) > 0)
    top = MARGIN + lines * LINE
    pitch = height + GAP + (LINE if captions else 0)
    size = (
        LABELS + MARGIN + count * (width + GAP) - GAP + MARGIN,
        top + len(rows) * pitch - GAP + MARGIN,
    )
    canvas = Image.new("RGB" if channels == 3 else "L", size, PAPER)
    draw = ImageDraw.Draw(canvas)
    left = [LABELS + MARGIN + i * (width + GAP) for i in range(count)]
    if heading:
        _head(draw, heading, progress, left[0], size[0] - MARGIN)
    for x, column in zip(left, columns, strict=False):
        _text(draw, (x + width / 2, top - GAP), column, FAINT, "ms")
    for index, (tiles, name) in enumerate(zip(rows, names, strict=True)):
        y = top + index * pitch
        _text(draw, (MARGIN, y + height / 2 - 4), name, INK, "ls", 17)
        if notes:
            _text(draw, (MARGIN, y + height / 2 + 16), notes[index], FAINT, "ls")
        for x, tile in zip(left, tiles, strict=True):
            canvas.paste(to_pil(tile), (x, y))
        for x, caption in zip(left, captions[index] if captions else (), strict=False):
            _text(draw, (x + width / 2, y + height + 15), caption, FAINT, "ms")
    return np.asarray(canvas).reshape(size[1], size[0], channels)


def chart(
    heading: str,
    lines: Mapping[str, Sequence[float]],
    ticks: Mapping[float, str],
    columns: int,
    width: int,
    channels: int,
) -> Pixels:
    """Draw curves to be put below a sheet, uint8 (H, W, C).

    Args:
        heading: What the values are.
        lines: The values of each curve in equal distances, drawn from the middle of the sheet's
            first column to that of its last. A curve ends where it falls below the lowest tick.
        ticks: The texts of values.
        columns, width: The number of tiles in a row of the sheet, and their width.
    """
    scale = 3  # drawn larger and reduced, because Pillow draws lines without smoothing
    first = LABELS + MARGIN + width // 2
    last = first + (columns - 1) * (width + GAP)
    low, high, top, bottom = min(ticks), max(ticks), LINE + MARGIN, CHART - MARGIN
    size = (last + width - width // 2 + MARGIN, CHART)
    canvas = Image.new("RGB" if channels == 3 else "L", (size[0] * scale, CHART * scale), PAPER)
    draw = ImageDraw.Draw(canvas)

    def at(share: float, value: float) -> tuple[float, float]:
        height = (min(max(value, low), high) - low) / (high - low)
        return scale * (first + share * (last - first)), scale * (bottom - height * (bottom - top))

    _text(draw, (first * scale, scale * (top - 12)), heading, INK, "ls", 15 * scale)
    for value, text in ticks.items():
        draw.line([at(0, value), at(1, value)], TRACK, scale)
        x, y = at(0, value)
        _text(draw, (x - 8 * scale, y), text, FAINT, "rm", 13 * scale)
    for number, (name, values) in enumerate(lines.items()):
        shown = list(takewhile(lambda value: value >= low, values))
        points = [at(i / (len(values) - 1), value) for i, value in enumerate(shown)]
        thick = (4 - 2 * number) * scale  # thick, then thin: the sheet may have no colors
        draw.line(points, INK, max(scale, thick), joint="curve")
        y = scale * (top + 12 + LINE * number)
        draw.line([(MARGIN * scale, y), ((MARGIN + 14) * scale, y)], INK, max(scale, thick))
        _text(draw, ((MARGIN + 20) * scale, y), name, INK, "lm", 13 * scale)
    smooth = canvas.resize(size, Image.Resampling.LANCZOS)
    return np.asarray(smooth).reshape(size[1], size[0], channels)


def _head(
    draw: ImageDraw.ImageDraw, heading: str, progress: float | None, left: int, right: int
) -> None:
    _text(draw, (left, MARGIN + 13), heading, INK, "ls", 15)
    if progress is not None:
        y = MARGIN + 22
        draw.rectangle((left, y, right - 1, y + 5), TRACK)
        if progress > 0.0:
            end = left + round(progress * (right - 1 - left))
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


def save_animation(
    frames: Sequence[Pixels], target: Path | IO[bytes], milliseconds: int = 80
) -> None:
    """Write frames (H, W, C) of one shape as an endless GIF; the last one stays for a second."""
    first, *rest = _with_one_palette(frames)
    first.save(
        target,
        "GIF",
        save_all=True,
        append_images=rest,
        duration=[milliseconds] * len(rest) + [1000],
        loop=0,
    )


def _with_one_palette(frames: Sequence[Pixels]) -> list[Image.Image]:
    """Return frames with one palette of 256 colors. With a palette each, they would flicker."""
    opened = [to_pil(frame) for frame in frames]
    if frames[0].shape[2] == 1:  # 256 grays need no palette
        return opened
    some = np.concatenate(frames[:: math.ceil(len(frames) / 8)])
    palette = to_pil(some).quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    return [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in opened]
