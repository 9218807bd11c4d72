"""The retry policy of downloads over HTTP. Apart from retry.py, since these imports take 30 ms."""

from __future__ import annotations

import http.client
import urllib.error
from collections.abc import Callable

from ddpm_core.errors import Corrupt
from ddpm_core.storage.retry import retrying

ATTEMPTS = 3
PAUSE = 1.0  # seconds before the second attempt; doubles with each attempt
# What urllib raises while it connects and reads.
ERRORS = (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError)


def fetch(download: Callable[[], None]) -> None:
    """Call `download`, and again after temporary ERRORS and after Corrupt."""
    retrying(_is_temporary, ATTEMPTS, PAUSE)(download)


def _is_temporary(error: BaseException) -> bool:
    if isinstance(error, urllib.error.HTTPError):
        return error.code >= 500
    return isinstance(error, (*ERRORS, Corrupt))
