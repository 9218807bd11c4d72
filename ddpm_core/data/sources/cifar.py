"""CIFAR-10's binary files: records of a label and three planes of 32 x 32 pixels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpm_core.data.sources.base import Entry, Listing, Payload, Rejection, Source
from ddpm_core.errors import UserError

RECORD = 1 + 3 * 32 * 32  # bytes
_FILE = 2**32  # an entry's `ref` is the file's number x _FILE + the record's number
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


class CifarBinary:
    """The records of data_batch_*.bin for training and of test_batch.bin held out."""

    def __init__(self, inner: Source, files: Sequence[Entry]) -> None:
        self._inner, self._files = inner, files
        self.facts: dict[str, Any] = {**inner.facts, "format": "CIFAR-10 binary"}

    def listing(self) -> Listing:
        """Return the records as images in folders for split and class."""
        found = []
        for number, records in self._records():
            file = self._files[number].name.rpartition("/")[2]
            split = "test" if file.startswith("test") else "train"
            for row, label in enumerate(records[:, 0].tolist()):
                name = f"{split}/{CLASSES[label]}/{file.removesuffix('.bin')}-{row:05d}"
                found.append(Entry(name, RECORD, number * _FILE + row))
        return Listing(images=sorted(found, key=lambda entry: entry.name))

    def read(self, entries: Sequence[Entry]) -> Iterator[tuple[int, Payload]]:
        """Yield pixels uint8 (32, 32, 3), in the order of the files."""
        positions = {entry.ref: position for position, entry in enumerate(entries)}
        for number, records in self._records():
            planes = records[:, 1:].reshape(-1, 3, 32, 32)
            for row in range(len(records)):
                position = positions.get(number * _FILE + row)
                if position is not None:
                    yield position, np.ascontiguousarray(planes[row].transpose(1, 2, 0))

    def _records(self) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Yield each file's number and its records uint8 (n, RECORD). Raises UserError."""
        for number, payload in self._inner.read(self._files):
            name = self._files[number].name
            if isinstance(payload, Rejection):
                raise UserError(f"{name} cannot be used: {payload.reason}.")
            content = payload.read_bytes() if isinstance(payload, Path) else payload
            values = np.frombuffer(content, np.uint8)
            if len(values) % RECORD or len(values) == 0 or np.max(values[::RECORD]) >= len(CLASSES):
                raise UserError(
                    f"{name} in {self.facts['uri']} is not a CIFAR-10 binary file: it has "
                    f"{len(values):,} bytes; must be records of {RECORD:,} bytes with labels below "
                    "10. Fetch it again."
                )
            yield number, values.reshape(-1, RECORD)
