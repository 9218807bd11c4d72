"""Write the files of data/: arrays of both splits, their fingerprints, and the contact sheet."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpm_core.data import contact, names
from ddpm_core.data.captions import encode, is_cut
from ddpm_core.data.dataset import PREFIX
from ddpm_core.data.split import count_duplicates, hold_out
from ddpm_core.storage.workspace import CONTACT
from ddpm_core.text import counted

PART_BYTES = 2**32  # of each .npy file
_BLOCK_BYTES = 2**23  # of images in memory at once

Pixels = NDArray[np.uint8]
Indices = NDArray[np.int64]


class Scratch:
    """Squares in the order of their names, on disk until all are decoded and the split is known.

    The file is unlinked, so nothing is left of it however the process ends. It is read and written
    by position: with a memory map, a full disk would kill the process instead of raising OSError.
    """

    def __init__(self, folder: Path, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.row_bytes = int(np.prod(shape))
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115, closed by close()

    def write(self, position: int, pixels: Pixels) -> None:
        """Store one square (S, S, C)."""
        data, offset = memoryview(pixels.tobytes()), position * self.row_bytes
        while data:
            written = os.pwrite(self._file.fileno(), data, offset)
            data, offset = data[written:], offset + written

    def read(self, positions: Indices) -> Iterator[Pixels]:
        """Yield blocks (k, S, S, C) in the order of `positions`; at least one, perhaps empty."""
        step = max(1, _BLOCK_BYTES // self.row_bytes)
        for start in range(0, max(1, len(positions)), step):
            chosen = positions[start : start + step]
            block = np.empty((len(chosen), *self.shape), np.uint8)
            for row, position in zip(block, chosen.tolist(), strict=True):
                data = os.pread(self._file.fileno(), self.row_bytes, position * self.row_bytes)
                row[:] = np.frombuffer(data, np.uint8).reshape(self.shape)
            yield block

    def close(self) -> None:
        """Close and thereby delete the file."""
        self._file.close()


@dataclass(frozen=True, slots=True)
class UsableImages:
    """The usable images in the order of their names; `positions` are those in the Scratch."""

    positions: Indices
    digests: list[bytes]
    classes: list[str | None]
    held_out: list[bool | None]
    captions: list[str] | None
    gray: bool


def pack(
    folder: Path,
    scratch: Scratch,
    images: UsableImages,
    fraction: float,
    channels: int,
) -> tuple[dict[str, Any], list[str]]:
    """Write arrays and contact sheet. Return facts for the manifest, and messages for the user.

    `fraction` of the images is held out, unless the source defines the splits.
    """
    held = hold_out(images.digests, images.classes, images.held_out, fraction)
    classes = class_names(images.classes, held)
    untrained = sorted(set(images.classes) - {None} - set(classes), key=str)
    notes = [
        f"The class {name} has no images for training. Its held-out images are left out."
        for name in untrained
    ]
    # Images of a class without training images are in no split. Without classes every label is 0.
    numbers = {name: number for number, name in enumerate(classes)}
    known = np.array([not classes or name in numbers for name in images.classes], dtype=bool)
    labels = np.array([numbers.get(str(name), 0) for name in images.classes], dtype=np.int64)
    writer = _Writer(folder, scratch, images, labels, classes, channels)
    writer.write_split("train", np.flatnonzero(~held & known))
    writer.write_split("holdout", np.flatnonzero(held & known))
    facts = {
        "image_size": scratch.shape[0],
        "channels": channels,
        "classes": classes,
        "duplicates": count_duplicates(images.digests, held),
        **writer.facts,
    }
    return facts, notes + _notes(facts, images)


def class_names(classes: Sequence[str | None], held: NDArray[np.bool_]) -> list[str]:
    """Return the classes with images for training, sorted by the bytes of their names."""
    seen = {name for name, out in zip(classes, held, strict=True) if name is not None and not out}
    return sorted(seen, key=names.to_bytes)


def _notes(facts: dict[str, Any], images: UsableImages) -> list[str]:
    """Return messages about duplicates, an empty held-out split, and truncated captions."""
    notes = []
    duplicates = facts["duplicates"]
    if duplicates["copies"]:
        notes.append(f"{duplicates['copies']:,} images are exact copies of others. They are kept.")
    if duplicates["in_both_splits"]:
        notes.append(
            f"{duplicates['in_both_splits']:,} held-out images are also among the training images, "
            "as the folders of the source define. Evaluation leaves them out."
        )
    if not facts["holdout_count"]:
        notes.append(
            "No images are held out, so evaluation has no reference floor and no memorisation "
            "check. To hold some out, set prepare.holdout above 0."
        )
    cut = sum(is_cut(text) for text in images.captions or ())
    if cut:
        notes.append(f"Cut {counted(cut, 'caption')} to 64 bytes.")
    return notes


class _Writer:
    """Writes one split after the other, and collects the facts for the manifest."""

    def __init__(
        self,
        folder: Path,
        scratch: Scratch,
        images: UsableImages,
        labels: Indices,
        classes: list[str],
        channels: int,
    ) -> None:
        self.folder, self.scratch, self.images = folder, scratch, images
        self.labels, self.classes, self.channels = labels, classes, channels
        self.facts: dict[str, Any] = {"arrays": {}}

    def write_split(self, name: str, chosen: Indices) -> None:
        """Write images, labels and captions of a split; `chosen` are ascending indices."""
        prefix, size = PREFIX[name], self.scratch.shape[0]
        shape = (len(chosen), size, size, self.channels)
        digest = new_digest(shape, self.classes)
        blocks = self.scratch.read(self.images.positions[chosen])
        # If gray images were stored with three channels, the channels are equal: keep the first.
        narrowed = (block[..., : self.channels] for block in blocks)
        self._write(prefix + "images", narrowed, shape, digest)
        labels = self.labels[chosen]
        self._write(prefix + "labels", [labels], labels.shape, digest)
        if self.images.captions is not None:
            rows = encode([self.images.captions[index] for index in chosen])
            self._write(prefix + "captions", [rows], rows.shape, digest)
        counts = Counter(labels.tolist()) if self.classes else Counter[int]()
        self.facts[prefix + "count"] = len(chosen)
        self.facts[prefix + "class_counts"] = [counts[n] for n in range(len(self.classes))]
        self.facts[prefix + "fingerprint"] = fingerprint(digest)
        if name == "train":
            self._write_contact_sheet(chosen)

    def _write(self, stem: str, blocks: Any, shape: tuple[int, ...], digest: Any) -> None:
        self.facts["arrays"][stem] = write_rows(self.folder, stem, blocks, shape, digest)

    def _write_contact_sheet(self, chosen: Indices) -> None:
        labels = self.labels[chosen]
        rows = []
        for members in contact.choose(labels):
            positions = self.images.positions[chosen[members]]
            blocks = self.scratch.read(positions)
            tiles = [contact.shrink(block[..., : self.channels]) for block in blocks]
            count = int((labels == labels[members[0]]).sum())
            title = self.classes[labels[members[0]]] if self.classes else "all"
            rows.append((f"{title} ({count:,})", np.concatenate(tiles)))
        hidden = len(np.unique(labels)) - len(rows)
        footer = f"and {hidden:,} more classes" if hidden else ""
        contact.draw_sheet(rows, footer).save(self.folder / Path(CONTACT).name)


def write_rows(
    folder: Path,
    stem: str,
    blocks: Iterable[NDArray[Any]],
    shape: tuple[int, ...],
    digest: Any,
) -> list[str]:
    """Write blocks of rows as one array of `shape`, in .npy files of at most PART_BYTES.

    Updates `digest` with the bytes of the rows. Returns the names of the files.
    """
    rows = _Rows(blocks)
    first = rows.peek()
    row_bytes = first.dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))
    counts = _part_counts(shape[0], max(1, PART_BYTES // row_bytes))
    files = part_names(stem, len(counts))
    for name, count in zip(files, counts, strict=True):
        header = {"descr": first.dtype.str, "fortran_order": False, "shape": (count, *shape[1:])}
        with (folder / name).open("wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            for block in rows.take(count):
                data = np.ascontiguousarray(block).data
                digest.update(data)
                file.write(data)
    return files


def _part_counts(rows: int, limit: int) -> list[int]:
    return [min(limit, rows - start) for start in range(0, max(1, rows), limit)]


def part_names(stem: str, count: int) -> list[str]:
    """Return the names of the `count` files of an array."""
    if count == 1:
        return [f"{stem}.npy"]
    return [f"{stem}-{part:03d}-of-{count:03d}.npy" for part in range(count)]


class _Rows:
    """A stream of blocks from which any number of rows can be taken."""

    def __init__(self, blocks: Iterable[NDArray[Any]]) -> None:
        self._blocks = iter(blocks)
        self._rest: NDArray[Any] | None = None

    def peek(self) -> NDArray[Any]:
        """Return the rows at the front without taking them."""
        if self._rest is None:
            self._rest = next(self._blocks)
        return self._rest

    def take(self, count: int) -> Iterator[NDArray[Any]]:
        """Yield the next `count` rows in one or more blocks."""
        while count:
            block = self.peek()
            taken, rest = block[:count], block[count:]
            self._rest = rest if len(rest) else None
            count -= len(taken)
            yield taken


def new_digest(shape: tuple[int, ...], classes: Sequence[str]) -> Any:
    """Return the hash for a fingerprint, which starts with the shape and the class names."""
    head = repr((shape, list(classes))).encode("utf-8", "backslashreplace")
    return hashlib.sha256(head)


def fingerprint(digest: Any) -> str:
    """Return the first 16 hex digits of a hash."""
    return str(digest.hexdigest()[:16])
