"""The packed data set that training, sampling and evaluation read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ddpm_core.errors import UserError
from ddpm_core.storage import MANIFEST
from ddpm_core.workspace import DATA, Workspace

Indices = NDArray[np.int64]
Split = Literal["train", "holdout"]
PREFIX: dict[str, str] = {"train": "", "holdout": "holdout_"}


class PackedArray:
    """Rows of one array that lies in one or several .npy files, read as they are asked for.

    Indexing by a number, a slice or an array of numbers gives copies in memory. Rows are read from
    the files, not mapped, so that a process never counts the data set as its own memory.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        heads = [_head(file) for file in files]
        self.dtype: np.dtype[Any] = heads[0].dtype
        self.starts = np.cumsum([0, *(head.rows for head in heads)])
        self.shape = (int(self.starts[-1]), *heads[0].row)
        self._heads = heads
        self._row_bytes = int(np.prod(heads[0].row, dtype=np.int64)) * self.dtype.itemsize
        self._files = [file.open("rb") for file in files]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: int | slice | Indices) -> NDArray[Any]:
        if isinstance(index, int | np.integer):
            row: NDArray[Any] = self.take(np.array([index]))[0]
            return row
        if isinstance(index, slice):
            return self.take(np.arange(*index.indices(len(self))))
        return self.take(np.asarray(index))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        rows: NDArray[Any] = self[:].astype(dtype or self.dtype, copy=False)
        return rows

    def take(self, indices: Indices) -> NDArray[Any]:
        """Rows in the order of `indices`, which may repeat; negative ones count from the end."""
        wanted = np.where(indices < 0, indices + len(self), indices).astype(np.int64)
        if len(wanted) and not (wanted.min() >= 0 and wanted.max() < len(self)):
            raise IndexError(f"indices up to {indices.max()} of an array of {len(self)} rows")
        rows = np.empty((len(wanted), *self.shape[1:]), self.dtype)
        parts = np.searchsorted(self.starts, wanted, side="right") - 1
        for row, (index, part) in enumerate(zip(wanted.tolist(), parts.tolist(), strict=True)):
            offset = self._heads[part].offset + (index - int(self.starts[part])) * self._row_bytes
            data = os.pread(self._files[part].fileno(), self._row_bytes, offset)
            rows[row] = np.frombuffer(data, self.dtype).reshape(self.shape[1:])
        return rows


@dataclass(frozen=True)
class PackedDataset:
    """One split: uint8 images (N, H, W, C), a label each, and captions where there are any.

    `classes` is empty where the source had none; then every label is 0. `captions` is uint8
    (N, 64), UTF-8 padded with zeros, or None. `class_counts` are those of this split.
    """

    images: PackedArray
    labels: Indices
    captions: NDArray[np.uint8] | None
    split: Split
    manifest: dict[str, Any]

    def __len__(self) -> int:
        return len(self.images)

    def take(self, indices: Indices) -> NDArray[np.uint8]:
        """Images (B, H, W, C) uint8 in the order of `indices`, copied into memory."""
        return self.images.take(indices)

    @property
    def classes(self) -> list[str]:
        return list(self.manifest["classes"])

    @cached_property
    def class_counts(self) -> list[int]:
        return list(self.manifest[PREFIX[self.split] + "class_counts"])

    @property
    def fingerprint(self) -> str:
        return str(self.manifest[PREFIX[self.split] + "fingerprint"])

    @property
    def image_size(self) -> int:
        return int(self.manifest["image_size"])

    @property
    def channels(self) -> int:
        return int(self.manifest["channels"])


def open_dataset(workspace: Workspace, split: Split = "train") -> PackedDataset:
    """The prepared images of a workspace. Raises UserError where there are none, or not all."""
    manifest = workspace.read_json(f"{DATA}/{MANIFEST}")
    if "fingerprint" not in manifest:
        raise UserError(f"There are no prepared data in {workspace.uri}: run `ddpm prepare` first.")
    missing = damage(workspace, manifest)
    if missing:
        raise UserError(f"{missing} Run `ddpm prepare` again.")
    folder = workspace.path(DATA)
    arrays = manifest["arrays"]

    def array(stem: str) -> PackedArray:
        return PackedArray([folder / name for name in arrays[PREFIX[split] + stem]])

    captions = array("captions")[:] if PREFIX[split] + "captions" in arrays else None
    return PackedDataset(array("images"), array("labels")[:], captions, split, manifest)


def damage(workspace: Workspace, manifest: dict[str, Any]) -> str:
    """A sentence about the first file of the data that is missing or has another size, or ""."""
    for name, facts in manifest["files"].items():
        path = workspace.path(f"{DATA}/{name}")
        if not path.is_file():
            return f"The prepared data lack their file {name}."
        if path.stat().st_size != facts["size"]:
            return f"{DATA}/{name} has {path.stat().st_size} bytes; {facts['size']} were written."
    return ""


@dataclass(frozen=True)
class _Head:
    """Where the rows of a .npy file begin, and what they are."""

    rows: int
    row: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int


def _head(path: Path) -> _Head:
    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        return _Head(shape[0], tuple(shape[1:]), dtype, file.tell())
