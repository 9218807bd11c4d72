"""Files to a bucket and back: in parts where they are large, with their checksum beside them."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpm_core.errors import Corrupt, require
from ddpm_core.storage.base import Changed, Unreachable, fetch_whole
from ddpm_core.storage.client import CONNECTIONS, LOST, broken_off, checksum_error, code_of, told
from ddpm_core.storage.sealing import sha256_of

PART = 2**24  # bytes of a part of a larger object
PAGE = 1000  # objects listed, or removed, by one request
SHA256 = "sha256"  # of an object's metadata


@dataclass(frozen=True)
class Facts:
    """What a server tells of an object; `sha256` is "" where its writer did not say."""

    size: int
    sha256: str


class Bucket:
    """A bucket's objects by their whole names. Raises FileNotFoundError and Unreachable."""

    def __init__(self, client: Any, name: str) -> None:
        self.client, self.name = client, name
        config = require("boto3.s3.transfer", "s3").TransferConfig
        self._parts = config(
            multipart_threshold=PART, multipart_chunksize=PART, max_concurrency=CONNECTIONS // 2
        )

    def told(self, name: str) -> Any:
        return told(self.client, self.name, f"s3://{self.name}/{name}")

    def facts(self, name: str) -> Facts | None:
        try:
            with self.told(name):
                head = self.client.head_object(Bucket=self.name, Key=name)
        except FileNotFoundError:
            return None
        return Facts(int(head["ContentLength"]), str(head["Metadata"].get(SHA256, "")))

    def get(self, name: str) -> bytes:
        """Raises Corrupt where the content is not what its writer recorded, however often asked."""

        def fetch() -> bytes:
            found, data = self.answer(name)
            recorded = found["Metadata"].get(SHA256)
            if recorded and recorded != hashlib.sha256(data).hexdigest():
                raise Corrupt(f"s3://{self.name}/{name} was damaged: its checksum differs.")
            return data

        return fetch_whole(fetch)

    def answer(self, name: str, **asked: str) -> tuple[dict[str, Any], bytes]:
        """What the server tells of an object, and all of its bytes; `asked` are for get_object.

        boto3 asks again where no answer begins, and not where one breaks off or has another
        checksum than its head gives.
        """
        left = int(self.client.meta.config.retries["total_max_attempts"])
        with self.told(name):
            while True:
                found = self.client.get_object(Bucket=self.name, Key=name, **asked)
                try:
                    return found, bytes(found["Body"].read())
                except (*broken_off(), checksum_error()):
                    left -= 1
                    if not left:
                        raise

    def put(self, name: str, data: bytes) -> str:
        """Small objects in one request, whose checksum the server compares; the tag, if so."""
        checksum = hashlib.sha256(data).hexdigest()
        if len(data) > PART:
            self._upload(name, io.BytesIO(data), len(data), checksum)
            return ""
        with self.told(name):
            answer = self.client.put_object(
                Bucket=self.name, Key=name, Body=data, Metadata={SHA256: checksum}
            )
        return str(answer["ETag"])

    def put_new(self, name: str, data: bytes) -> None:
        """Where there is no such object yet. Raises Changed if there is another."""
        checksum = hashlib.sha256(data).hexdigest()
        try:
            put_if(self, name, data, None, {SHA256: checksum})
        except Changed:
            # An answer that was lost on its way makes boto3 ask again, and meet its own object.
            if self.get(name) != data:
                raise

    def upload(self, name: str, path: Path) -> None:
        with path.open("rb") as file:
            self._upload(name, file, path.stat().st_size, sha256_of(path))

    def _upload(self, name: str, file: Any, size: int, checksum: str) -> None:
        with self.told(name):
            self.client.upload_fileobj(
                file,
                self.name,
                name,
                ExtraArgs={"Metadata": {SHA256: checksum}},
                Config=self._parts,
            )
        arrived = self.facts(name)
        if arrived != Facts(size, checksum):
            came = arrived.size if arrived else 0
            raise Unreachable(f"Of s3://{self.name}/{name} {came} of {size} bytes arrived.")

    def download(self, name: str, path: Path) -> None:
        with self.told(name), path.open("wb") as file:
            self.client.download_fileobj(self.name, name, file, Config=self._parts)

    def copy(self, name: str, target: str) -> None:
        """Within the bucket, by the server."""
        facts = self.facts(name)
        known = {SHA256: facts.sha256} if facts and facts.sha256 else {}
        with self.told(name):
            self.client.copy(
                {"Bucket": self.name, "Key": name},
                self.name,
                target,
                ExtraArgs={"Metadata": known, "MetadataDirective": "REPLACE"},
                Config=self._parts,
            )

    def below(self, prefix: str) -> list[str]:
        """All names that begin with a prefix, which ends in `/`."""
        return [item["Key"] for page in self._pages(prefix) for item in page.get("Contents", ())]

    def level(self, prefix: str) -> set[str]:
        """Names directly below a prefix that ends in `/`, or is empty, without it."""
        found: set[str] = set()
        for page in self._pages(prefix, Delimiter="/"):
            found |= {item["Key"][len(prefix) :] for item in page.get("Contents", ())}
            found |= {item["Prefix"][len(prefix) : -1] for item in page.get("CommonPrefixes", ())}
        return found - {""}

    def remove(self, names: Iterable[str]) -> None:
        """One request each: every server has it, and a folder holds few."""
        for name in names:
            with self.told(name):
                self.client.delete_object(Bucket=self.name, Key=name)

    def abort_uploads(self, prefix: str) -> None:
        """Drop the parts of uploads that were never ended."""
        with self.told(prefix):
            pages = self.client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self.name, Prefix=prefix
            )
            for page in pages:
                for upload in page.get("Uploads", ()):
                    self.client.abort_multipart_upload(
                        Bucket=self.name, Key=upload["Key"], UploadId=upload["UploadId"]
                    )

    def _pages(self, prefix: str, **given: str) -> Iterator[dict[str, Any]]:
        with self.told(prefix):
            yield from self.client.get_paginator("list_objects_v2").paginate(
                Bucket=self.name, Prefix=prefix, PaginationConfig={"PageSize": PAGE}, **given
            )


def put_if(
    bucket: Bucket, name: str, data: bytes, tag: str | None, metadata: dict[str, str]
) -> str:
    """Put an object where there is none (tag None) or in place of the version with this tag.

    The new version's tag. Raises Changed where another was quicker, and NotImplementedError where
    the server has no conditional put.
    """
    condition = {"IfNoneMatch": "*"} if tag is None else {"IfMatch": tag}
    errors = require("botocore.exceptions", "s3")
    with bucket.told(name):
        try:
            answer = bucket.client.put_object(
                Bucket=bucket.name, Key=name, Body=data, Metadata=metadata, **condition
            )
        except errors.ClientError as error:
            if code_of(error) in LOST or (tag and code_of(error) in ("404", "NoSuchKey")):
                raise Changed from error
            if code_of(error) in ("NotImplemented", "501"):
                raise NotImplementedError from error
            raise
    return str(answer["ETag"])
