"""File names that come from users: how to store, show and compare them, and what they reveal.

A name is text with `/` between its parts. It is the file system's bytes decoded as UTF-8, where
invalid bytes become surrogates. So a name is the same in every locale, and opens any file.
"""

from __future__ import annotations

import unicodedata

from ddpm_core.text import visible

_IMAGES = (
    "jpg jpeg jpe jfif jif png apng webp bmp dib gif tif tiff avif jp2 j2k ppm pgm pbm pnm ico "
    "mpo heic heif psd svg tga raw cr2 nef arw dng jxl exr"
)
IMAGE_SUFFIXES = frozenset(_IMAGES.split())
# Kinds of files with many images. If a folder has several kinds, the first has the images: beside
# its archives, img2dataset writes parquet files with their captions.
SHARDS = {
    "archive": (".zip", ".tar", ".tgz", ".tar.gz", ".tbz2", ".tar.bz2", ".txz", ".tar.xz"),
    "parquet file": (".parquet",),
    "array file": (".npz", ".npy"),
}
_CLUTTER = frozenset(
    ["__macosx", "@eadir", "$recycle.bin", "lost+found", "thumbs.db", "ehthumbs.db", "desktop.ini"]
)
_MAGIC = (
    b"\xff\xd8\xff",
    b"\x89PNG\r\n\x1a\n",
    b"GIF87a",
    b"GIF89a",
    b"II*\x00",
    b"MM\x00*",
    b"\x00\x00\x00\x0cjP  \r\n",
)
HEAD = 16  # bytes at the start of a file that `starts_like_image` needs


def from_bytes(raw: bytes) -> str:
    """Return the name for the bytes of a file system or archive."""
    return raw.decode("utf-8", "surrogateescape")


def to_bytes(name: str) -> bytes:
    """Return the bytes of a name; the inverse of `from_bytes`."""
    return name.encode("utf-8", "surrogateescape")


def shown(name: str) -> str:
    """Return a name as valid text: composed (NFC), with invalid UTF-8 bytes as `\\xNN`."""
    return composed(to_bytes(name).decode("utf-8", "backslashreplace"))


def composed(name: str) -> str:
    """Return a name in NFC, so that two spellings compare equal. macOS stores decomposed names."""
    return unicodedata.normalize("NFC", name)


def one_line(text: str) -> str:
    """Return text that contains names on one line, for messages.

    Control characters, including line breaks, become `\\n` or `\\x1b`, so that a file name cannot
    forge a line of a log.
    """
    return visible(shown(text))


def suffix(name: str) -> str:
    """Return the extension in lower case without its dot, or an empty string."""
    _, dot, end = name.rpartition("/")[2].rpartition(".")
    return end.lower() if dot else ""


def stem(name: str) -> str:
    """Return the name with its folders but without its extension."""
    end = suffix(name)
    return name[: -len(end) - 1] if end else name


def shard_kind(name: str) -> str:
    """Return the kind in SHARDS that the extension of a name means, or an empty string."""
    lower = name.lower()
    return next((kind for kind, ends in SHARDS.items() if lower.endswith(ends)), "")


def is_clutter(name: str) -> bool:
    """Return whether a path is hidden, or one of the files that operating systems leave behind."""
    return bool(clutter_of(name))


def clutter_of(name: str) -> str:
    """Return the outermost hidden file or folder on a path, or an empty string."""
    parts = name.split("/")
    for depth, part in enumerate(parts, 1):
        if part.startswith(".") or part.lower() in _CLUTTER:
            return "/".join(parts[:depth])
    return ""


def starts_like_image(head: bytes) -> bool:
    """Return whether the first HEAD bytes of a file are those of an image format."""
    if head.startswith(_MAGIC):
        return True
    if head[:4] == b"RIFF":
        return head[8:12] == b"WEBP"
    if head[4:8] == b"ftyp":
        return head[8:12] in (b"avif", b"avis", b"heic", b"heix", b"mif1")
    # Many texts start with "BM". A bitmap also has four reserved bytes, which are zero.
    return head[:2] == b"BM" and head[6:10] == bytes(4)


def starts_like_pickle(head: bytes) -> bool:
    """Return whether the first bytes of a file are those of a Python pickle."""
    return head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")


def leaves_root(name: str) -> bool:
    """Return whether a path in an archive points outside the folder it would be unpacked in."""
    parts = name.split("/")
    return name.startswith("/") or ".." in parts or (len(parts[0]) == 2 and parts[0][1] == ":")
