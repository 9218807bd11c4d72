"""Pictures below an s3:// prefix, or in one archive there; credentials as boto3 finds them."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ddpm_core import console
from ddpm_core.data.archives import Tar, Zip, open_archive
from ddpm_core.data.sources import (
    FILE_BYTES,
    Entry,
    Found,
    Listing,
    Payload,
    Rejection,
    make_listing,
)
from ddpm_core.errors import UserError, require
from ddpm_core.storage.client import CONNECTIONS, connect, split

ARCHIVES = (".zip", ".tar", ".tgz", ".tar.gz", ".tbz2", ".tar.bz2", ".txz", ".tar.xz")
SETTING = "prepare.source"
PAGE = 1000  # objects listed by one request
_AHEAD_BYTES = 2**26


class Prefix:
    """All objects below a prefix but those below the URIs of `own`."""

    def __init__(self, uri: str, own: Sequence[str] = ()) -> None:
        self._bucket, self._prefix = split(uri, SETTING)
        self._client = connect()
        with _told(uri):
            self._objects = _objects(self._client, uri, own)
        self.facts: dict[str, Any] = {"uri": uri, "state": _state(self._objects)}

    def listing(self) -> Listing:
        return make_listing(
            Found(name, facts["Size"], ref, partial(self._head, facts["Key"]))
            for ref, (name, facts) in enumerate(self._objects.items())
        )

    def read(self, entries: Sequence[Entry]) -> Iterator[tuple[int, Payload]]:
        """In order; some are fetched ahead, bounded in number and in bytes."""
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
        if entry.size > FILE_BYTES:
            return Rejection(entry.name, f"{entry.size:,} bytes; at most {FILE_BYTES:,} are read")
        facts = self._objects[entry.name]
        with _told(f"s3://{self._bucket}/{facts['Key']}"):
            found = self._client.get_object(
                Bucket=self._bucket, Key=facts["Key"], IfMatch=facts["ETag"]
            )
            return bytes(found["Body"].read())

    def _head(self, key: str, count: int) -> bytes:
        with _told(f"s3://{self._bucket}/{key}"):
            found = self._client.get_object(
                Bucket=self._bucket, Key=key, Range=f"bytes=0-{count - 1}"
            )
            return bytes(found["Body"].read())


def open_s3(uri: str, scratch: Path, own: Sequence[str] = ()) -> Prefix | Zip | Tar:
    """The archive that `uri` names, fetched into `scratch`, or all objects below the prefix."""
    bucket, key = split(uri, SETTING)
    if not key.lower().endswith(ARCHIVES):
        return Prefix(uri, own)
    client, path = connect(), scratch / "archive"
    with _told(uri):
        facts = client.head_object(Bucket=bucket, Key=key)
        with console.progress(f"fetch {uri}", int(facts["ContentLength"]), "bytes") as advance:
            client.download_file(bucket, key, str(path), Callback=advance)
    archive = open_archive(path, uri)
    archive.facts["etag"] = facts["ETag"].strip('"')
    archive.facts["state"] = s3_state(uri)
    return archive


def s3_state(uri: str, own: Sequence[str] = ()) -> dict[str, Any]:
    """Changes with any object below the prefix, or with the archive."""
    with _told(uri):
        return _state(_objects(connect(), uri, own))


def _state(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    lines = sorted(
        f"{facts['Key']}\0{facts['ETag']}\0{facts['Size']}" for facts in objects.values()
    )
    checksum = hashlib.sha256("\0\0".join(lines).encode("utf-8", "surrogateescape")).hexdigest()
    return {"objects": len(lines), "sha256": checksum}


def _objects(client: Any, uri: str, own: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Facts of the objects by their names relative to the prefix, a folder: `photos` does not
    include `photos-old/1.jpg`. Of an archive its own."""
    bucket, key = split(uri, SETTING)
    passed = tuple(place.rstrip("/").removeprefix(f"s3://{bucket}/") + "/" for place in own)
    archive = key.lower().endswith(ARCHIVES)
    prefix = key if archive or not key or key.endswith("/") else key + "/"
    pages = client.get_paginator("list_objects_v2").paginate(
        Bucket=bucket, Prefix=prefix, PaginationConfig={"PageSize": PAGE}
    )
    found = {facts["Key"]: facts for page in pages for facts in page.get("Contents", ())}
    if archive:
        return {key: found[key]} if key in found else {}
    named = {
        name.removeprefix(prefix).lstrip("/"): facts
        for name, facts in found.items()
        if not name.startswith(passed)
    }
    return {name: facts for name, facts in named.items() if name and not name.endswith("/")}


@contextmanager
def _told(uri: str) -> Iterator[None]:
    errors = require("botocore.exceptions", "s3")
    try:
        yield
    except (errors.BotoCoreError, errors.ClientError) as error:
        raise UserError(
            f"Cannot read {uri}: {error} Check the bucket, AWS_ENDPOINT_URL and the credentials."
        ) from error
