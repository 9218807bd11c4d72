"""Images in a folder of archives, as img2dataset and WebDataset write them."""

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
from ddpm_core.text import counted

_ARCHIVE = 2**32  # an entry's `ref` is the archive's number x _ARCHIVE + its `ref` in there


class Shards:
    """The images of all archives in a source. Each has its archive as its top folder."""

    def __init__(self, inner: Source, outer: Listing) -> None:
        self._inner, self._outer = inner, outer
        self._archives = sorted(outer.archives, key=lambda entry: names.to_bytes(entry.name))
        self.facts: dict[str, Any] = {**inner.facts, "archives": len(self._archives)}

    def listing(self) -> Listing:
        """Return the content of all archives. Raises UserError if one cannot be read."""
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
        found.images.sort(key=lambda entry: names.to_bytes(entry.name))
        found.notes.append(
            f"Reading {counted(count, 'archive')} as one source, such as {self._archives[0].name}. "
            "A name with train, val or test assigns its archive to that split; names are never "
            "classes."
        )
        return found

    def read(self, entries: Sequence[Entry]) -> Iterator[tuple[int, Payload]]:
        """Yield contents archive by archive."""
        positions: dict[int, list[int]] = {}
        for position, entry in enumerate(entries):
            positions.setdefault(entry.ref // _ARCHIVE, []).append(position)
        for number, archive in self._open(sorted(positions)):
            chosen = positions[number]
            inside = [replace(entries[p], ref=entries[p].ref % _ARCHIVE) for p in chosen]
            for position, payload in archive.read(inside):
                yield chosen[position], payload

    def _add(self, found: Listing, listing: Listing, prefix: str, number: int = 0) -> None:
        """Add the listing of an archive to `found`, with its names below `prefix`."""
        for entries, more in (
            (found.images, listing.images),
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
        """Yield these archives, opened. One that was fetched is in a temporary file meanwhile."""
        for position, payload in self._inner.read([self._archives[n] for n in numbers]):
            name = names.one_line(self._archives[numbers[position]].name)
            if isinstance(payload, Rejection):
                raise UserError(
                    f"The archive {name} cannot be read: {payload.reason}. Remove it from the "
                    "source, or unpack it into a folder."
                )
            with tempfile.TemporaryDirectory(prefix="ddpm-archive-") as scratch:
                path = payload if isinstance(payload, Path) else Path(scratch, "archive")
                if isinstance(payload, bytes):
                    path.write_bytes(payload)
                yield numbers[position], open_archive(path, f"{self.facts['uri']}: {name}")
