"""Images in the archives of a folder, as img2dataset and WebDataset write them."""

from __future__ import annotations

import hashlib
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddpm_core import console
from ddpm_core.data import names
from ddpm_core.data.sources.archive import open_archive
from ddpm_core.data.sources.base import Entry, Listing, Payload, Rejection, Source
from ddpm_core.errors import UserError

_ARCHIVE = 2**32  # `ref` is the archive's number x _ARCHIVE + the entry's `ref` in it


class Shards:
    """The images of all archives that a source lists, each below the name of its archive."""

    def __init__(self, inner: Source, outer: Listing) -> None:
        self._inner, self._outer = inner, outer
        self._archives = sorted(outer.archives, key=lambda entry: names.to_bytes(entry.name))
        self.facts: dict[str, Any] = {**inner.facts, "archives": len(self._archives)}

    def listing(self) -> Listing:
        """Return what all archives hold. Raises UserError for one that can't be read."""
        outer, count = self._outer, len(self._archives)
        opened = Counter(names.suffix(entry.name) for entry in self._archives)
        found = Listing(archives=self._archives)
        self._add(found, outer, "")
        found.ignored -= opened
        checksum = hashlib.sha256()
        with console.progress("list", count, "archives") as advance:
            for number, archive in self._open(range(count)):
                self._add(found, archive.listing(), self._archives[number].name + "/", number)
                checksum.update(archive.facts["sha256"].encode())
                advance(1)
        self.facts["archives_sha256"] = checksum.hexdigest()
        found.pictures.sort(key=lambda entry: names.to_bytes(entry.name))
        found.notes.append(
            f"Archives are read as one source, {count:,} in number, such as "
            f"{self._archives[0].name}: their names are splits where they hold train, val or test, "
            "and never classes."
        )
        return found

    def read(self, entries: Sequence[Entry]) -> Iterator[tuple[int, Payload]]:
        """Archive by archive."""
        positions: dict[int, list[int]] = {}
        for position, entry in enumerate(entries):
            positions.setdefault(entry.ref // _ARCHIVE, []).append(position)
        for number, archive in self._open(sorted(positions)):
            chosen = positions[number]
            inside = [replace(entries[p], ref=entries[p].ref % _ARCHIVE) for p in chosen]
            for position, payload in archive.read(inside):
                yield chosen[position], payload

    def _add(self, found: Listing, listing: Listing, prefix: str, number: int = 0) -> None:
        for entries, more in (
            (found.pictures, listing.pictures),
            (found.batches, listing.batches),
        ):
            entries += [
                Entry(prefix + entry.name, entry.size, number * _ARCHIVE + entry.ref)
                for entry in more
            ]
        found.texts |= {prefix + name: text for name, text in listing.texts.items()}
        found.rejected += [replace(item, name=prefix + item.name) for item in listing.rejected]
        found.folders |= {prefix + name for name in listing.folders}
        found.hidden |= {prefix + name for name in listing.hidden}
        found.pickles += [prefix + name for name in listing.pickles]
        found.ignored += listing.ignored
        found.notes += listing.notes

    def _open(self, numbers: Sequence[int]) -> Iterator[tuple[int, Source]]:
        """Yield the archives of these numbers. One that was fetched lives in a file meanwhile."""
        for position, payload in self._inner.read([self._archives[n] for n in numbers]):
            name = names.one_line(self._archives[numbers[position]].name)
            if isinstance(payload, Rejection):
                raise UserError(
                    f"The archive {name} cannot be read: {payload.reason}. Take it out of the "
                    "source, or unpack it into a folder."
                )
            with tempfile.TemporaryDirectory(prefix="ddpm-archive-") as place:
                path = payload if isinstance(payload, Path) else Path(place, "archive")
                if isinstance(payload, bytes):
                    path.write_bytes(payload)
                yield numbers[position], open_archive(path, f"{self.facts['uri']}: {name}")
