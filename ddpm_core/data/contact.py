"""The contact sheet: some images of every class, to look at before hours of training.

Drawn with Pillow alone, because prepare must not import torch. Titles are class names in any
script. Pillow draws every letter that a font lacks as the same box, so a system font is used for
titles that the default font cannot draw, and escapes such as `\\u732b` if there is none.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from ddpm_core.data.names import one_line

Pixels = NDArray[np.uint8]
Indices = NDArray[np.int64]
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

COLUMNS = 12
MAX_CLASSES = 60
MAX_TILE = 128  # pixels a side: the largest sheet is 1,562 x 9,142
_MIN_TILE, _MIN_WIDTH = 48, 480  # pixels
_TITLE, _GAP = 22, 2
_PAPER, _INK = (255, 255, 255), (0, 0, 0)
_FONT_SIZE = 15  # pixels
# Where operating systems store fonts. Those that begin with ~ belong to the user.
FONT_FOLDERS = (
    "/usr/share/fonts",
    "/usr/local/share/fonts",
    "~/.local/share/fonts",
    "~/.fonts",
    "/System/Library/Fonts",
    "/Library/Fonts",
    "~/Library/Fonts",
)
_FONT_SUFFIXES = {".ttf", ".otf", ".ttc"}
_DEJAVU = "mpl-data/fonts/ttf/DejaVuSans.ttf"
_NO_LETTER = "\U0010fffd"  # a code point that no font draws


def choose(labels: Indices) -> list[Indices]:
    """Return indices of images for each of the first classes, spread evenly over the class."""
    chosen = []
    for label in np.unique(labels)[:MAX_CLASSES]:
        members = np.flatnonzero(labels == label)
        spread = np.linspace(0, len(members) - 1, min(COLUMNS, len(members)))
        chosen.append(members[np.unique(spread.round().astype(int))])
    return chosen


def shrink(pixels: Pixels) -> Pixels:
    """Scale images (n, S, S, C) to tiles (n, s, s, C) with s at most MAX_TILE."""
    if pixels.shape[1] <= MAX_TILE:
        return pixels
    tiles = [_image(tile).resize((MAX_TILE, MAX_TILE), Image.Resampling.LANCZOS) for tile in pixels]
    return np.stack([np.asarray(tile).reshape(MAX_TILE, MAX_TILE, -1) for tile in tiles])


def draw_sheet(rows: Sequence[tuple[str, Pixels]], footer: str = "") -> Image.Image:
    """Draw a row for each title and its tiles (n, s, s, C), as RGB.

    Small tiles are enlarged by an integer factor.
    """
    side = rows[0][1].shape[1] * math.ceil(_MIN_TILE / rows[0][1].shape[1])
    widest = max(len(tiles) for _, tiles in rows)
    size = (
        max(_MIN_WIDTH, widest * (side + _GAP) + _GAP),
        len(rows) * (side + _TITLE + _GAP) + (_TITLE if footer else 0),
    )
    canvas, fonts = Image.new("RGB", size, _PAPER), find_fonts("".join(t for t, _ in rows))
    draw, top = ImageDraw.Draw(canvas), 0
    for title, tiles in rows:
        text, font = drawable(title, fonts)
        draw.text((_GAP, top + 2), text, fill=_INK, font=font)
        for column, tile in enumerate(tiles):
            large = _image(tile).resize((side, side), Image.Resampling.NEAREST)
            canvas.paste(large, (_GAP + column * (side + _GAP), top + _TITLE))
        top += side + _TITLE + _GAP
    text, font = drawable(footer, fonts)
    draw.text((_GAP, top + 2), text, fill=_INK, font=font)
    return canvas


def _image(tile: Pixels) -> Image.Image:
    return Image.fromarray(tile[:, :, 0] if tile.shape[2] == 1 else tile)


def find_fonts(text: str) -> list[Font]:
    """Return the default font, and the system font with most of the letters that it lacks."""
    default = default_font()
    lacking = "".join(missing_letters(one_line(text), default))
    best, fewest = None, len(lacking)
    for font in _system_fonts() if lacking else ():
        if (left := len(missing_letters(lacking, font))) < fewest:
            best, fewest = font, left
        if not fewest:
            break
    return [default, best] if best else [default]


def drawable(text: str, fonts: list[Font]) -> tuple[str, Font]:
    """Return the text on one line and a font that can draw it.

    If no font has all letters, returns the first font, and the text with its missing letters
    escaped.
    """
    line = one_line(text)
    for font in fonts:
        if not missing_letters(line, font):
            return line, font
    return escape_missing(text, fonts[0]), fonts[0]


def default_font() -> Font:
    """Return DejaVu Sans from matplotlib, which covers most alphabets, or Pillow's ASCII font."""
    package = importlib.util.find_spec("matplotlib")
    path = Path(package.origin or "").parent / _DEJAVU if package else None
    if path is not None and path.is_file():
        with suppress(OSError, ImportError):
            return ImageFont.truetype(str(path), _FONT_SIZE)
    return ImageFont.load_default(_FONT_SIZE)


def escape_missing(text: str, font: Font) -> str:
    """Return the text on one line, with letters that the font lacks as `\\u732b`."""
    lacking = missing_letters(text, font)
    return "".join(
        c.encode("unicode_escape").decode() if c in lacking else c for c in one_line(text)
    )


def missing_letters(text: str, font: Font) -> set[str]:
    """Return the letters beyond ASCII that a font lacks."""
    box = _drawn(_NO_LETTER, font)
    return {c for c in set(text) if not c.isascii() and _drawn(c, font) == box}


def _system_fonts() -> Iterator[Font]:
    for folder in FONT_FOLDERS:
        for path in sorted(Path(folder).expanduser().rglob("*")):
            # LastResort of macOS has a box for every letter.
            if path.suffix.lower() in _FONT_SUFFIXES and path.stem != "LastResort":
                with suppress(OSError, ImportError):
                    yield ImageFont.truetype(str(path), _FONT_SIZE)


def _drawn(letter: str, font: Font) -> bytes:
    """Return the size and pixels of a letter."""
    try:
        mask = font.getmask(letter)
    except UnicodeEncodeError:  # Pillow's bitmap font, without FreeType
        return b""
    return repr(mask.size).encode() + bytes(mask)
