"""The only place where pictures are turned into tensors and back, and drawn into files.

A picture is uint8 NHWC with 1 or 3 channels; the network sees float32 NCHW in [-1, 1].
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

Pixels = NDArray[np.uint8]


def to_model(pixels: Tensor) -> Tensor:
    """uint8 (B, H, W, C) to float32 (B, C, H, W) in [-1, 1]: x / 127.5 - 1."""
    return pixels.permute(0, 3, 1, 2).to(torch.float32) / 127.5 - 1.0


def to_pixels(x: Tensor) -> Tensor:
    """float (B, C, H, W), clamped to [-1, 1], to uint8 (B, H, W, C), rounded, never truncated."""
    scaled = (x.to(torch.float32).clamp(-1.0, 1.0) + 1.0) * 127.5
    return scaled.round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def grid(pixels: Pixels, columns: int | None = None, gap: int = 1) -> Pixels:
    """Tile (N, H, W, C) into one picture; `columns` defaults to about a square."""
    count, height, width, channels = pixels.shape
    columns = min(count, columns or math.ceil(math.sqrt(count))) or 1
    rows = math.ceil(count / columns)
    sheet = np.full(
        (rows * (height + gap) + gap, columns * (width + gap) + gap, channels), 255, np.uint8
    )
    for index, tile in enumerate(pixels):
        top = gap + index // columns * (height + gap)
        left = gap + index % columns * (width + gap)
        sheet[top : top + height, left : left + width] = tile
    return sheet


def enlarge(pixels: Pixels, smallest: int) -> Pixels:
    """Repeat the pixels of (H, W, C) a whole number of times until a side has `smallest`."""
    factor = max(1, smallest // max(1, min(pixels.shape[:2])))
    return pixels.repeat(factor, axis=0).repeat(factor, axis=1)


def png(pixels: Pixels) -> bytes:
    """One picture (H, W, C) as PNG."""
    stream = io.BytesIO()
    to_pil(pixels).save(stream, "PNG", optimize=True)
    return stream.getvalue()


def save_animation(frames: Sequence[Pixels], path: Path, milliseconds: int = 80) -> None:
    """Pictures of one shape as an endless GIF; the last frame rests for a second."""
    first, *rest = _with_one_palette(frames)
    first.save(
        path,
        "GIF",
        save_all=True,
        append_images=rest,
        duration=[milliseconds] * len(rest) + [1000],
        loop=0,
    )


def _with_one_palette(frames: Sequence[Pixels]) -> list[Image.Image]:
    """A GIF has 256 colours: the same for all frames, or they would flicker. Gray needs none."""
    pictures = [to_pil(frame) for frame in frames]
    if frames[0].shape[2] == 1:
        return pictures
    some = np.concatenate(frames[:: math.ceil(len(frames) / 8)])
    palette = to_pil(some).quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    return [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures]


def to_pil(pixels: Pixels) -> Image.Image:
    """One picture (H, W, 1 or 3)."""
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
