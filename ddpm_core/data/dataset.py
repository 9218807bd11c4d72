"""The packed data set that training, sampling and evaluation read."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, InstanceOf

from ddpm_core.data.captions import CAPTION_BYTES
from ddpm_core.errors import Corrupt, UserError
from ddpm_core.storage import MANIFEST
from ddpm_core.storage.files import Count, Schema, array_head, must_be_inside
from ddpm_core.storage.manifest import FileRecord
from ddpm_core.storage.workspace import DATA, Workspace
from ddpm_core.storage.workspace import fingerprint as fingerprint_of

Indices = NDArray[np.int64]
Split = Literal["train", "holdout"]
PREFIX: dict[str, str] = {"train": "", "holdout": "holdout_"}


class PackedArray:
    """Rows of one array that lies in one or several .npy files, read as they are asked for.

    Indexing by a number, a slice or an array of numbers gives copies in memory. Rows are read from
    the files, not mapped, so that a process never counts the data set as its own memory.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        heads = [array_head(file) for file in files]
        row, self.dtype = heads[0].shape[1:], heads[0].dtype
        if any(
            (head.shape[1:], head.dtype) != (row, self.dtype) or not head.shape for head in heads
        ):
            raise Corrupt(f"{files[0].name} and its parts hold rows of several kinds.")
        self.starts = np.cumsum([0, *(head.shape[0] for head in heads)])
        self.shape = (int(self.starts[-1]), *row)
        self._heads = heads
        self._row_bytes = int(np.prod(row, dtype=np.int64)) * self.dtype.itemsize
        self._files = [file.open("rb") for file in files]
        for opened in self._files:
            weakref.finalize(self, opened.close)

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
        if len(wanted) and not (np.min(wanted) >= 0 and np.max(wanted) < len(self)):
            raise IndexError(f"indices up to {np.max(indices)} of an array of {len(self)} rows")
        rows = np.empty((len(wanted), *self.shape[1:]), self.dtype)
        parts = np.searchsorted(self.starts, wanted, side="right") - 1
        for row, (index, part) in enumerate(zip(wanted.tolist(), parts.tolist(), strict=True)):
            offset = self._heads[part].offset + (index - int(self.starts[part])) * self._row_bytes
            data = os.pread(self._files[part].fileno(), self._row_bytes, offset)
            if len(data) < self._row_bytes:
                raise Corrupt("The prepared data became shorter while they were read.")
            rows[row] = np.frombuffer(data, self.dtype).reshape(self.shape[1:])
        return rows


# What training and every score go by, which a hand may have changed in the manifest.
BOUND = (
    "fingerprint",
    "holdout_fingerprint",
    "image_size",
    "channels",
    "classes",
    "class_counts",
    "holdout_class_counts",
    "arrays",
)


class Prepared(Schema):
    """The manifest of prepared data."""

    fingerprint: str
    holdout_fingerprint: str
    image_size: Annotated[int, Field(ge=1, le=2**16)]
    channels: Literal[1, 3]
    classes: list[InstanceOf[str]]  # of file names, which may be no UTF-8
    class_counts: list[Count]
    holdout_class_counts: list[Count]
    arrays: dict[str, list[str]]
    files: dict[str, FileRecord]
    bound: str | None = None  # of BOUND; data of earlier versions have none
    source: dict[str, Any] | None = None
    prepare: dict[str, Any] | None = None


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
    manifest = _manifest(workspace)
    folder = workspace.path(DATA)
    arrays = manifest["arrays"]

    def array(stem: str, dtype: type, *row: int) -> PackedArray:
        key = PREFIX[split] + stem
        names = arrays.get(key)
        if not names:
            raise Corrupt(f"The manifest of the prepared data names no {key}: prepare them again.")
        for name in names:
            must_be_inside(DATA, name)
        array = PackedArray([folder / name for name in names])
        if array.dtype != dtype or array.shape[1:] != row:
            raise Corrupt(f"The prepared {key} are {array.dtype} of {array.shape}: prepare again.")
        return array

    size, channels = manifest["image_size"], manifest["channels"]
    images = array("images", np.uint8, size, size, channels)
    labels = array("labels", np.int64)[:]
    captions = None
    if PREFIX[split] + "captions" in arrays:
        captions = array("captions", np.uint8, CAPTION_BYTES)[:]
    _must_agree(manifest, split, len(images), labels, captions)
    return PackedDataset(images, labels, captions, split, manifest)


def _must_agree(
    manifest: dict[str, Any], split: Split, count: int, labels: Indices, captions: Any
) -> None:
    """Raise Corrupt where arrays of a split have other lengths, or labels are of no class."""
    classes = max(1, len(manifest["classes"]))
    counts = manifest[PREFIX[split] + "class_counts"]
    lengths = {count, len(labels)} | ({len(captions)} if captions is not None else set())
    if len(lengths) > 1 or not ((labels >= 0) & (labels < classes)).all():
        raise Corrupt(f"The prepared data of {split} don't fit each other: prepare them again.")
    if manifest["classes"] and (len(counts) != classes or sum(counts) != count):
        raise Corrupt(f"The prepared classes of {split} are counted wrong: prepare them again.")


def data_fingerprint(workspace: Workspace) -> str:
    """That of the training images, without fetching them. Raises UserError as open_dataset does."""
    return str(_manifest(workspace)[PREFIX["train"] + "fingerprint"])


def bound(facts: dict[str, Any]) -> str:
    """A fingerprint of the facts that belong together, to be put beside them."""
    return fingerprint_of({key: facts[key] for key in BOUND})


def was_changed(manifest: dict[str, Any]) -> bool:
    """Whether a Prepared manifest says something else than what was written with the arrays."""
    return manifest.get("bound") not in (None, bound(manifest))


def _manifest(workspace: Workspace) -> dict[str, Any]:
    manifest = workspace.read_json(f"{DATA}/{MANIFEST}", Prepared)
    if not manifest:
        raise UserError(f"There are no prepared data in {workspace.uri}: run `ddpm prepare` first.")
    if was_changed(manifest):
        raise Corrupt(
            f"{DATA}/{MANIFEST} was changed after it was written, and may stand for other data: "
            "run `ddpm prepare` again."
        )
    missing = workspace.damage(DATA, manifest)
    if missing:
        raise UserError(f"{missing} Run `ddpm prepare` again.")
    return manifest
