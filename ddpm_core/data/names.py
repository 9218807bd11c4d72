"""Names of files that strangers made, and what a name says about its file.

A name is text with `/` between its parts: the file system's bytes as UTF-8, bytes that are none
kept as surrogates. So a name is the same in every locale, and any file can be opened by it.
"""

from __future__ import annotations

import unicodedata

from ddpm_core.text import visible

_PICTURES = (
    "jpg jpeg jpe jfif jif png apng webp bmp dib gif tif tiff avif jp2 j2k ppm pgm pbm pnm ico "
    "mpo heic heif psd svg tga raw cr2 nef arw dng jxl exr"
)
PICTURE_SUFFIXES = frozenset(_PICTURES.split())
_ARCHIVES = (".zip", ".tar", ".tgz", ".tar.gz", ".tbz2", ".tar.bz2", ".txz", ".tar.xz")
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
HEAD = 16  # bytes of a file that `begins_like_a_picture` wants to see


def from_bytes(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def to_bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def shown(name: str) -> str:
    """A name as text that any file can hold: composed (NFC), bytes that are no UTF-8 as `\\xNN`."""
    return composed(to_bytes(name).decode("utf-8", "backslashreplace"))


def composed(name: str) -> str:
    """The name under which two spellings of it are one (NFC): macOS takes letters apart."""
    return unicodedata.normalize("NFC", name)


def one_line(text: str) -> str:
    """Text with names in it as `shown` gives them, and control characters, among them new lines, as
    `\\n` or `\\x1b`: nobody forges a line with one."""
    return visible(shown(text))


def suffix(name: str) -> str:
    """The extension in lower case, without its dot; empty where there is none."""
    _, dot, end = name.rpartition("/")[2].rpartition(".")
    return end.lower() if dot else ""


def stem(name: str) -> str:
    """The name without its extension, folders kept."""
    end = suffix(name)
    return name[: -len(end) - 1] if end else name


def is_archive(name: str) -> bool:
    return name.lower().endswith(_ARCHIVES)


def is_clutter(name: str) -> bool:
    """Hidden files and folders, and what operating systems leave behind: no data of anybody's."""
    return bool(clutter_of(name))


def clutter_of(name: str) -> str:
    """The outermost hidden file or folder on the way to a file; empty where there is none."""
    parts = name.split("/")
    for depth, part in enumerate(parts, 1):
        if part.startswith(".") or part.lower() in _CLUTTER:
            return "/".join(parts[:depth])
    return ""


def begins_like_a_picture(head: bytes) -> bool:
    """Whether the first HEAD bytes of a file are those of a picture format."""
    if head.startswith(_MAGIC):
        return True
    if head[:4] == b"RIFF":
        return head[8:12] == b"WEBP"
    if head[4:8] == b"ftyp":
        return head[8:12] in (b"avif", b"avis", b"heic", b"heix", b"mif1")
    # "BM" alone begins many a text; the four reserved bytes of a bitmap are zero.
    return head[:2] == b"BM" and head[6:10] == bytes(4)


def begins_like_a_pickle(head: bytes) -> bool:
    return head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")


def leaves_root(name: str) -> bool:
    """Whether a path of an archive points out of the folder it is unpacked in."""
    parts = name.split("/")
    return name.startswith("/") or ".." in parts or (len(parts[0]) == 2 and parts[0][1] == ":")
