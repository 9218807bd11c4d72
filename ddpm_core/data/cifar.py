"""CIFAR-10's binary version: files of records, a label and three planes of 32 x 32 each.

The version for Python is pickled, and unpickling runs whatever code a file holds: it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpm_core.data.sources import Entry, Listing, Payload, Rejection, Source
from ddpm_core.errors import UserError

RECORD = 1 + 3 * 32 * 32
_FILE = 2**32  # `ref` is the file's number x _FILE + the record's
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def recognise(source: Source) -> tuple[Source, Listing]:
    """The source and its listing, or those of the records where it holds CIFAR-10's files."""
    listing = source.listing()
    binary = [entry for entry in listing.batches if entry.name.endswith(".bin")]
    if binary:
        records = CifarBinary(source, binary)
        return records, records.listing()
    if listing.batches and not listing.pictures:
        raise UserError(
            f"{source.facts['uri']} is CIFAR-10's version for Python, which is pickled: reading it "
            "may run code, so it is refused. Take the binary version, cifar-10-binary.tar.gz."
        )
    return source, listing


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
