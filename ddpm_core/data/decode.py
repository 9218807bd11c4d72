"""One picture of any kind to RGB, 8 bits, upright, over a background. Imports no torch."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, JpegImagePlugin, UnidentifiedImageError

from ddpm_core.data.sources.base import FILE_BYTES

# Formats with a plain decoder: EPS would start Ghostscript, and TGA takes noise for a picture.
_WANTED = "JPEG PNG WEBP BMP DIB GIF TIFF AVIF JPEG2000 PPM ICO"
PIXELS = 100_000_000  # held in memory at once; a JPEG is counted after its own reduction
_PHOTOMETRIC = 262  # a tag of TIFF: 0 where white is zero
_DEEP_GRAY = ("I", "I;16", "I;16B", "I;16L", "I;16N", "F")
# How pictures begin that are known, and not read.
_FOREIGN = {
    "JPEG XL": re.compile(rb"\xff\x0a|\0\0\0\x0cJXL "),
    "HEIC": re.compile(rb"....ftyp(hei|hev|mif1|msf1)", re.DOTALL),
    "AVIF": re.compile(rb"....ftypavi", re.DOTALL),
    "Photoshop": re.compile(rb"8BPS"),
    "OpenEXR": re.compile(rb"v/1\x01"),
    "SVG": re.compile(rb"\s*(<[?!].*)?<svg", re.DOTALL),
}
_TGA_END = b"TRUEVISION-XFILE.\0"
_OVERSHOOT = 2.0  # up to which fractions may have been meant
_WHITE = (255, 255, 255)
_LEAST = 16  # `smallest` of the JPEG by which a picture is known

Color = tuple[int, int, int]


@functools.cache
def _formats() -> tuple[str, ...]:
    """Those that this build of Pillow has."""
    Image.init()
    return tuple(name for name in _WANTED.split() if name in Image.OPEN)


class Undecodable(Exception):
    """Why a file is no picture that can be used."""


class TooLarge(Undecodable):
    """It has more than PIXELS."""


def decode(content: bytes | Path, background: Color, smallest: int = 0) -> Image.Image:
    """The first frame as an RGB picture, turned as its EXIF orientation says.

    A JPEG may be reduced while it is decoded, down to sides of 2 x `smallest`; 0: never.
    Raises Undecodable with the reason.
    """
    with _decodable(content) as stream:
        return _to_rgb(_load(stream, smallest)[0], background)


def decode_and_know(
    content: bytes | Path, background: Color, smallest: int
) -> tuple[Image.Image, bytes]:
    """As `decode`, and a digest of the picture that depends on no setting.

    It is of the pixels over white, of a JPEG as it is reduced for squares of _LEAST pixels: the
    same for a copy in another lossless format, or with other metadata.
    """
    with _decodable(content) as stream:
        found, known = _load(stream, smallest)
        picture = _to_rgb(found, background)
        if not known:
            return picture, digest_of(_to_rgb(_load(stream, _LEAST)[0], _WHITE))
        if background != _WHITE and found.has_transparency_data:
            return picture, digest_of(_to_rgb(found, _WHITE))
        return picture, digest_of(picture)


def digest_of(picture: Image.Image) -> bytes:
    """SHA-256 of an RGB picture's size and pixels."""
    return hashlib.sha256(repr(picture.size).encode() + picture.tobytes()).digest()


@contextlib.contextmanager
def _decodable(content: bytes | Path) -> Iterator[IO[bytes]]:
    """The opened picture; whatever its decoder raises meanwhile is told as Undecodable."""
    with _open(content) as stream, warnings.catch_warnings():
        # What is too large is said by PIXELS, and damaged EXIF data spoil no picture.
        warnings.simplefilter("ignore")
        try:
            yield stream
        except Undecodable:
            raise
        except UnidentifiedImageError as error:
            raise Undecodable(_unknown(stream)) from error
        except Exception as error:  # decoders raise whatever a damaged file leads them to
            raise Undecodable(_reason(error)) from error


def kind(content: bytes | Path) -> tuple[str, tuple[int, int]]:
    """Format and mode of a picture that can be decoded, as in `JPEG RGB`; its size as stored."""
    with _open(content) as stream, Image.open(stream, formats=_formats()) as image:
        return f"{image.format} {image.mode}", image.size


def _open(content: bytes | Path) -> IO[bytes]:
    size = len(content) if isinstance(content, bytes) else _size(content)
    if size == 0:
        raise Undecodable("empty: 0 bytes")
    if size > FILE_BYTES:
        raise Undecodable(f"{size:,} bytes; at most {FILE_BYTES:,} are read")
    try:
        return io.BytesIO(content) if isinstance(content, bytes) else content.open("rb")
    except OSError as error:
        raise Undecodable(f"cannot be read: {error.strerror}") from error


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise Undecodable(f"cannot be read: {error.strerror}") from error


def _load(stream: IO[bytes], smallest: int) -> tuple[Image.Image, bool]:
    """The upright picture, and whether it is also the one of _LEAST."""
    image: Image.Image = Image.open(stream, formats=_formats())
    reductions = {_reduction(image, least) for least in (smallest, _LEAST)}
    if smallest:
        image.draft(None, (2 * smallest, 2 * smallest))
    width, height = image.size
    if width * height > PIXELS:
        raise TooLarge(f"{width} x {height} pixels; at most {PIXELS:,} are decoded")
    image.load()
    with contextlib.suppress(Exception):  # an orientation nobody can read is none
        ImageOps.exif_transpose(image, in_place=True)
    return image, len(reductions) == 1


def _reduction(image: Image.Image, smallest: int) -> int:
    """By how much Pillow reduces a JPEG that is to be decoded for squares of `smallest` pixels."""
    if not smallest or not isinstance(image, JpegImagePlugin.JpegImageFile):
        return 1
    most = min(image.size) // (2 * smallest)
    return next(scale for scale in (8, 4, 2, 1) if most >= scale or scale == 1)


def _to_rgb(image: Image.Image, background: Color) -> Image.Image:
    key = image.info.get("transparency")
    if image.mode in _DEEP_GRAY:
        return _deep_to_rgb(image, key, background)
    if not image.has_transparency_data:
        return image.convert("RGB")
    if isinstance(key, tuple) and max(key) > 255:  # of 16 bits, as the picture had before
        image.info["transparency"] = tuple(value >> 8 for value in key)
    canvas = Image.new("RGBA", image.size, (*background, 255))
    canvas.alpha_composite(image.convert("RGBA"))
    return canvas.convert("RGB")


def _deep_to_rgb(image: Image.Image, key: object, background: Color) -> Image.Image:
    """Gray of more than 8 bits; `key` is the value that is transparent, where there is one."""
    values = np.asarray(image)
    gray = to_8_bits(values)
    if getattr(image, "tag_v2", {}).get(_PHOTOMETRIC) == 0:  # white is; Pillow turns 8 bits alone
        gray = 255 - gray
    picture = Image.fromarray(gray).convert("RGB")
    if isinstance(key, int):
        picture.paste(background, mask=Image.fromarray((values == key).astype(np.uint8) * 255))
    return picture


def to_8_bits(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Gray values of 16 bits, 32 bits or floating point to 0..255, scaled and never clipped.

    16 bits scale by 257. Wider kinds do not say where white is: it is 1 for fractions, or the
    first of 255 and 65,535 that no value exceeds. Raises Undecodable beyond, and for fractions
    that pass 1 by so little that white may be meant, which would be black on a scale of 255.
    """
    if values.dtype.kind == "u" and values.dtype.itemsize == 2:  # in either order of bytes
        return ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)
    lowest, highest = float(values.min()), float(values.max())
    fractions = np.issubdtype(values.dtype, np.floating)
    white = next((w for w in ((1,) if fractions else ()) + (255, 65_535) if highest <= w), None)
    if white is None or not lowest >= 0:
        raise Undecodable(f"gray values from {lowest:g} to {highest:g}; 0 to 65,535 are understood")
    if fractions and 1 < highest <= _OVERSHOOT:
        raise Undecodable(f"gray values from {lowest:g} to {highest:g}: is 1 white, or is 255?")
    return np.rint(values * (255 / white)).astype(np.uint8)


def _unknown(stream: IO[bytes]) -> str:
    """What a file is that no decoder knows, as far as its first or last bytes tell."""
    stream.seek(0)
    head = stream.read(1024)
    stream.seek(-min(len(head), len(_TGA_END)), io.SEEK_END)
    found = [name for name, start in _FOREIGN.items() if start.match(head)]
    found += ["TGA"] if stream.read() == _TGA_END else []
    named = f", but {found[0]}: convert it to JPEG or PNG" if found else ""
    return "not a picture in a format that is read" + named


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())[:200]
    if isinstance(error, Image.DecompressionBombError):
        return f"too many pixels; at most {PIXELS:,} are decoded"
    if isinstance(error, MemoryError):
        return "needs more memory than there is"
    if "truncated" in text.lower():
        return f"truncated: {text}"
    return f"damaged: {text or type(error).__name__}"
