"""Images below an s3:// prefix, or in one archive, parquet file or array in S3."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ddpm_core import console
from ddpm_core.data.names import shard_kind
from ddpm_core.data.sources.base import (
    Entry,
    Found,
    Listing,
    Payload,
    Rejection,
    Source,
    make_listing,
    size_problem,
)
from ddpm_core.data.sources.file import open_file
from ddpm_core.data.sources.sidecars import FIND, Columns
from ddpm_core.errors import UserError
from ddpm_core.storage import fetch_whole
from ddpm_core.storage.base import Refused
from ddpm_core.storage.bucket import CONNECTIONS, PAGE, Bucket, connect, split

SETTING = "prepare.source"
_AHEAD_BYTES = 2**26  # of images that are fetched but not yet used


@dataclass(frozen=True, slots=True)
class _Object:
    """What S3 lists of an object."""

    key: str
    etag: str
    size: int


class Prefix:
    """All objects below a prefix, except those below the URIs in `excluded`."""

    def __init__(
        self,
        uri: str,
        excluded: Sequence[str] = (),
        anonymous: bool = False,
        columns: Columns = FIND,
    ) -> None:
        self._bucket, key = _bucket(uri, anonymous)
        self._columns = columns
        self._objects = _objects(self._bucket, key, excluded)
        self.facts: dict[str, Any] = {"uri": uri, "state": _state(self._objects)}

    def listing(self) -> Listing:
        """Return the objects; reads the first bytes of those without an image's extension."""
        found = (
            Found(name, item.size, ref, partial(self._head, item.key))
            for ref, (name, item) in enumerate(self._objects.items())
        )
        return make_listing(found, self._columns)

    def read(self, entries: Sequence[Entry]) -> Iterator[tuple[int, Payload]]:
        """Yield contents in order. Threads fetch some ahead, limited in number and in bytes."""
        # Position, size and future content of the objects being fetched; `held` is their size.
        waiting: deque[tuple[int, int, Future[Payload]]] = deque()
        held = 0
        with ThreadPoolExecutor(CONNECTIONS) as readers:
            for position, entry in enumerate(entries):
                while waiting and (len(waiting) >= 2 * CONNECTIONS or held >= _AHEAD_BYTES):
                    first, size, future = waiting.popleft()
                    held -= size
                    yield first, future.result()
                waiting.append((position, entry.size, readers.submit(self._content, entry)))
                held += entry.size
            for first, _, future in waiting:
                yield first, future.result()

    def _content(self, entry: Entry) -> Payload:
        if problem := size_problem(entry.size):
            return Rejection(entry.name, problem)
        listed = self._objects[entry.name]
        # Fails if the object has changed since it was listed.
        return self._get(listed.key, IfMatch=listed.etag)

    def _head(self, key: str, count: int) -> bytes:
        return self._get(key, Range=f"bytes=0-{count - 1}")

    def _get(self, key: str, **options: str) -> bytes:
        with _user_errors(self._bucket, key):
            return self._bucket.get_response(key, **options)[1]


def open_s3(
    uri: str,
    scratch: Path,
    excluded: Sequence[str] = (),
    anonymous: bool = False,
    columns: Columns = FIND,
) -> Source:
    """Open all objects below a prefix, or fetch the file that `uri` names into `scratch`."""
    if not shard_kind(split(uri, SETTING)[1]):
        return Prefix(uri, excluded, anonymous, columns)
    bucket, key = _bucket(uri, anonymous)
    client, path = bucket.client, scratch / "file"
    with _user_errors(bucket, key):
        facts = client.head_object(Bucket=bucket.name, Key=key)

    def fetch() -> None:
        length = int(facts["ContentLength"])
        with (
            _user_errors(bucket, key),
            console.progress(f"fetch {uri}", length, "bytes") as advance,
        ):
            client.download_file(bucket.name, key, str(path), Callback=advance)

    fetch_whole(fetch)
    source = open_file(path, uri, columns)
    source.facts["etag"] = facts["ETag"].strip('"')
    source.facts["state"] = s3_state(uri, anonymous=anonymous)
    return source


def s3_state(uri: str, excluded: Sequence[str] = (), anonymous: bool = False) -> dict[str, Any]:
    """Return facts that change with any object below the prefix, or with the file."""
    return _state(_objects(*_bucket(uri, anonymous), excluded))


def _bucket(uri: str, anonymous: bool) -> tuple[Bucket, str]:
    """Return the bucket and key of a URI. Raises UserError."""
    name, key = split(uri, SETTING)
    return Bucket(connect(anonymous=anonymous), name), key


def _state(objects: dict[str, _Object]) -> dict[str, Any]:
    lines = sorted(f"{found.key}\0{found.etag}\0{found.size}" for found in objects.values())
    checksum = hashlib.sha256("\0\0".join(lines).encode("utf-8", "surrogateescape")).hexdigest()
    return {"objects": len(lines), "sha256": checksum}


def _objects(bucket: Bucket, key: str, excluded: Sequence[str]) -> dict[str, _Object]:
    """Return the objects below a prefix, by their name relative to it, or only one file.

    A prefix is a folder: `photos` does not include `photos-old/1.jpg`.
    """
    skipped = tuple(
        place.rstrip("/").removeprefix(f"s3://{bucket.name}/") + "/" for place in excluded
    )
    if shard_kind(key):  # a public bucket may allow no listing
        with _user_errors(bucket, key):
            head = bucket.client.head_object(Bucket=bucket.name, Key=key)
        return {key: _Object(key, head["ETag"], head["ContentLength"])}
    prefix = key if not key or key.endswith("/") else key + "/"
    with _user_errors(bucket, key):
        pages = bucket.client.get_paginator("list_objects_v2").paginate(
            Bucket=bucket.name, Prefix=prefix, PaginationConfig={"PageSize": PAGE}
        )
        found = [
            _Object(facts["Key"], facts["ETag"], facts["Size"])
            for page in pages
            for facts in page.get("Contents", ())
        ]
    named = {
        item.key.removeprefix(prefix).lstrip("/"): item
        for item in found
        if not item.key.startswith(skipped)
    }
    # Consoles create empty objects whose names end with / to show folders.
    return {name: item for name, item in named.items() if name and not name.endswith("/")}


@contextmanager
def _user_errors(bucket: Bucket, key: str) -> Iterator[None]:
    try:
        with bucket.translate(key):
            yield
    except FileNotFoundError as error:
        raise UserError(
            f"{SETTING}: s3://{bucket.name}/{key} does not exist, or was deleted meanwhile."
        ) from error
    except Refused as error:
        raise Refused(
            f"{error} Public buckets require prepare.anonymous=true, all others false."
        ) from error
