"""Store samples while they are drawn: chunks first, then shards made of them.

Every worker writes the same bytes under the same name. So shards may be drawn repeatedly, by two
workers at once, or in another number: the last writer changes nothing.

Images are written twice, because a chunk must be complete on its own: a killed worker loses only
one, the workers of a shard take them in turn, and S3 cannot append them to a file. Readers want few
files, so a finished shard replaces its chunks.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpm_core.errors import Corrupt
from ddpm_core.sampling.images import Pixels
from ddpm_core.sampling.plan import Recipe, Shard
from ddpm_core.storage import MANIFEST
from ddpm_core.storage.files import Count
from ddpm_core.storage.manifest import FileRecord
from ddpm_core.storage.workspace import Workspace, samples_key

DIGEST = 32  # bytes of the SHA-256 that precedes the pixels of a chunk


class ShardRecord(FileRecord):
    """The content of shard-III-of-NNN.json: size and checksum of the shard, and its images."""

    samples_fingerprint: str
    start: Count
    stop: Count


class ShardStore:
    """The chunks and shards of one recipe."""

    def __init__(self, workspace: Workspace, recipe: Recipe) -> None:
        self._storage = workspace.storage
        self._workspace = workspace
        self._fingerprint = recipe.samples_fingerprint
        self._image = (recipe.image_size, recipe.image_size, recipe.channels)
        self.key = samples_key(recipe.step)
        self._chunks = f"{self.key}/parts-{self._fingerprint}"

    def chunk(self, number: int, count: int) -> Pixels | None:
        """Return the images of a chunk, uint8 (count, H, W, C), or None if missing or damaged."""
        try:
            data = self._storage.read(self._chunk_key(number))
        except (FileNotFoundError, NotADirectoryError, Corrupt):
            return None
        digest, pixels = data[:DIGEST], data[DIGEST:]
        fits = len(pixels) == count * math.prod(self._image)
        if not fits or hashlib.sha256(pixels).digest() != digest:
            return None
        return np.frombuffer(pixels, np.uint8).reshape(count, *self._image)

    def write_chunk(self, number: int, images: Pixels) -> None:
        """Write the images of a chunk, uint8 (n, H, W, C), after their checksum."""
        pixels = np.ascontiguousarray(images).tobytes()
        try:
            self._storage.write(self._chunk_key(number), hashlib.sha256(pixels).digest() + pixels)
        except FileNotFoundError:
            # Another worker has just gathered the samples and removed the folder of chunks, so
            # this chunk is no longer required.
            return

    def problem(self, shard: Shard) -> str:
        """Return in a few words why a shard is not up to date, or "" if it is."""
        return self._problem(shard, self._record(shard.name))

    def listed(self, shard: Shard) -> FileRecord:
        """Return size and checksum of a shard that has no `problem`.

        Raises Corrupt if its record or size has changed since; its content is not hashed again.
        """
        record = self._record(shard.name)
        problem = self._problem(shard, record, content=False)
        if problem or record is None:
            raise Corrupt(f"{self.key}/{shard.name}: {problem}.")
        return FileRecord(size=record.size, sha256=record.sha256)

    def _record(self, name: str) -> ShardRecord | None:
        return self._workspace.read_model(f"{self.key}/{name}.json", ShardRecord)

    def _is_ours(self, name: str) -> bool:
        """Return whether the shard with this name was drawn with this recipe."""
        record = self._record(name)
        return record is not None and record.samples_fingerprint == self._fingerprint

    def _problem(self, shard: Shard, record: ShardRecord | None, content: bool = True) -> str:
        key = f"{self.key}/{shard.name}"
        if record is None:
            return "missing"
        if record.samples_fingerprint != self._fingerprint:
            return "different settings"
        found = (record.start, record.stop, record.size)
        if found != (shard.start, shard.stop, self._size(shard)):
            return "different images"
        size = self._storage.size(f"{key}.npy")
        if size is None:
            return "missing"
        if size != record.size:
            return "damaged"
        if content and self._storage.checksum(f"{key}.npy") != record.sha256:
            return "damaged"
        return ""

    def finish(self, shard: Shard) -> bool:
        """Write a shard from its chunks, then its record. Return False if chunks are missing."""
        chunks = []
        for number in shard.chunks:
            pixels = self.chunk(number, len(shard.images(number)))
            if pixels is None:
                # Another worker may have finished the shard and removed its chunks.
                return not self.problem(shard)
            chunks.append(pixels)
        data = npy(np.concatenate([np.empty((0, *self._image), np.uint8), *chunks]))
        key = f"{self.key}/{shard.name}"
        self._remove_old_manifest()
        self._storage.write(f"{key}.npy", data)
        record = ShardRecord(
            samples_fingerprint=self._fingerprint,
            start=shard.start,
            stop=shard.stop,
            **record_of(data).model_dump(),
        )
        self._workspace.write_json(f"{key}.json", record.model_dump())
        for number in shard.chunks:
            self._storage.remove(self._chunk_key(number))
        return True

    def tidy(self, wanted: Sequence[str]) -> None:
        """Remove all files except `wanted` and shards of this recipe in another number of shards.

        Another worker may be gathering those at the same time.
        """
        for name in self._storage.names(self.key):
            shard, dot, end = name.partition(".")
            if name in wanted:
                continue
            is_shard = dot and end in ("npy", "json") and shard.startswith("shard-")
            if is_shard and self._is_ours(shard):
                continue
            try:
                self._storage.remove(f"{self.key}/{name}")
            except FileNotFoundError:
                continue  # another worker removed it first

    def counts(self) -> list[int]:
        """Return the numbers N of all shards I of N of this recipe in the workspace, ascending."""
        found = set()
        for name in self._storage.names(self.key):
            shard, _, end = name.partition(".")
            number = shard.partition("-of-")[2]
            if end == "json" and number.isdecimal() and self._is_ours(shard):
                found.add(int(number))
        return sorted(found)

    def _remove_old_manifest(self) -> None:
        """Remove a manifest of different images before the first of its shards is replaced."""
        key = f"{self.key}/{MANIFEST}"
        found = self._workspace.read_json(key)
        if found and found.get("samples_fingerprint") != self._fingerprint:
            self._storage.remove(key)

    def _size(self, shard: Shard) -> int:
        header = len(npy(np.empty((0, *self._image), np.uint8)))
        return header + (shard.stop - shard.start) * math.prod(self._image)

    def _chunk_key(self, number: int) -> str:
        return f"{self._chunks}/chunk-{number:06d}"


def record_of(data: bytes) -> FileRecord:
    """Return the size and checksum of a file with this content."""
    return FileRecord(size=len(data), sha256=hashlib.sha256(data).hexdigest())


def npy(array: NDArray[Any]) -> bytes:
    """Return an array as the content of a .npy file."""
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return stream.getvalue()
