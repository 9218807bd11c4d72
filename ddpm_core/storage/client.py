"""boto3's client for S3, and what it raises, as sentences.

Endpoint, region and credentials are found as boto3 finds them: AWS_ENDPOINT_URL,
AWS_DEFAULT_REGION, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and its files.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ddpm_core.errors import Corrupt, UserError, require
from ddpm_core.storage.base import Refused, Unreachable
from ddpm_core.text import sentence

CONNECTIONS = 16  # a request waits far longer than it transfers
ATTEMPTS = 6
AWS = (".amazonaws.com", ".amazonaws.com.cn")
ABSENT = {"404", "NoSuchKey", "NotFound"}
LOST = {"412", "PreconditionFailed", "409", "ConditionalRequestConflict"}
REFUSED = {
    "401",
    "403",
    "AccessDenied",
    "ExpiredToken",
    "Forbidden",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
    "XAdminUserNotFound",  # of versitygw, with the status 404
}


def split(uri: str, setting: str) -> tuple[str, str]:
    """(bucket, key) of s3://bucket/key. Raises UserError, naming the setting."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    parts = key.removesuffix("/").split("/")
    if not bucket or (key and set(parts) & {"", ".", ".."}):
        raise UserError(
            f"{setting}: {uri!r} given; s3://bucket/prefix is needed, where no part of the prefix "
            "is empty, . or .. (they are names in S3, and not what a folder has)."
        )
    return bucket, key


def connect(
    attempts: int = ATTEMPTS,
    connecting: float = 5.0,
    reading: float = 60.0,
    anonymous: bool = False,
) -> Any:
    """A client that tries `attempts` times, and waits so many seconds for an answer.

    An anonymous one sends no keys, not even those there are.

    A server that is not Amazon's is asked for http://server/bucket/key: names of buckets are
    seldom names of hosts there.
    """
    boto3, config = require("boto3", "s3"), require("botocore.config", "s3").Config
    settings: dict[str, Any] = {
        "retries": {"mode": "standard", "total_max_attempts": attempts},
        "max_pool_connections": CONNECTIONS,
        "connect_timeout": connecting,
        "read_timeout": reading,
        "tcp_keepalive": True,
    }
    if anonymous:
        settings["signature_version"] = require("botocore", "s3").UNSIGNED
    try:
        client = boto3.client("s3", config=config(**settings))
        if not client.meta.endpoint_url.endswith(AWS):
            client = boto3.client("s3", config=config(**settings, s3={"addressing_style": "path"}))
    except (ValueError, require("botocore.exceptions", "s3").BotoCoreError) as error:
        raise UserError(
            f"S3 cannot be used: {sentence(str(error))} "
            "Look at AWS_ENDPOINT_URL and the credentials."
        ) from error
    return client


def code_of(error: Exception) -> str:
    """The server's code of an error, such as NoSuchKey; "" where it gave none."""
    response = getattr(error, "response", None) or {}  # None where no answer came
    return str(response.get("Error", {}).get("Code", ""))


def broken_off() -> tuple[type[Exception], ...]:
    """What boto3 raises where an answer does not come, or not to its end."""
    errors = require("botocore.exceptions", "s3")
    return errors.HTTPClientError, errors.IncompleteReadError


def checksum_error() -> type[Exception]:
    """What boto3 raises where a body does not match the checksum that the server sends with it."""
    error: type[Exception] = require("botocore.exceptions", "s3").FlexibleChecksumError
    return error


@contextmanager
def told(client: Any, bucket: str, what: str) -> Iterator[None]:
    """Turn what boto3 raises into FileNotFoundError, Unreachable or Corrupt; `what` is a URI."""
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
    except checksum_error() as error:
        raise Corrupt(f"{what} was damaged: its checksum differs.") from error
    except families as error:
        last = getattr(error, "last_exception", error)  # of several tries
        raise _translated(last, str(client.meta.endpoint_url), bucket, what) from error


def _translated(error: Exception, endpoint: str, bucket: str, what: str) -> OSError:
    code, text = code_of(error), " ".join(str(error).split())
    for known in (*REFUSED, "NoSuchBucket"):  # a failed upload keeps the code in its text alone
        code = code or (known if f"({known})" in text else "")
    errors = require("botocore.exceptions", "s3")
    if code in ABSENT:
        return FileNotFoundError(errno.ENOENT, "There is no such object", what)
    if code == "NoSuchBucket":
        return Unreachable(
            f"There is no bucket {bucket!r} at {endpoint}: make it first, or give another."
        )
    if code in REFUSED or isinstance(
        error, errors.NoCredentialsError | errors.PartialCredentialsError
    ):
        return Refused(
            f"The S3 server at {endpoint} refuses access to {what} ({code or text.rstrip('.')}): "
            "look at AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and the rights of that key."
        )
    halves = isinstance(error, errors.ResponseStreamingError | errors.IncompleteReadError)
    silent = isinstance(error, errors.HTTPClientError | errors.ConnectTimeoutError)
    if halves or silent or "Could not connect" in text:
        does = "breaks its answers off" if halves else "does not answer"
        return Unreachable(
            f"The S3 server at {endpoint} {does} ({type(error).__name__}): look at "
            "AWS_ENDPOINT_URL, and run the same command again once it is there."
        )
    return Unreachable(f"S3 failed at {what}: {text.rstrip('.')}.")
