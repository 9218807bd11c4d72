"""S3 requests through boto3: a client, objects with checksums, and errors as messages.

boto3 finds the endpoint, region and credentials: AWS_ENDPOINT_URL, AWS_DEFAULT_REGION,
AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and its files. Retries are in retry.py.
"""

from __future__ import annotations

import errno
import hashlib
import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpm_core.errors import Corrupt, UserError, require
from ddpm_core.storage.base import Changed, Refused, Silent, Unreachable
from ddpm_core.storage.manifest import sha256_of
from ddpm_core.storage.retry import PATIENT, S3Retry, fetch_whole, retrying
from ddpm_core.text import sentence

CONNECTIONS = 16  # more than the cores: a request waits far longer than it transfers
PART = 2**24  # bytes; larger objects are uploaded in parts of this size
PAGE = 1000  # objects per list request
SHA256 = "sha256"  # key of an object's metadata
AWS = (".amazonaws.com", ".amazonaws.com.cn")

# Error codes by meaning; servers differ in which one they send.
ABSENT = {"404", "NoSuchKey", "NotFound"}
CONFLICT = {"412", "PreconditionFailed", "409", "ConditionalRequestConflict"}
DENIED = {
    "401",
    "403",
    "AccessDenied",
    "ExpiredToken",
    "Forbidden",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
    "XAdminUserNotFound",  # sent by versitygw, with status 404
}


def split(uri: str, setting: str) -> tuple[str, str]:
    """Return (bucket, key) of s3://bucket/key. Raises UserError that names the setting."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    parts = key.removesuffix("/").split("/")
    if not bucket or (key and set(parts) & {"", ".", ".."}):
        raise UserError(
            f"{setting}: got {uri!r}; must be s3://bucket/prefix, and no part of the prefix may be "
            "empty, . or .. (S3 keeps these as names; a directory cannot)."
        )
    return bucket, key


def connect(retry: S3Retry = PATIENT, anonymous: bool = False) -> Any:
    """Return a boto3 client. An anonymous client sends no credentials, even if there are some.

    Servers other than Amazon's get path-style URLs, http://server/bucket/key, because their
    buckets seldom have host names.
    """
    boto3, config = require("boto3", "s3"), require("botocore.config", "s3").Config
    settings: dict[str, Any] = {
        "retries": {"mode": "standard", "total_max_attempts": retry.attempts},
        "max_pool_connections": CONNECTIONS,
        "connect_timeout": retry.connect_timeout,
        "read_timeout": retry.read_timeout,
        "tcp_keepalive": True,
    }
    if anonymous:
        settings["signature_version"] = require("botocore", "s3").UNSIGNED
    try:
        # boto3 has many sources for the endpoint; only a client knows which one applies.
        client = boto3.client("s3", config=config(**settings))
        if not client.meta.endpoint_url.endswith(AWS):
            client = boto3.client("s3", config=config(**settings, s3={"addressing_style": "path"}))
    except (ValueError, require("botocore.exceptions", "s3").BotoCoreError) as error:
        raise UserError(
            f"Cannot create an S3 client: {sentence(str(error))} "
            "Check AWS_ENDPOINT_URL and the credentials."
        ) from error
    return client


@dataclass(frozen=True)
class ObjectInfo:
    """The size of an object, and the SHA-256 that its writer recorded ("" if none)."""

    size: int
    sha256: str


class Bucket:
    """The objects of a bucket by full name. Methods raise FileNotFoundError and Unreachable."""

    def __init__(self, client: Any, name: str) -> None:
        self.client, self.name = client, name
        config = require("boto3.s3.transfer", "s3").TransferConfig
        self._parts = config(
            multipart_threshold=PART, multipart_chunksize=PART, max_concurrency=CONNECTIONS // 2
        )

    def translate(self, name: str) -> Any:
        """Translate boto3's errors about an object into ours."""
        return translate_errors(self.client, self.name, f"s3://{self.name}/{name}")

    def info(self, name: str) -> ObjectInfo | None:
        """Return the size and checksum of an object, or None if it does not exist."""
        try:
            with self.translate(name):
                head = self.client.head_object(Bucket=self.name, Key=name)
        except FileNotFoundError:
            return None
        return ObjectInfo(int(head["ContentLength"]), str(head["Metadata"].get(SHA256, "")))

    def get(self, name: str) -> bytes:
        """Return an object's content. Raises Corrupt if it never matches the recorded SHA-256."""

        def fetch() -> bytes:
            response, data = self.get_response(name)
            recorded = response["Metadata"].get(SHA256)
            if recorded and recorded != hashlib.sha256(data).hexdigest():
                raise Corrupt(f"s3://{self.name}/{name} was damaged: its checksum differs.")
            return data

        return fetch_whole(fetch)

    def get_response(self, name: str, **options: str) -> tuple[dict[str, Any], bytes]:
        """Return the response of get_object, called with `options`, and the complete body.

        boto3 retries a request without a response, but not a body that breaks off or does not
        match the checksum in the response's header. This does, as often as boto3.
        """

        def fetch() -> tuple[dict[str, Any], bytes]:
            response = self.client.get_object(Bucket=self.name, Key=name, **options)
            return response, bytes(response["Body"].read())

        errors = require("botocore.exceptions", "s3")
        incomplete = (
            errors.HTTPClientError,
            errors.IncompleteReadError,
            errors.FlexibleChecksumError,
        )
        attempts = int(self.client.meta.config.retries["total_max_attempts"])
        with self.translate(name):
            return retrying(lambda error: isinstance(error, incomplete), attempts)(fetch)

    def put(self, name: str, data: bytes) -> str:
        """Write an object. Return its tag, or "" if it was uploaded in parts.

        A small object is one request, and the server compares its checksum.
        """
        checksum = hashlib.sha256(data).hexdigest()
        if len(data) > PART:
            self._upload(name, io.BytesIO(data), len(data), checksum)
            return ""
        with self.translate(name):
            response = self.client.put_object(
                Bucket=self.name, Key=name, Body=data, Metadata={SHA256: checksum}
            )
        return str(response["ETag"])

    def put_new(self, name: str, data: bytes) -> None:
        """Create an object. Raises Changed if another process has created it."""
        checksum = hashlib.sha256(data).hexdigest()
        try:
            self.put_if(name, data, None, {SHA256: checksum})
        except Changed:
            # If the response was lost, boto3 sends the request again and finds its own object.
            if self.get(name) != data:
                raise

    def put_if(self, name: str, data: bytes, tag: str | None, metadata: dict[str, str]) -> str:
        """Create an object (tag None) or replace the version with this tag; return the new tag.

        Raises Changed if another process was faster, and NotImplementedError if the server does
        not support conditional writes.
        """
        condition = {"IfNoneMatch": "*"} if tag is None else {"IfMatch": tag}
        errors = require("botocore.exceptions", "s3")
        with self.translate(name):
            try:
                response = self.client.put_object(
                    Bucket=self.name, Key=name, Body=data, Metadata=metadata, **condition
                )
            except errors.ClientError as error:
                code = _code(error)
                if code in CONFLICT or (tag and code in ("404", "NoSuchKey")):
                    raise Changed from error
                if code in ("NotImplemented", "501"):
                    raise NotImplementedError from error
                raise
        return str(response["ETag"])

    def upload(self, name: str, path: Path) -> None:
        """Write a file as an object."""
        with path.open("rb") as file:
            self._upload(name, file, path.stat().st_size, sha256_of(path))

    def _upload(self, name: str, file: Any, size: int, checksum: str) -> None:
        with self.translate(name):
            self.client.upload_fileobj(
                file,
                self.name,
                name,
                ExtraArgs={"Metadata": {SHA256: checksum}},
                Config=self._parts,
            )
        stored = self.info(name)
        if stored != ObjectInfo(size, checksum):
            raise Unreachable(
                f"The upload of s3://{self.name}/{name} is incomplete: the server has "
                f"{stored.size if stored else 0} of {size} bytes. Run the same command again."
            )

    def download(self, name: str, path: Path) -> None:
        """Write an object to a file."""
        with self.translate(name), path.open("wb") as file:
            self.client.download_fileobj(self.name, name, file, Config=self._parts)

    def copy(self, name: str, target: str) -> None:
        """Copy an object within the bucket; its content stays on the server."""
        info = self.info(name)
        metadata = {SHA256: info.sha256} if info and info.sha256 else {}
        with self.translate(name):
            self.client.copy(
                {"Bucket": self.name, "Key": name},
                self.name,
                target,
                ExtraArgs={"Metadata": metadata, "MetadataDirective": "REPLACE"},
                Config=self._parts,
            )

    def below(self, prefix: str) -> list[str]:
        """Return all names that begin with a prefix that ends in `/`."""
        return [item["Key"] for page in self._pages(prefix) for item in page.get("Contents", ())]

    def level(self, prefix: str) -> set[str]:
        """Return the names directly below a prefix that is empty or ends in `/`, without it."""
        found: set[str] = set()
        for page in self._pages(prefix, Delimiter="/"):
            found |= {item["Key"][len(prefix) :] for item in page.get("Contents", ())}
            found |= {item["Prefix"][len(prefix) : -1] for item in page.get("CommonPrefixes", ())}
        return found - {""}

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects with one request each, which every server supports."""
        for name in names:
            with self.translate(name):
                self.client.delete_object(Bucket=self.name, Key=name)

    def abort_uploads(self, prefix: str) -> None:
        """Drop the parts of unfinished uploads."""
        with self.translate(prefix):
            pages = self.client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self.name, Prefix=prefix
            )
            for page in pages:
                for upload in page.get("Uploads", ()):
                    self.client.abort_multipart_upload(
                        Bucket=self.name, Key=upload["Key"], UploadId=upload["UploadId"]
                    )

    def _pages(self, prefix: str, **options: str) -> Iterator[dict[str, Any]]:
        with self.translate(prefix):
            yield from self.client.get_paginator("list_objects_v2").paginate(
                Bucket=self.name, Prefix=prefix, PaginationConfig={"PageSize": PAGE}, **options
            )


@contextmanager
def translate_errors(client: Any, bucket: str, uri: str) -> Iterator[None]:
    """Raise FileNotFoundError, Unreachable or Corrupt instead of boto3's errors about `uri`."""
    errors = require("botocore.exceptions", "s3")
    families = (
        errors.BotoCoreError,
        errors.ClientError,
        require("boto3.exceptions", "s3").Boto3Error,
        require("botocore.parsers", "s3").ResponseParserError,
        require("s3transfer.exceptions", "s3").RetriesExceededError,
    )
    try:
        yield
    except errors.FlexibleChecksumError as error:
        raise Corrupt(f"{uri} was damaged: its checksum differs.") from error
    except families as error:
        last = getattr(error, "last_exception", error)  # the reason for RetriesExceededError
        raise _translated(last, str(client.meta.endpoint_url), bucket, uri) from error


def _translated(error: Exception, endpoint: str, bucket: str, uri: str) -> OSError:
    code, text = _code(error), " ".join(str(error).split())
    errors = require("botocore.exceptions", "s3")
    if code in ABSENT:
        return FileNotFoundError(errno.ENOENT, "There is no such object", uri)
    if code == "NoSuchBucket":
        return Unreachable(
            f"There is no bucket {bucket!r} at {endpoint}. Create it, or use another one."
        )
    if code in DENIED or isinstance(
        error, errors.NoCredentialsError | errors.PartialCredentialsError
    ):
        return Refused(
            f"The S3 server at {endpoint} refuses access to {uri} ({code or text.rstrip('.')}). "
            "Check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and the permissions of that key."
        )
    broken = isinstance(error, errors.ResponseStreamingError | errors.IncompleteReadError)
    silent = isinstance(error, errors.HTTPClientError | errors.ConnectionError)
    if broken or silent:
        problem = "closes connections early" if broken else "is unavailable"
        return Silent(
            f"The S3 server at {endpoint} {problem} ({type(error).__name__}). Check "
            "AWS_ENDPOINT_URL, then run the same command again."
        )
    response = getattr(error, "response", {}).get("ResponseMetadata", {})
    kind = Silent if response.get("HTTPStatusCode", 0) >= 500 else Unreachable
    return kind(f"S3 request failed for {uri}: {text.rstrip('.')}.")


def _code(error: Exception) -> str:
    """Return the server's error code, such as NoSuchKey; "" if there was no response."""
    response = getattr(error, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))
