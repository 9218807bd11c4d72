"""What a source of pictures is, and the listing of what it holds."""

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
from ddpm_core.errors import UserError

TEXT_BYTES = 2**20  # a caption or a list of files; larger texts are not read
CAPTION_SUFFIXES = ("txt", "caption")  # of a text beside its image; the first counts of two
CLASS_SUFFIX = "cls"  # of a text that is the class of the image beside it, as in WebDataset
# Files of captions; of those that name a picture the last one counts.
CAPTIONS = ("metadata.csv", "metadata.jsonl", "captions.jsonl")
CAPTIONS_BYTES = 2**30
FILE_BYTES = 2**29  # a picture; larger files are not read
_BATCH = re.compile(r"(^|/)(data_batch_\d|test_batch)\.bin$")


@dataclass(frozen=True, slots=True)
class Entry:
    """One picture of a source. `ref` is where the source finds it again."""

    name: str
    size: int
    ref: int = 0


@dataclass(frozen=True, slots=True)
class Rejection:
    """A picture that can't be used, and why."""

    name: str
    reason: str


# Bytes are an encoded picture, a path is one that its decoder opens, pixels are uint8 (H, W) or
# (H, W, 3).
Payload = bytes | Path | NDArray[np.uint8] | Rejection


@dataclass(slots=True)
class Listing:
    """What a source holds: pictures sorted by the bytes of their names, and the rest."""

    pictures: list[Entry] = field(default_factory=list)
    texts: dict[str, bytes] = field(default_factory=dict)
    rejected: list[Rejection] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)
    folders: set[str] = field(default_factory=set)
    batches: list[Entry] = field(default_factory=list)  # named as CIFAR-10's binary files
    archives: list[Entry] = field(default_factory=list)
    pickles: list[str] = field(default_factory=list)  # names of pickled files
    notes: list[str] = field(default_factory=list)
    hidden: set[str] = field(default_factory=set)  # files and folders that were passed over


class Source(Protocol):
    """Pictures from somewhere. `facts` say from where, for the manifest and every score."""

    facts: dict[str, Any]

    def listing(self) -> Listing: ...

    def read(self, entries: Sequence[Entry]) -> Iterator[tuple[int, Payload]]:
        """Positions in `entries` and what lies there, in whatever order the source likes."""


class Unreadable(Exception):
    """Why a file can't be read, though the files beside it can."""


@dataclass(frozen=True, slots=True)
class Found:
    """A file met while walking through a source.

    `head(n)` reads its first n bytes, once. Raises Unreadable.
    """

    name: str
    size: int
    ref: int
    head: Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class Folder:
    name: str


@dataclass(frozen=True, slots=True)
class Note:
    """Something to tell that is no picture's."""

    text: str


Item = Found | Folder | Rejection | Note


def make_listing(found: Iterable[Item]) -> Listing:
    """Sort out what a source holds; where a name stands twice the later file counts."""
    listing = Listing()
    pictures: dict[str, Entry] = {}
    for item in found:
        if isinstance(item, Rejection):
            listing.rejected.append(item)
        elif isinstance(item, Note):
            listing.notes.append(item.text)
        elif names.is_clutter(item.name):
            listing.hidden.add(names.clutter_of(item.name))
        elif isinstance(item, Folder):
            listing.folders.add(item.name)
        elif _is_picture(item, listing):
            pictures[item.name] = Entry(item.name, item.size, item.ref)
        elif item.name not in listing.texts:
            entry = Entry(item.name, item.size, item.ref)
            listing.ignored[names.suffix(item.name)[:12]] += 1
            listing.batches += [entry] if _BATCH.search(item.name) else []
            listing.archives += [entry] if names.is_archive(item.name) else []
    listing.pictures = sorted(pictures.values(), key=lambda entry: names.to_bytes(entry.name))
    listing.rejected.sort(key=lambda item: names.to_bytes(item.name))
    return listing


def _is_picture(item: Found, listing: Listing) -> bool:
    """By its extension or its first bytes; the listing gets texts and names of pickles on the way.

    Raises UserError for a text that can't be read: its captions would be missed by nobody.
    """
    suffix = names.suffix(item.name)
    if suffix in names.PICTURE_SUFFIXES:
        return True
    is_captions = item.name.rpartition("/")[2] in CAPTIONS
    limit = CAPTIONS_BYTES if is_captions else TEXT_BYTES
    wants_text = (is_captions or suffix in (*CAPTION_SUFFIXES, CLASS_SUFFIX)) and item.size <= limit
    try:
        content = item.head(limit if wants_text else names.HEAD)
    except Unreadable as error:
        if not wants_text:
            return False
        raise UserError(
            f"The text {names.one_line(item.name)}, which may hold captions, cannot be read: "
            f"{error}. Mend it, or take it out of the source."
        ) from error
    if names.begins_like_a_picture(content[: names.HEAD]):
        return True
    if wants_text:
        listing.texts[item.name] = content
    elif names.begins_like_a_pickle(content):
        listing.pickles.append(item.name)
    return False
