"""Convert images between files, pixels and tensors; no other module does.

Pixels are uint8, (H, W, C) or (N, H, W, C), with C = 1 (grayscale) or 3 (RGB). The network sees
float32 (N, C, H, W) in [-1, 1].
"""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image

if TYPE_CHECKING:
    from torch import Tensor

Pixels = NDArray[np.uint8]


def to_model(pixels: Tensor) -> Tensor:
    """Convert uint8 (B, H, W, C) to float32 (B, C, H, W) in [-1, 1]: x / 127.5 - 1."""
    return pixels.permute(0, 3, 1, 2).float() / 127.5 - 1.0


def to_pixels(x: Tensor) -> Tensor:
    """Convert float (B, C, H, W) to uint8 (B, H, W, C): clamp to [-1, 1], then round."""
    scaled = (x.float().clamp(-1.0, 1.0) + 1.0) * 127.5
    return scaled.round().byte().permute(0, 2, 3, 1).contiguous()


def grid(pixels: Pixels, columns: int | None = None, gap: int = 1) -> Pixels:
    """Tile images (N, H, W, C) into one (H', W', C), with white gaps of `gap` pixels.

    Without `columns` the grid is about square.
    """
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
    """Repeat the pixels of (H, W, C) a whole number of times, to at most `smallest` a side.

    `smallest` applies to the shorter side. Larger images stay as they are.
    """
    factor = max(1, smallest // max(1, min(pixels.shape[:2])))
    return pixels.repeat(factor, axis=0).repeat(factor, axis=1)


def grid_png(pixels: Pixels) -> bytes:
    """Return a grid of images (N, H, W, C) as a PNG, with small ones enlarged for people."""
    return png(enlarge(grid(pixels), 512))


def png(pixels: Pixels) -> bytes:
    """Encode an image (H, W, C) as PNG."""
    stream = io.BytesIO()
    to_pil(pixels).save(stream, "PNG", optimize=True)
    return stream.getvalue()


def to_pil(pixels: Pixels) -> Image.Image:
    """Return an image (H, W, 1 or 3) as a PIL image, grayscale or RGB."""
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
