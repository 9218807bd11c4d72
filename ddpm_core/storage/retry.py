"""The retry policies of storage, downloads and MLflow. That of Kubernetes is `Retry` in ddpm_kube.

Failure                                   Who retries                 How often
S3 request fails, times out or gets 5xx   boto3, exponential backoff  `S3Retry.attempts`
body of an S3 response breaks off         `Bucket.get_response`       `S3Retry.attempts`
content in storage has a wrong checksum   `fetch_whole`               `CORRUPT_ATTEMPTS`
download fails, gets 5xx or is corrupt    `web.fetch`                 `web.ATTEMPTS`
call to MLflow fails                      `tracking.client.retrying`  its `ATTEMPTS`
upload of a model to MLflow fails         MLflow                      `UPLOAD_RETRIES`
MLflow is unavailable during training     `Tracker._work`             until training ends
step of a pipeline meets Unavailable      `ddpm_kube.tasks.attempt`   its `ATTEMPTS`
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ddpm_core.errors import Corrupt

if TYPE_CHECKING:
    from tenacity import RetryCallState, Retrying

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


def retrying(
    is_temporary: Callable[[BaseException], bool],
    attempts: int,
    pause: float = 0.0,
    before_pause: Callable[[RetryCallState], None] | None = None,
) -> Retrying:
    """Return a caller that repeats a function while it raises temporary errors.

    The pause before the second attempt takes `pause` seconds, and doubles with each attempt. After
    `attempts` calls the last error is raised. `before_pause` is called before each pause.
    """
    # Imported here: it takes 40 ms, and most commands never retry.
    from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential

    return Retrying(
        retry=retry_if_exception(is_temporary),
        stop=stop_after_attempt(attempts),
        wait=wait_exponential(multiplier=pause),
        before_sleep=before_pause,
        reraise=True,
    )


def fetch_whole(fetch: Callable[[], T]) -> T:
    """Return the result of `fetch`, and call it again while it raises Corrupt.

    A bit that flips in transit is correct in the next copy. A file that is damaged in the storage
    is damaged in every copy, so the last Corrupt is raised.
    """
    return retrying(lambda error: isinstance(error, Corrupt), CORRUPT_ATTEMPTS)(fetch)
