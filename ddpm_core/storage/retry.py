"""The retry policies of S3 requests and of downloads.

Failure                                 Who retries                 How often
request fails, times out or gets 5xx    boto3, exponential backoff  `S3Retry.attempts`
response body breaks off                `retrying`                  `S3Retry.attempts`
content has a wrong checksum            `fetch_whole`               `CORRUPT_ATTEMPTS`
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ddpm_core.errors import Corrupt

if TYPE_CHECKING:
    from tenacity import Retrying

CORRUPT_ATTEMPTS = 3
T = TypeVar("T")


@dataclass(frozen=True)
class S3Retry:
    """How often an S3 client tries a request, and its timeouts in seconds."""

    attempts: int
    connect_timeout: float
    read_timeout: float


PATIENT = S3Retry(attempts=6, connect_timeout=5.0, read_timeout=60.0)
QUICK = S3Retry(attempts=2, connect_timeout=3.0, read_timeout=5.0)  # the lease must not wait long


def retrying(errors: type[Exception] | tuple[type[Exception], ...], attempts: int) -> Retrying:
    """Return a caller that repeats a function at once while it raises one of `errors`.

    After `attempts` calls the last error is raised.
    """
    # Imported here: it takes 40 ms, and commands on a directory never need it.
    from tenacity import Retrying, retry_if_exception_type, stop_after_attempt

    return Retrying(
        stop=stop_after_attempt(attempts), retry=retry_if_exception_type(errors), reraise=True
    )


def fetch_whole(fetch: Callable[[], T]) -> T:
    """Return the result of `fetch`, and call it again while it raises Corrupt.

    A bit that flips in transit is correct in the next copy. A file that is damaged in the storage
    is damaged in every copy, so the last Corrupt is raised.
    """
    return retrying(Corrupt, CORRUPT_ATTEMPTS)(fetch)
