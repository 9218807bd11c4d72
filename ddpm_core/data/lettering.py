"""Fonts for titles in any script: the usual one, one of the system's for what it lacks, or escapes.

Pillow draws every letter that a font lacks alike, as a box.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from PIL import ImageFont

from ddpm_core.data.names import one_line

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

SIZE = 15  # pixels
# Where systems keep fonts; what begins with ~ is the user's own.
FOLDERS = (
    "/usr/share/fonts",
    "/usr/local/share/fonts",
    "~/.local/share/fonts",
    "~/.fonts",
    "/System/Library/Fonts",
    "/Library/Fonts",
    "~/Library/Fonts",
)
_KINDS = {".ttf", ".otf", ".ttc"}
_DEJAVU = "mpl-data/fonts/ttf/DejaVuSans.ttf"
_NO_LETTER = "\U0010fffd"


def fonts_for(text: str) -> list[Font]:
    """The usual font, and the one of the system that has the most of what that lacks, if any."""
    usual = readable_font()
    lacking = "".join(missing(one_line(text), usual))
    best, fewest = None, len(lacking)
    for font in _fonts_of_the_system() if lacking else ():
        if (left := len(missing(lacking, font))) < fewest:
            best, fewest = font, left
        if not fewest:
            break
    return [usual, best] if best else [usual]


def lettered(text: str, fonts: list[Font]) -> tuple[str, Font]:
    """The text on one line and the first font that has all of it; else the usual one, and what
    that lacks written out as `\\u732b`."""
    line = one_line(text)
    for font in fonts:
        if not missing(line, font):
            return line, font
    return legible(text, fonts[0]), fonts[0]


def readable_font() -> Font:
    """DejaVu Sans, which has the letters of most alphabets, where matplotlib brings it; else the
    font of Pillow, which has those of ASCII."""
    package = importlib.util.find_spec("matplotlib")
    path = Path(package.origin or "").parent / _DEJAVU if package else None
    if path is not None and path.is_file():
        with suppress(OSError, ImportError):
            return ImageFont.truetype(str(path), SIZE)
    return ImageFont.load_default(SIZE)


def legible(text: str, font: Font) -> str:
    """The text on one line, letters that the font lacks as `\\u732b`."""
    lacking = missing(text, font)
    return "".join(
        c.encode("unicode_escape").decode() if c in lacking else c for c in one_line(text)
    )


def missing(text: str, font: Font) -> set[str]:
    """The letters beyond ASCII that a font lacks."""
    absent = _drawn(_NO_LETTER, font)
    return {c for c in set(text) if not c.isascii() and _drawn(c, font) == absent}


def _fonts_of_the_system() -> Iterator[Font]:
    for folder in FOLDERS:
        for path in sorted(Path(folder).expanduser().rglob("*")):
            # LastResort, of macOS, has a box for every letter.
            if path.suffix.lower() in _KINDS and path.stem != "LastResort":
                with suppress(OSError, ImportError):
                    yield ImageFont.truetype(str(path), SIZE)


def _drawn(letter: str, font: Font) -> bytes:
    try:
        mask = font.getmask(letter)
    except UnicodeEncodeError:  # a font of Pillow without FreeType
        return b""
    return repr(mask.size).encode() + bytes(mask)
