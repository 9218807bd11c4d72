"""What lies on disk while samples are drawn: chunks as soon as they are there, then shards.

Whoever draws writes the same bytes under the same name, so that shards may be repeated, drawn
twice at once, or cut anew: a name holds the same images whoever was last.
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
from ddpm_core.sampling.plan import Shard
from ddpm_core.storage import MANIFEST
from ddpm_core.storage.files import Count, Schema
from ddpm_core.storage.workspace import Workspace, samples_key

DIGEST = 32  # bytes of SHA-256 before the pixels of a chunk


class Record(Schema):
    """What stands beside a shard, in shard-III-of-NNN.json."""

    samples_fingerprint: str
    start: Count
    stop: Count
    size: Count
    sha256: str


class ShardStore:
    """The chunks and shards of one recipe (see plan.recipe)."""

    def __init__(self, workspace: Workspace, recipe: dict[str, Any]) -> None:
        self._storage = workspace.storage
        self._workspace = workspace
        self._fingerprint = recipe["samples_fingerprint"]
        size, channels = int(recipe["image_size"]), int(recipe["channels"])
        self._image = (size, size, channels)
        self.key = samples_key(recipe["step"])
        self._chunks = f"{self.key}/parts-{self._fingerprint}"

    def chunk(self, number: int, count: int) -> Pixels | None:
        """The `count` images of a chunk, uint8 (count, H, W, C); None if it isn't there whole."""
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
        pixels = np.ascontiguousarray(images).tobytes()
        try:
            self._storage.write(self._chunk_key(number), hashlib.sha256(pixels).digest() + pixels)
        except FileNotFoundError:
            # Somebody gathered this moment and removed the folder of chunks: nobody needs it.
            return

    def problem(self, shard: Shard) -> str:
        """Why a shard is not there as this recipe makes it, in two words or so; "" if it is."""
        return self._problem(shard, self._record(shard))

    def listed(self, shard: Shard) -> dict[str, Any]:
        """Return size and checksum of a shard that has no `problem`.

        Raises Corrupt if its record or size has changed since; its content is not hashed again.
        """
        record = self._record(shard)
        if problem := self._problem(shard, record, content=False):
            raise Corrupt(f"{self.key}/{shard.name}: {problem}.")
        return {name: record[name] for name in ("size", "sha256")}

    def _record(self, shard: Shard) -> dict[str, Any]:
        return self._workspace.read_json(f"{self.key}/{shard.name}.json", Record)

    def _problem(self, shard: Shard, record: dict[str, Any], content: bool = True) -> str:
        key = f"{self.key}/{shard.name}"
        if not record:
            return "missing"
        if record["samples_fingerprint"] != self._fingerprint:
            return "of other settings"
        there = (record["start"], record["stop"], record["size"])
        if there != (shard.start, shard.stop, self._size(shard)):
            return "of other images"
        size = self._storage.size(f"{key}.npy")
        if size is None:
            return "missing"
        if size != record["size"]:
            return "damaged"
        if content and self._storage.checksum(f"{key}.npy") != record["sha256"]:
            return "damaged"
        return ""

    def finish(self, shard: Shard) -> bool:
        """Make a shard of its chunks; False if some are not there. Its record comes last."""
        chunks = []
        for number in shard.chunks:
            pixels = self.chunk(number, len(shard.images(number)))
            if pixels is None:
                return not self.problem(shard)  # somebody else made it, and removed its chunks
            chunks.append(pixels)
        data = npy(np.concatenate([np.empty((0, *self._image), np.uint8), *chunks]))
        key = f"{self.key}/{shard.name}"
        self._forget_others()
        self._storage.write(f"{key}.npy", data)
        record = {
            "samples_fingerprint": self._fingerprint,
            "start": shard.start,
            "stop": shard.stop,
            **facts_of(data),
        }
        self._workspace.write_json(f"{key}.json", record)
        for number in shard.chunks:
            self._storage.remove(self._chunk_key(number))
        return True

    def tidy(self, wanted: Sequence[str]) -> None:
        """Remove what is not `wanted`, but for shards of this recipe in another number of shards.

        Another gatherer may just be listing them.
        """
        for name in self._storage.names(self.key):
            shard, dot, end = name.partition(".")
            if name in wanted:
                continue
            if dot and end in ("npy", "json") and shard.startswith("shard-"):
                record = self._workspace.read_json(f"{self.key}/{shard}.json", Record)
                if record.get("samples_fingerprint") == self._fingerprint:
                    continue
            try:
                self._storage.remove(f"{self.key}/{name}")
            except FileNotFoundError:
                continue  # another gatherer was quicker

    def counts(self) -> list[int]:
        """The numbers of shards that this recipe's shards on disk are cut into."""
        found = set()
        for name in self._storage.names(self.key):
            _, of, number = name.removesuffix(".json").partition("-of-")
            if name.endswith(".json") and of and number.isdecimal():
                record = self._workspace.read_json(f"{self.key}/{name}", Record)
                if record.get("samples_fingerprint") == self._fingerprint:
                    found.add(int(number))
        return sorted(found)

    def _forget_others(self) -> None:
        """Remove a manifest of other images before the first of its shards is replaced."""
        key = f"{self.key}/{MANIFEST}"
        found = self._workspace.read_json(key)
        if found and found.get("samples_fingerprint") != self._fingerprint:
            self._storage.remove(key)

    def _size(self, shard: Shard) -> int:
        header = len(npy(np.empty((0, *self._image), np.uint8)))
        return header + (shard.stop - shard.start) * math.prod(self._image)

    def _chunk_key(self, number: int) -> str:
        return f"{self._chunks}/chunk-{number:06d}"


def facts_of(data: bytes) -> dict[str, Any]:
    """What a manifest says of a file."""
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def npy(array: NDArray[Any]) -> bytes:
    """An array as a .npy file."""
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return stream.getvalue()
