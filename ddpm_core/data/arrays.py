"""Writing the packed arrays: from pictures in any order to .npy files and their fingerprint."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PART_BYTES = 2**32
_BLOCK_BYTES = 2**23

Pixels = NDArray[np.uint8]
Indices = NDArray[np.int64]


class Scratch:
    """Squares in the order of their names, on disk, while nobody knows yet which are used.

    An unlinked file, so that nothing is left of it however the process ends; written and read by
    position, not mapped, so that a full disk is an error and not the end of the process.
    """

    def __init__(self, folder: Path, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.row_bytes = int(np.prod(shape))
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115, closed by close()

    def write(self, position: int, pixels: Pixels) -> None:
        data, offset = memoryview(pixels.tobytes()), position * self.row_bytes
        while data:
            written = os.pwrite(self._file.fileno(), data, offset)
            data, offset = data[written:], offset + written

    def read(self, positions: Indices) -> Iterator[Pixels]:
        """Blocks (k, S, S, C) of some megabytes, in the order of `positions`; at least one."""
        step = max(1, _BLOCK_BYTES // self.row_bytes)
        for start in range(0, max(1, len(positions)), step):
            here = positions[start : start + step]
            block = np.empty((len(here), *self.shape), np.uint8)
            for row, position in zip(block, here.tolist(), strict=True):
                data = os.pread(self._file.fileno(), self.row_bytes, position * self.row_bytes)
                row[:] = np.frombuffer(data, np.uint8).reshape(self.shape)
            yield block

    def close(self) -> None:
        self._file.close()


def write_rows(
    folder: Path,
    stem: str,
    blocks: Iterable[NDArray[Any]],
    shape: tuple[int, ...],
    digest: Any,
) -> list[str]:
    """Write blocks of rows as one array of `shape`, in parts of at most PART_BYTES; their names.

    `digest` is updated with every byte of the rows.
    """
    rows = _Rows(blocks)
    first = rows.peek()
    row_bytes = first.dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))
    counts = _part_counts(shape[0], max(1, PART_BYTES // row_bytes))
    names = part_names(stem, len(counts))
    for name, count in zip(names, counts, strict=True):
        header = {"descr": first.dtype.str, "fortran_order": False, "shape": (count, *shape[1:])}
        with (folder / name).open("wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            for block in rows.take(count):
                data = np.ascontiguousarray(block).data
                digest.update(data)
                file.write(data)
    return names


def _part_counts(rows: int, most: int) -> list[int]:
    return [min(most, rows - start) for start in range(0, max(1, rows), most)]


def part_names(stem: str, count: int) -> list[str]:
    if count == 1:
        return [f"{stem}.npy"]
    return [f"{stem}-{part:03d}-of-{count:03d}.npy" for part in range(count)]


class _Rows:
    """Blocks cut anew: the next n rows, in as many blocks as it takes."""

    def __init__(self, blocks: Iterable[NDArray[Any]]) -> None:
        self._blocks = iter(blocks)
        self._rest: NDArray[Any] | None = None

    def peek(self) -> NDArray[Any]:
        if self._rest is None:
            self._rest = next(self._blocks)
        return self._rest

    def take(self, count: int) -> Iterator[NDArray[Any]]:
        while count:
            block = self.peek()
            here, rest = block[:count], block[count:]
            self._rest = rest if len(rest) else None
            count -= len(here)
            yield here


def new_digest(shape: tuple[int, ...], classes: Sequence[str]) -> Any:
    """The fingerprint's hash, begun with what gives the bytes their meaning."""
    head = repr((shape, list(classes))).encode("utf-8", "backslashreplace")
    return hashlib.sha256(head)


def fingerprint(digest: Any) -> str:
    return str(digest.hexdigest()[:16])
