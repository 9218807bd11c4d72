"""CIFAR-10's binary version: files of records, a label and three planes of 32 x 32 each.

The version for Python is pickled, and unpickling runs whatever code a file holds: it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpm_core.data.names import one_line
from ddpm_core.data.sources.base import Entry, Listing, Payload, Rejection, Source
from ddpm_core.data.sources.shards import Shards
from ddpm_core.errors import UserError

RECORD = 1 + 3 * 32 * 32
_FILE = 2**32  # `ref` is the file's number x _FILE + the record's
_AS_IMAGES = (
    "Convert it, with a program that you trust, to image files in a folder for each class, such as "
    "train/apple/1.png, and give that folder."
)
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def recognise(source: Source) -> tuple[Source, Listing]:
    """Return the source and its listing, or those of CIFAR-10's records, or of the archives where
    the source holds nothing else. Raises UserError for pickled files alone."""
    listing = source.listing()
    if listing.archives and not (listing.pictures or listing.batches):
        source = Shards(source, listing)
        listing = source.listing()
    if listing.batches:
        records = CifarBinary(source, listing.batches)
        return records, records.listing()
    if listing.pickles and not listing.pictures:
        raise UserError(_pickled(source.facts["uri"], listing.pickles))
    return source, listing


def _pickled(uri: str, pickles: Sequence[str]) -> str:
    """Return why pickled files are refused, and what to do instead."""
    files = {name.rpartition("/")[2] for name in pickles}
    found, instead = f"holds pickled files, such as {one_line(min(files))}", _AS_IMAGES
    if "data_batch_1" in files or "test_batch" in files:
        found = "is CIFAR-10's version for Python, which is pickled"
        instead = "Take the binary version, cifar-10-binary.tar.gz."
    elif {"train", "test"} <= files:
        found = "is CIFAR-100's version for Python, which is pickled"
    return f"{uri} {found}: reading it may run code, so it is refused. {instead}"


class CifarBinary:
    """The records of data_batch_*.bin for training and of test_batch.bin held out."""

    def __init__(self, inner: Source, files: Sequence[Entry]) -> None:
        self._inner, self._files = inner, files
        self.facts: dict[str, Any] = {**inner.facts, "format": "CIFAR-10 binary"}

    def listing(self) -> Listing:
        found = []
        for number, records in self._records():
            file = self._files[number].name.rpartition("/")[2]
            split = "test" if file.startswith("test") else "train"
            for row, label in enumerate(records[:, 0].tolist()):
                name = f"{split}/{CLASSES[label]}/{file.removesuffix('.bin')}-{row:05d}"
                found.append(Entry(name, RECORD, number * _FILE + row))
        return Listing(pictures=sorted(found, key=lambda entry: entry.name))

    def read(self, entries: Sequence[Entry]) -> Iterator[tuple[int, Payload]]:
        positions = {entry.ref: position for position, entry in enumerate(entries)}
        for number, records in self._records():
            planes = records[:, 1:].reshape(-1, 3, 32, 32)
            for row in range(len(records)):
                position = positions.get(number * _FILE + row)
                if position is not None:
                    yield position, np.ascontiguousarray(planes[row].transpose(1, 2, 0))

    def _records(self) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        for number, payload in self._inner.read(self._files):
            if isinstance(payload, Rejection):
                raise UserError(f"{self._files[number].name} {payload.reason}.")
            content = payload.read_bytes() if isinstance(payload, Path) else payload
            values = np.frombuffer(content, np.uint8)
            if len(values) % RECORD or len(values) == 0 or np.max(values[::RECORD]) >= len(CLASSES):
                raise UserError(
                    f"{self._files[number].name} of {self.facts['uri']} is no file of CIFAR-10's "
                    f"binary version: {len(values):,} bytes, records of {RECORD:,} with labels "
                    "below 10 are needed. Fetch it again."
                )
            yield number, values.reshape(-1, RECORD)
