"""Open the packed arrays in data/, which training, sampling and evaluation read."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, InstanceOf

from ddpm_core.data.captions import CAPTION_BYTES
from ddpm_core.errors import Corrupt, UserError
from ddpm_core.storage import MANIFEST
from ddpm_core.storage.files import Count, array_head, must_be_inside
from ddpm_core.storage.manifest import Manifest
from ddpm_core.storage.workspace import DATA, Workspace
from ddpm_core.storage.workspace import fingerprint as fingerprint_of

if TYPE_CHECKING:
    from ddpm_core.data.order import BalancedOrder

Indices = NDArray[np.int64]
Split = Literal["train", "holdout"]
PREFIX: dict[str, str] = {"train": "", "holdout": "holdout_"}


class PackedArray:
    """One array in one or several .npy files, whose rows are read on demand.

    Indexing by a number, a slice or an array of numbers returns a copy in memory. Rows are read
    and not memory-mapped, because mapped pages would count as memory of the process.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        heads = [array_head(file) for file in files]
        row, self.dtype = heads[0].shape[1:], heads[0].dtype
        if any(
            (head.shape[1:], head.dtype) != (row, self.dtype) or not head.shape for head in heads
        ):
            raise Corrupt(
                f"{files[0].name} and its parts have different row shapes or types.",
                run=("prepare",),
            )
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
        """Return rows in the order of `indices`; negative indices count from the end.

        Raises IndexError, or Corrupt if a file became shorter.
        """
        wanted = np.where(indices < 0, indices + len(self), indices).astype(np.int64)
        if len(wanted) and not (np.min(wanted) >= 0 and np.max(wanted) < len(self)):
            raise IndexError(f"index {np.max(indices)} is out of range: array of {len(self)} rows")
        rows = np.empty((len(wanted), *self.shape[1:]), self.dtype)
        parts = np.searchsorted(self.starts, wanted, side="right") - 1
        for row, (index, part) in enumerate(zip(wanted.tolist(), parts.tolist(), strict=True)):
            offset = self._heads[part].offset + (index - int(self.starts[part])) * self._row_bytes
            # pread does not move the file's position, so threads can share the files.
            data = os.pread(self._files[part].fileno(), self._row_bytes, offset)
            if len(data) < self._row_bytes:
                raise Corrupt(
                    f"{DATA}/{Path(self._files[part].name).name} became shorter while it was read.",
                    run=("prepare",),
                )
            rows[row] = np.frombuffer(data, self.dtype).reshape(self.shape[1:])
        return rows


# The facts of a manifest that training and every score depend on. The manifest has a checksum of
# them, to detect an edit by hand.
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


class DataManifest(Manifest):
    """The manifest of prepared data, data/manifest.json.

    `prepare` are the settings and `source` the facts of the source that the data were made from.
    """

    model_config = ConfigDict(frozen=True)

    fingerprint: str
    holdout_fingerprint: str
    image_size: Annotated[int, Field(ge=1, le=2**16)]
    channels: Literal[1, 3]
    classes: list[InstanceOf[str]]  # not str: pydantic rejects names that are not valid UTF-8
    class_counts: list[Count]
    holdout_class_counts: list[Count]
    arrays: dict[str, list[str]]  # the files of each array
    bound: str | None = None  # checksum of BOUND; earlier versions wrote none
    source: dict[str, Any] | None = None
    prepare: dict[str, Any] | None = None
    # Counts for people, which no code depends on.
    count: Count | None = None
    holdout_count: Count | None = None
    rejected: Count | None = None
    ignored: dict[InstanceOf[str], Count] = Field(default_factory=dict)
    duplicates: dict[str, Count] = Field(default_factory=dict)

    @property
    def was_edited(self) -> bool:
        """Whether the facts in BOUND differ from those written with the arrays."""
        facts = {key: getattr(self, key) for key in BOUND}
        return self.bound not in (None, checksum_of_facts(facts))

    def class_counts_of(self, split: Split) -> list[int]:
        """Return the number of images of each class in a split; empty without classes."""
        return self.class_counts if split == "train" else self.holdout_class_counts

    def fingerprint_of(self, split: Split) -> str:
        """Return the fingerprint of a split."""
        return self.fingerprint if split == "train" else self.holdout_fingerprint


@dataclass(frozen=True)
class PackedDataset:
    """One split: images uint8 (N, H, W, C), labels int64 (N,), and captions or None.

    `captions` is uint8 (N, 64): UTF-8 padded with zeros. If the source has no classes, `classes` is
    empty and every label is 0. `class_counts` and `fingerprint` are those of this split.
    """

    images: PackedArray
    labels: Indices
    captions: NDArray[np.uint8] | None
    split: Split
    manifest: DataManifest

    def __len__(self) -> int:
        return len(self.images)

    def take(self, indices: Indices) -> NDArray[np.uint8]:
        """Return a copy of the images, uint8 (B, H, W, C), in the order of `indices`."""
        return self.images.take(indices)

    @property
    def classes(self) -> list[str]:
        return list(self.manifest.classes)

    @cached_property
    def class_counts(self) -> list[int]:
        return list(self.manifest.class_counts_of(self.split))

    @cached_property
    def balanced(self) -> BalancedOrder:
        """The order that draws every class equally often."""
        from ddpm_core.data.order import BalancedOrder  # here, because it imports torch

        return BalancedOrder(self.labels)

    @property
    def fingerprint(self) -> str:
        return self.manifest.fingerprint_of(self.split)

    @property
    def image_size(self) -> int:
        return self.manifest.image_size

    @property
    def channels(self) -> int:
        return self.manifest.channels

    @property
    def source(self) -> dict[str, Any] | None:
        """The facts of the source, or None for data of earlier versions."""
        return self.manifest.source


def open_dataset(workspace: Workspace, split: Split = "train") -> PackedDataset:
    """Open a split of the prepared images. Raises UserError if they are missing or damaged."""
    manifest = _intact_manifest(workspace)
    folder = workspace.path(DATA)
    arrays = manifest.arrays

    def array(stem: str, dtype: type, *row: int) -> PackedArray:
        key = PREFIX[split] + stem
        names = arrays.get(key)
        if not names:
            raise Corrupt(f"{DATA}/{MANIFEST} lists no {key}.", run=("prepare",))
        for name in names:
            must_be_inside(DATA, name)
        array = PackedArray([folder / name for name in names])
        if array.dtype != dtype or array.shape[1:] != row:
            raise Corrupt(
                f"The prepared {key} are {array.dtype} {array.shape}; must be {np.dtype(dtype)} "
                f"rows of shape {row}.",
                run=("prepare",),
            )
        return array

    size, channels = manifest.image_size, manifest.channels
    images = array("images", np.uint8, size, size, channels)
    labels = array("labels", np.int64)[:]
    captions = None
    if PREFIX[split] + "captions" in arrays:
        captions = array("captions", np.uint8, CAPTION_BYTES)[:]
    _check_consistency(manifest, split, len(images), labels, captions)
    return PackedDataset(images, labels, captions, split, manifest)


def _check_consistency(
    manifest: DataManifest, split: Split, count: int, labels: Indices, captions: Any
) -> None:
    """Raise Corrupt if arrays of a split differ in length, or labels or counts are invalid."""
    classes, counts = max(1, len(manifest.classes)), manifest.class_counts_of(split)
    lengths = {count, len(labels)} | ({len(captions)} if captions is not None else set())
    if len(lengths) > 1 or not ((labels >= 0) & (labels < classes)).all():
        raise Corrupt(
            f"The prepared arrays of {split} do not match each other, or have invalid labels.",
            run=("prepare",),
        )
    if manifest.classes and (len(counts) != classes or sum(counts) != count):
        raise Corrupt(
            f"The class counts of {split} in {DATA}/{MANIFEST} are wrong.", run=("prepare",)
        )


def data_fingerprint(workspace: Workspace) -> str:
    """Return the fingerprint of the training split without fetching the images from S3.

    Raises UserError as `open_dataset` does.
    """
    return _intact_manifest(workspace).fingerprint


def read_manifest(workspace: Workspace) -> DataManifest | None:
    """Return the manifest of the prepared data, or None if it is missing or damaged."""
    return workspace.read_model(f"{DATA}/{MANIFEST}", DataManifest)


def checksum_of_facts(facts: dict[str, Any]) -> str:
    """Return the fingerprint of the facts in BOUND, which the manifest records."""
    return fingerprint_of({key: facts[key] for key in BOUND})


def missing_file(workspace: Workspace, manifest: DataManifest) -> str:
    """Return a message about the first file that is missing or has a wrong size, or ""."""
    return workspace.damage(DATA, manifest)


def _intact_manifest(workspace: Workspace) -> DataManifest:
    """Return the manifest of the prepared data. Raises UserError."""
    manifest = read_manifest(workspace)
    if manifest is None:
        raise UserError(f"There are no prepared data in {workspace.uri}.", run=("prepare",))
    if manifest.was_edited:
        raise Corrupt(
            f"{DATA}/{MANIFEST} was edited after prepare wrote it, so it may not match the arrays.",
            run=("prepare",),
        )
    missing = missing_file(workspace, manifest)
    if missing:
        raise UserError(missing, run=("prepare",))
    return manifest
