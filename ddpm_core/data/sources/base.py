"""The interface of a data source, and the listing of its content."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ddpm_core.data import names
from ddpm_core.data.sources.sidecars import FIND, Columns, Sidecars, limit_of
from ddpm_core.errors import UserError

TEXT_BYTES = 2**20  # of a caption or a list of files; larger texts are ignored
CAPTION_SUFFIXES = ("txt", "caption")  # of a text beside its image; the first has priority
CLASS_SUFFIX = "cls"  # of a text with the class of the image beside it, as in WebDataset
SIDECAR_SUFFIX = "json"  # of an object with class and caption of the image beside it
# Files with many captions. If several have a caption for an image, the last file wins.
CAPTION_LISTS = ("metadata.csv", "metadata.jsonl", "captions.jsonl")
CAPTION_LIST_BYTES = 2**30
FILE_BYTES = 2**29  # of an image; larger files are rejected
_CIFAR_BATCH = re.compile(r"(^|/)(data_batch_\d|test_batch)\.bin$")


@dataclass(frozen=True, slots=True)
class Entry:
    """One image of a source. The source uses `ref` to find it again.

    `class_name` and `caption` are those that a table, an array or a .json file has for the image.
    """

    name: str
    size: int
    ref: int = 0
    class_name: str | None = None
    caption: str | None = None


@dataclass(frozen=True, slots=True)
class Rejection:
    """An image that cannot be used, and the reason."""

    name: str
    reason: str


# Bytes are an encoded image, a path is a file with one, and an array is its pixels: uint8 (H, W) or
# (H, W, 3).
Payload = bytes | Path | NDArray[np.uint8] | Rejection


@dataclass(slots=True)
class Listing:
    """The content of a source: images sorted by the bytes of their names, and all other files."""

    images: list[Entry] = field(default_factory=list)
    texts: dict[str, bytes] = field(default_factory=dict)
    rejected: list[Rejection] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)  # number of files by extension
    folders: set[str] = field(default_factory=set)
    batches: list[Entry] = field(default_factory=list)  # named like CIFAR-10's binary files
    shards: list[Entry] = field(default_factory=list)  # files with many images each, by their name
    pickles: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # messages for the user
    hidden: set[str] = field(default_factory=set)  # files and folders that were skipped
    columns: set[str] = field(default_factory=set)  # of parquet files
    unlabelled: bool = False  # folders are not classes


def size_problem(size: int) -> str:
    """Return why a file of `size` bytes is not read, or an empty string."""
    return f"{size:,} bytes; at most {FILE_BYTES:,} are read" if size > FILE_BYTES else ""


class Source(Protocol):
    """Images from one place. `facts` identify it in the manifest and beside every score."""

    facts: dict[str, Any]

    def listing(self) -> Listing:
        """Return the content of the source."""

    def read(self, entries: Sequence[Entry]) -> Iterator[tuple[int, Payload]]:
        """Yield the position in `entries` and the content of each, in any order."""


class Unreadable(Exception):
    """The reason why one file cannot be read; other files of the source still can."""


@dataclass(frozen=True, slots=True)
class Found:
    """A file found while listing a source.

    `head(n)` returns its first n bytes; it may be called once, and raises Unreadable.
    """

    name: str
    size: int
    ref: int
    head: Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder found while listing a source."""

    name: str


@dataclass(frozen=True, slots=True)
class Note:
    """A message for the user about the source as a whole."""

    text: str


Item = Found | Folder | Rejection | Note


def make_listing(found: Iterable[Item], columns: Columns = FIND) -> Listing:
    """Sort the items of a source by kind. If a name appears twice, the later file wins."""
    listing = Listing()
    images: dict[str, Entry] = {}
    sidecars = Sidecars(columns)
    for item in found:
        if isinstance(item, Rejection):
            listing.rejected.append(item)
        elif isinstance(item, Note):
            listing.notes.append(item.text)
        elif names.is_clutter(item.name):
            listing.hidden.add(names.clutter_of(item.name))
        elif isinstance(item, Folder):
            listing.folders.add(item.name)
        elif _is_image(item, listing, sidecars):
            images[item.name] = Entry(item.name, item.size, item.ref)
        elif item.name not in listing.texts and item.name not in sidecars.used:
            entry = Entry(item.name, item.size, item.ref)
            listing.ignored[names.suffix(item.name)[:12]] += 1
            listing.batches += [entry] if _CIFAR_BATCH.search(item.name) else []
            listing.shards += [entry] if names.shard_kind(item.name) else []
    listing.images = sorted(images.values(), key=lambda entry: names.to_bytes(entry.name))
    listing.unlabelled = sidecars.unlabelled
    if sidecars.used:
        listing.images = [
            Entry(entry.name, entry.size, entry.ref, *sidecars.of(entry.name))
            for entry in listing.images
        ]
    listing.rejected.sort(key=lambda item: names.to_bytes(item.name))
    return listing


def _is_image(item: Found, listing: Listing, sidecars: Sidecars) -> bool:
    """Return whether the extension or the first bytes of a file are those of an image.

    Also adds texts and pickles to `listing`, and .json files to `sidecars`, because `item.head` can
    be called only once.

    Raises:
        UserError: a text cannot be read. Ignoring it would silently drop its captions.
    """
    suffix = names.suffix(item.name)
    if suffix in names.IMAGE_SUFFIXES:
        return True
    limit = _text_limit(item.name, suffix)
    is_text = item.size <= limit
    try:
        content = item.head(limit if is_text else names.HEAD)
    except Unreadable as error:
        if not is_text:
            return False
        raise UserError(
            f"The text {names.one_line(item.name)}, which may contain captions, cannot be read: "
            f"{error}. Repair it or remove it from the source."
        ) from error
    if names.starts_like_image(content[: names.HEAD]):
        return True
    if is_text and suffix == SIDECAR_SUFFIX:
        sidecars.read(item.name, content)
    elif is_text:
        listing.texts[item.name] = content
    elif names.starts_like_pickle(content):
        listing.pickles.append(item.name)
    return False


def _text_limit(name: str, suffix: str) -> int:
    """Return the most bytes of a file that is read as a text; -1 if it is another kind of file."""
    if name.rpartition("/")[2] in CAPTION_LISTS:
        return CAPTION_LIST_BYTES
    if suffix == SIDECAR_SUFFIX:
        return limit_of(name)
    return TEXT_BYTES if suffix in (*CAPTION_SUFFIXES, CLASS_SUFFIX) else -1
