"""Images in a folder of archives, parquet files or arrays: shards of one source."""

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
from ddpm_core.data.sources.base import Entry, Listing, Payload, Rejection, Source
from ddpm_core.data.sources.file import open_file
from ddpm_core.data.sources.sidecars import FIND, Columns
from ddpm_core.errors import UserError
from ddpm_core.text import counted

_SHARD = 2**32  # an entry's `ref` is the shard's number x _SHARD + its `ref` in there


class Shards:
    """The images of all shards in a source. Each has its shard as its top folder."""

    def __init__(self, inner: Source, outer: Listing, columns: Columns = FIND) -> None:
        self._inner, self._outer, self._columns = inner, outer, columns
        kinds = {names.shard_kind(entry.name) for entry in outer.shards}
        self._kind = next(kind for kind in names.SHARDS if kind in kinds)
        shards = [entry for entry in outer.shards if names.shard_kind(entry.name) == self._kind]
        self._shards = sorted(shards, key=lambda entry: names.to_bytes(entry.name))
        self.facts: dict[str, Any] = {**inner.facts, "shards": len(self._shards)}

    def listing(self) -> Listing:
        """Return the content of all shards. Raises UserError if one cannot be read."""
        outer, count = self._outer, len(self._shards)
        opened = Counter(names.suffix(entry.name) for entry in self._shards)
        found = Listing(shards=self._shards)
        self._add(found, outer, "")
        found.ignored -= opened
        checksum = hashlib.sha256()
        with console.progress("list", count, f"{self._kind}s") as advance:
            for number, shard in self._open(range(count)):
                self._add(found, shard.listing(), self._shards[number].name + "/", number)
                checksum.update(shard.facts["sha256"].encode())
                advance(1)
        self.facts["shards_sha256"] = checksum.hexdigest()
        found.images.sort(key=lambda entry: names.to_bytes(entry.name))
        found.notes.append(
            f"Reading {counted(count, self._kind)} as one source, such as {self._shards[0].name}. "
            f"A name with train, val or test assigns its {self._kind} to that split; names are "
            "never classes."
        )
        return found

    def read(self, entries: Sequence[Entry]) -> Iterator[tuple[int, Payload]]:
        """Yield contents shard by shard."""
        positions: dict[int, list[int]] = {}
        for position, entry in enumerate(entries):
            positions.setdefault(entry.ref // _SHARD, []).append(position)
        for number, shard in self._open(sorted(positions)):
            chosen = positions[number]
            inside = [replace(entries[p], ref=entries[p].ref % _SHARD) for p in chosen]
            for position, payload in shard.read(inside):
                yield chosen[position], payload

    def _add(self, found: Listing, listing: Listing, prefix: str, number: int = 0) -> None:
        """Add the listing of a shard to `found`, with its names below `prefix`."""
        for entries, more in (
            (found.images, listing.images),
            (found.batches, listing.batches),
        ):
            entries += [
                replace(entry, name=prefix + entry.name, ref=number * _SHARD + entry.ref)
                for entry in more
            ]
        found.texts |= {prefix + name: text for name, text in listing.texts.items()}
        found.rejected += [replace(item, name=prefix + item.name) for item in listing.rejected]
        found.folders |= {prefix + name for name in listing.folders}
        found.hidden |= {prefix + name for name in listing.hidden}
        found.pickles += [prefix + name for name in listing.pickles]
        found.ignored += listing.ignored
        found.columns |= listing.columns
        found.unlabelled |= listing.unlabelled
        # Shards of the same kind have the same messages.
        found.notes += [note for note in listing.notes if note not in found.notes]

    def _open(self, numbers: Sequence[int]) -> Iterator[tuple[int, Source]]:
        """Yield these shards, opened. One that was fetched is in a temporary file meanwhile."""
        for position, payload in self._inner.read([self._shards[n] for n in numbers]):
            name = names.one_line(self._shards[numbers[position]].name)
            if isinstance(payload, Rejection):
                raise UserError(
                    f"The {self._kind} {name} cannot be read: {payload.reason}. Remove it from the "
                    "source, or copy the source to a folder of this machine."
                )
            with tempfile.TemporaryDirectory(prefix="ddpm-shard-") as scratch:
                path = payload if isinstance(payload, Path) else Path(scratch, "shard")
                if isinstance(payload, bytes):
                    path.write_bytes(payload)
                uri = f"{self.facts['uri']}: {name}"
                yield numbers[position], open_file(path, uri, self._columns)
