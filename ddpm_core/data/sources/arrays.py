"""Images in the rows of a NumPy array, in a .npy or .npz file. Nothing is unpickled.

ADM and improved-diffusion write such files: `arr_0` has the samples, and `arr_1` their labels.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpm_core.data.decode import PIXELS
from ddpm_core.data.names import one_line
from ddpm_core.data.sources.base import Entry, Listing, Payload
from ddpm_core.data.sources.limits import entries_limit, file_facts, unpacked_limit, user_errors
from ddpm_core.data.sources.unpacking import Excess, Unpacked, zip_stream
from ddpm_core.errors import UserError

_NPY = b"\x93NUMPY"
_ZIP = b"PK\x03\x04"
_CHANNELS = (1, 3)
_MOST = 100  # arrays in a file; each is opened for its header
_SHOWN = 10  # arrays in a message


@dataclass(frozen=True, slots=True)
class _Head:
    """The header of an array; the values begin at byte `offset`."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int
    ordered: bool  # in C order: the rows follow each other

    def __str__(self) -> str:
        if self.dtype.hasobject:
            return "Python objects, which are pickled and never read"
        return f"{self.dtype.name} {self.shape}" + ("" if self.ordered else " in Fortran order")


class Arrays:
    """The images of a .npy file, or of the one array of images in a .npz file."""

    def __init__(self, path: Path, uri: str) -> None:
        self.facts = file_facts(path, uri)
        self._uri, self._path = uri, path

    def listing(self) -> Listing:
        """Return the rows of the array as images. Raises UserError."""
        with self._user_errors():
            heads = self._heads()
            name = self._images(heads)
            shape = heads[name].shape
            label, notes = self._labels(heads, name)
            classes = self._classes(label, heads[label]) if label else [None] * shape[0]
            size = math.prod(shape[1:])
            return Listing(
                images=[Entry(f"{row:08d}", size, row, text) for row, text in enumerate(classes)],
                notes=notes,
            )

    def read(self, entries: Sequence[Entry]) -> Iterator[tuple[int, Payload]]:
        """Yield pixels uint8 (H, W) or (H, W, 3), in the order of the file."""
        positions = {entry.ref: position for position, entry in enumerate(entries)}
        with self._user_errors():
            heads = self._heads()
            name = self._images(heads)
            head = heads[name]
            size = math.prod(head.shape[1:])
            with self._open(name) as stream:
                for row in sorted(positions):
                    stream.seek(head.offset + row * size)
                    yield positions[row], _pixels(_take(stream, size), head.shape[1:])
                # To the end, where zipfile compares the checksum.
                stream.seek(head.offset + size * head.shape[0])

    def _heads(self) -> dict[str, _Head]:
        """Return the header of each array by its name, which is empty for a .npy file."""
        if not _is_npz(self._path):
            return {"": self._head("", self._path.stat().st_size)}
        with zipfile.ZipFile(self._path) as archive:
            sizes = {member.filename: member.file_size for member in archive.infolist()}
        if len(sizes) > _MOST:
            raise Excess(f"has {len(sizes):,} arrays; at most {_MOST} are read")
        if sum(sizes.values()) > unpacked_limit(self._path):
            raise Excess(f"unpacks to more than {unpacked_limit(self._path):,} bytes")
        return {name: self._head(name, size) for name, size in sizes.items()}

    def _head(self, name: str, size: int) -> _Head:
        """Return the header of an array. Raises UserError if the array has another size."""
        with self._open(name) as stream:
            stream.begin_headers()
            version = np.lib.format.read_magic(stream)  # type: ignore[arg-type]  # it calls only read
            if version not in ((1, 0), (2, 0)):
                raise ValueError(f"version {version} of the format")
            read = np.lib.format.read_array_header_1_0
            if version == (2, 0):
                read = np.lib.format.read_array_header_2_0
            shape, fortran_order, dtype = read(stream)  # type: ignore[arg-type]
            head = _Head(shape, dtype, stream.tell(), not fortran_order or len(shape) < 2)
        claimed = head.offset + math.prod(shape) * dtype.itemsize
        if min(shape, default=0) < 0 or (claimed != size and not dtype.hasobject):
            raise ValueError(
                f"{_shown(name) or 'it'} has {size:,} bytes; its shape {shape} of {dtype.name} "
                f"requires {claimed:,}"
            )
        return head

    def _images(self, heads: Mapping[str, _Head]) -> str:
        """Return the name of the array with the images. Raises UserError."""
        found = [name for name, head in heads.items() if _is_images(head)]
        if len(found) == 1:
            self._check_size(heads[found[0]].shape)
            return found[0]
        arrays = [f"{_shown(name)}: {head}" for name, head in heads.items()][:_SHOWN]
        problem = "has several arrays of images" if found else "has no array of images"
        hint = "Save the one to use, with its labels, as a separate file."
        if not found:
            hint = (
                "Images must be uint8 of shape (N, H, W), (N, H, W, C) or (N, C, H, W), with 1 or "
                "3 channels C, in C order. To convert values from -1 to 1: "
                "numpy.save(path, (x * 127.5 + 127.5).round().clip(0, 255).astype('uint8'))."
            )
        raise UserError(
            f"{self._uri} {problem}; it contains {'; '.join(arrays).removeprefix(': ')}. {hint}"
        )

    def _check_size(self, shape: tuple[int, ...]) -> None:
        pixels = math.prod(shape[1:]) // (3 if 3 in (shape[1], shape[-1]) else 1)
        if pixels > PIXELS:
            raise Excess(f"has images of {pixels:,} pixels; at most {PIXELS:,} are read")
        if shape[0] > entries_limit(self._path):
            raise Excess(f"has {shape[0]:,} images")

    def _labels(self, heads: Mapping[str, _Head], images: str) -> tuple[str, list[str]]:
        """Return the name of the array with the labels, if any, and messages for the user."""
        count = heads[images].shape[0]
        others = [name for name in heads if name != images]
        found = [name for name in others if _is_labels(heads[name], count)]
        if len(found) > 1:
            raise UserError(
                f"{self._uri} has several arrays of labels: {', '.join(map(_shown, found))}. Save "
                "the images and the labels to use as a separate file."
            )
        notes = []
        if images:
            classes = f", the classes from {_shown(found[0])}" if found else ""
            notes.append(f"The images come from the array {_shown(images)}{classes}.")
        ignored = [f"{_shown(name)} ({heads[name]})" for name in others if name not in found]
        if ignored:
            notes.append(f"Ignored arrays: {', '.join(ignored[:_SHOWN])}.")
        return found[0] if found else "", notes

    def _classes(self, name: str, head: _Head) -> list[str | None]:
        with self._open(name) as stream:
            stream.seek(head.offset)
            values = np.frombuffer(_take(stream, head.shape[0] * head.dtype.itemsize), head.dtype)
        return [str(value) for value in values.tolist()]

    @contextmanager
    def _open(self, name: str) -> Iterator[Unpacked]:
        """Open the content of an array, header included."""
        if not name:
            with self._path.open("rb") as file:
                yield Unpacked(file, self._path.stat().st_size)
            return
        with zipfile.ZipFile(self._path) as archive:
            member = archive.getinfo(name)
            with zip_stream(archive, member) as stream:
                yield Unpacked(stream, member.file_size)

    def _user_errors(self) -> AbstractContextManager[None]:
        return user_errors(self._uri, "array file", "use image files in a directory")


def is_arrays(path: Path) -> bool:
    """Return whether a file is a .npy array, or a zip of nothing but such arrays."""
    with path.open("rb") as file:
        start = file.read(len(_NPY))
    return start == _NPY or (start.startswith(_ZIP) and _is_npz(path))


def _is_npz(path: Path) -> bool:
    with path.open("rb") as file:
        if file.read(len(_ZIP)) != _ZIP or not zipfile.is_zipfile(path):
            return False
    try:
        with zipfile.ZipFile(path) as archive:
            found = archive.namelist()
    except Exception:  # damaged: open_archive says how
        return False
    return bool(found) and all(name.endswith(".npy") and "/" not in name for name in found)


def _is_images(head: _Head) -> bool:
    if head.dtype != np.uint8 or not head.ordered or 0 in head.shape[1:]:
        return False
    if len(head.shape) == 3:  # (H, W, 3) would be a single image
        return head.shape[2] not in _CHANNELS
    return len(head.shape) == 4 and (head.shape[1] in _CHANNELS) != (head.shape[3] in _CHANNELS)


def _is_labels(head: _Head, count: int) -> bool:
    return head.dtype.kind in "iu" and head.shape in ((count,), (count, 1))


def _pixels(content: bytes, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return an image as (H, W) or (H, W, 3)."""
    pixels = np.frombuffer(content, np.uint8).reshape(shape)
    if pixels.ndim == 3 and shape[0] in _CHANNELS and shape[2] not in _CHANNELS:
        pixels = np.ascontiguousarray(pixels.transpose(1, 2, 0))
    return pixels[:, :, 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels


def _take(stream: Unpacked, count: int) -> bytes:
    content = stream.take(count)
    if len(content) < count:
        raise ValueError("unexpected end of data")
    return content


def _shown(name: str) -> str:
    return one_line(name.removesuffix(".npy"))
