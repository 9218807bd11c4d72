"""Decode one image file of any kind to an RGB square.

Worker processes import this module, so it must not import torch.

Images become 8-bit RGB, upright by their EXIF orientation, over a background where they are
transparent, and square by one of three rules.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, JpegImagePlugin, UnidentifiedImageError

from ddpm_core.data.sources.base import size_problem

# Formats with a safe decoder: EPS would start Ghostscript, and TGA accepts random bytes.
_SUPPORTED = "JPEG PNG WEBP BMP DIB GIF TIFF AVIF JPEG2000 PPM ICO"
PIXELS = 100_000_000  # limit of an image in memory; for a JPEG after its reduction
_PHOTOMETRIC = 262  # TIFF tag: 0 if white is zero
_DEEP_GRAY = ("I", "I;16", "I;16B", "I;16L", "I;16N", "F")  # modes of more than 8 bits
# The first bytes of formats that are recognised but not supported.
_UNSUPPORTED = {
    "JPEG XL": re.compile(rb"\xff\x0a|\0\0\0\x0cJXL "),
    "HEIC": re.compile(rb"....ftyp(hei|hev|mif1|msf1)", re.DOTALL),
    "AVIF": re.compile(rb"....ftypavi", re.DOTALL),
    "Photoshop": re.compile(rb"8BPS"),
    "OpenEXR": re.compile(rb"v/1\x01"),
    "SVG": re.compile(rb"\s*(<[?!].*)?<svg", re.DOTALL),
}
_TGA_END = b"TRUEVISION-XFILE.\0"
_OVERSHOOT = 2.0  # values up to this may be fractions that exceed 1 by mistake
_WHITE = (255, 255, 255)
_DIGEST_SIDE = 16  # a JPEG's digest is of its reduction for squares of this size

Color = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class SquareRule:
    """How an image becomes a square of `size` pixels a side with 1 or 3 `channels`."""

    size: int
    resize: str  # crop | pad | squash
    background: Color
    channels: int


@functools.cache
def _formats() -> tuple[str, ...]:
    """Return the supported formats that this build of Pillow has."""
    Image.init()
    return tuple(name for name in _SUPPORTED.split() if name in Image.OPEN)


class Undecodable(Exception):
    """The reason why a file cannot be used as an image."""


class TooLarge(Undecodable):
    """The image has more than PIXELS."""


def decode(content: bytes | Path, background: Color, smallest: int = 0) -> Image.Image:
    """Return the first frame as an upright RGB image.

    With `smallest` above 0 a JPEG may be reduced while it is decoded, to sides of at least 2 x
    `smallest` pixels. Raises Undecodable.
    """
    with _decodable(content) as stream:
        return _to_rgb(_load(stream, smallest)[0], background)


def decode_with_digest(
    content: bytes | Path, background: Color, smallest: int
) -> tuple[Image.Image, bytes]:
    """Return the image as `decode` does, and a digest of it that is the same for all settings.

    Copies with other metadata, or in another lossless format, have the same digest. It is of the
    pixels over white; a JPEG is reduced as for squares of _DIGEST_SIDE pixels.
    """
    with _decodable(content) as stream:
        loaded, is_digest_scale = _load(stream, smallest)
        image = _to_rgb(loaded, background)
        if not is_digest_scale:
            return image, digest_of(_to_rgb(_load(stream, _DIGEST_SIDE)[0], _WHITE))
        if background != _WHITE and loaded.has_transparency_data:
            return image, digest_of(_to_rgb(loaded, _WHITE))
        return image, digest_of(image)


def digest_of(image: Image.Image) -> bytes:
    """Return the SHA-256 of an RGB image's size and pixels."""
    return hashlib.sha256(repr(image.size).encode() + image.tobytes()).digest()


@contextlib.contextmanager
def _decodable(content: bytes | Path) -> Iterator[IO[bytes]]:
    """Open an image file, and turn any exception from its decoder into Undecodable."""
    with _open(content) as stream, warnings.catch_warnings():
        # PIXELS replaces Pillow's warning of large images, and damaged EXIF data do no harm.
        warnings.simplefilter("ignore")
        try:
            yield stream
        except Undecodable:
            raise
        except UnidentifiedImageError as error:
            raise Undecodable(_unknown(stream)) from error
        except Exception as error:  # decoders raise exceptions of many kinds for damaged files
            raise Undecodable(_reason(error)) from error


def stored_kind(content: bytes | Path) -> tuple[str, tuple[int, int]]:
    """Return format and mode, as in `JPEG RGB`, and size in the file of a decodable image."""
    with _open(content) as stream, Image.open(stream, formats=_formats()) as image:
        return f"{image.format} {image.mode}", image.size


def _open(content: bytes | Path) -> IO[bytes]:
    """Open an encoded image. Raises Undecodable."""
    try:
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        if problem := size_problem(size) if size else "empty: 0 bytes":
            raise Undecodable(problem)
        return io.BytesIO(content) if isinstance(content, bytes) else content.open("rb")
    except OSError as error:
        raise Undecodable(f"cannot be read: {error.strerror}") from error


def _load(stream: IO[bytes], smallest: int) -> tuple[Image.Image, bool]:
    """Return the upright image, and whether it has the scale that its digest needs."""
    image: Image.Image = Image.open(stream, formats=_formats())
    reductions = {_reduction(image, side) for side in (smallest, _DIGEST_SIDE)}
    if smallest:
        image.draft(None, (2 * smallest, 2 * smallest))
    width, height = image.size
    if width * height > PIXELS:
        raise TooLarge(f"{width} x {height} pixels; at most {PIXELS:,} are decoded")
    image.load()
    with contextlib.suppress(Exception):  # ignore an unreadable orientation
        ImageOps.exif_transpose(image, in_place=True)
    return image, len(reductions) == 1


def _reduction(image: Image.Image, smallest: int) -> int:
    """Return the factor by which Pillow reduces a JPEG for squares of `smallest` pixels."""
    if not smallest or not isinstance(image, JpegImagePlugin.JpegImageFile):
        return 1
    most = min(image.size) // (2 * smallest)
    return next(scale for scale in (8, 4, 2, 1) if most >= scale or scale == 1)


def _to_rgb(image: Image.Image, background: Color) -> Image.Image:
    """Return an image of any mode as RGB, with `background` where it is transparent."""
    key = image.info.get("transparency")
    if image.mode in _DEEP_GRAY:
        return _deep_to_rgb(image, key, background)
    if not image.has_transparency_data:
        return image.convert("RGB")
    if isinstance(key, tuple) and max(key) > 255:  # 16 bits, but Pillow reduced the pixels to 8
        image.info["transparency"] = tuple(value >> 8 for value in key)
    canvas = Image.new("RGBA", image.size, (*background, 255))
    canvas.alpha_composite(image.convert("RGBA"))
    return canvas.convert("RGB")


def _deep_to_rgb(image: Image.Image, key: object, background: Color) -> Image.Image:
    """Return gray of more than 8 bits as RGB; pixels of the value `key` are transparent."""
    values = np.asarray(image)
    gray = to_8_bits(values)
    # If white is zero, Pillow inverts only images of 8 bits.
    if getattr(image, "tag_v2", {}).get(_PHOTOMETRIC) == 0:
        gray = 255 - gray
    rgb = Image.fromarray(gray).convert("RGB")
    if isinstance(key, int):
        rgb.paste(background, mask=Image.fromarray((values == key).astype(np.uint8) * 255))
    return rgb


def to_8_bits(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Return gray values of 16 bits, 32 bits or floating point scaled to 0..255, never clipped.

    16 bits are divided by 257. Wider types do not define white. It is the smallest of 1 (floating
    point only), 255 and 65,535 that no value exceeds.

    Raises:
        Undecodable: values are negative or above 65,535, or the maximum is just above 1. With
            white at 255 such an image would be black, so white was probably meant to be 1.
    """
    if values.dtype.kind == "u" and values.dtype.itemsize == 2:  # of either byte order
        return ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)
    lowest, highest = float(values.min()), float(values.max())
    fractions = np.issubdtype(values.dtype, np.floating)
    white = next((w for w in ((1,) if fractions else ()) + (255, 65_535) if highest <= w), None)
    if white is None or not lowest >= 0:
        raise Undecodable(f"gray values from {lowest:g} to {highest:g}; must be 0 to 65,535")
    if fractions and 1 < highest <= _OVERSHOOT:
        raise Undecodable(f"gray values from {lowest:g} to {highest:g}: is 1 white, or is 255?")
    return np.rint(values * (255 / white)).astype(np.uint8)


def make_square(image: Image.Image, rule: SquareRule) -> Image.Image:
    """Return an RGB image of any shape as a square of `rule.size` pixels.

    crop keeps the middle, pad adds background, and squash changes the proportions.
    """
    width, height = image.size
    size, side = rule.size, min(image.size)
    if rule.resize == "squash" or width == height:
        return _scale(image, (size, size), (0, 0, width, height))
    if rule.resize == "crop":
        # An offset of half a pixel would blur an image that needs no scaling.
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
    """Scale by Lanczos when shrinking, else bicubic.

    Pillow widens the kernel by the factor of the reduction, which prevents moire.
    """
    grows = size[0] >= box[2] - box[0] and size[1] >= box[3] - box[1]
    kernel = Image.Resampling.BICUBIC if grows else Image.Resampling.LANCZOS
    return image.resize(size, kernel, box=box)


def _unknown(stream: IO[bytes]) -> str:
    """Return the reason for a file that no decoder recognises, with its format if known."""
    stream.seek(0)
    head = stream.read(1024)
    stream.seek(-min(len(head), len(_TGA_END)), io.SEEK_END)
    found = [name for name, start in _UNSUPPORTED.items() if start.match(head)]
    found += ["TGA"] if stream.read() == _TGA_END else []
    if found:
        return f"{found[0]} is not a supported format: convert it to JPEG or PNG"
    return "not an image in a supported format"


def _reason(error: Exception) -> str:
    """Return the reason for an exception from a decoder."""
    text = " ".join(str(error).split())[:200]
    if isinstance(error, Image.DecompressionBombError):
        return f"too many pixels; at most {PIXELS:,} are decoded"
    if isinstance(error, MemoryError):
        return "not enough memory to decode it"
    if "truncated" in text.lower():  # Pillow has no exception type or code for it
        return f"truncated: {text}"
    return f"damaged: {text or type(error).__name__}"
