"""Classify errors of MLflow calls, and describe them in one short sentence."""

from __future__ import annotations

import errno
import socket
import sqlite3
from collections.abc import Iterator

from ddpm_core.errors import UserError
from ddpm_core.runtime.memory import shortage
from ddpm_core.storage.staging import FULL
from ddpm_core.text import masked, sentence

REJECTIONS = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE", "BAD_REQUEST")
# Exceptions of these packages come from this program or this machine, not from MLflow.
OWN = ("builtins", "shutil", "ddpm_core", "torch", "numpy", "pydantic")
UNREACHABLE = (errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH)
MAX_LENGTH = 300  # characters of a message from another library


def is_rejection(error: Exception) -> bool:
    """Return whether the server answered, and rejected the content of the request."""
    return getattr(error, "error_code", "") in REJECTIONS


def is_mlflow_error(error: Exception) -> bool:
    """Return whether an error comes from MLflow or from the network.

    Other errors are bugs of this program, or trouble of this machine such as a full disk.
    """
    if type(error).__module__.partition(".")[0] not in OWN:
        return True
    # ModuleNotFoundError: the driver of the tracking database is not installed.
    network = (ConnectionError, TimeoutError, ModuleNotFoundError)
    return isinstance(error, network) or getattr(error, "errno", None) in UNREACHABLE


def is_transient(error: BaseException) -> bool:
    """Return whether a later attempt can succeed: true for all but bugs of this program."""
    if not isinstance(error, Exception):
        return False
    outside = isinstance(error, OSError | UserError)  # a full disk; a deleted experiment
    return is_mlflow_error(error) or outside or bool(shortage(error))


def reason(error: Exception) -> str:
    """Describe an error in one short sentence without passwords."""
    if short := shortage(error):
        return f"out of memory ({type(short).__name__})."
    for cause in _causes(error):
        if meaning := _meaning(cause):
            return masked(meaning)
    text = sentence(masked(" ".join(str(error).split())) or type(error).__name__)
    return text if len(text) <= MAX_LENGTH else f"{text[: MAX_LENGTH - 3]}..."


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and every error that it was raised from or wraps."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        yield error
        seen.append(error)
        context = None if error.__suppress_context__ else error.__context__
        # SQLAlchemy stores the driver's error in `orig`.
        error = error.__cause__ or getattr(error, "orig", None) or context


def _meaning(error: BaseException) -> str:
    """Return what an error of the network, a disk or SQLite means, or ""."""
    if isinstance(error, ConnectionRefusedError):
        return "the connection was refused."
    if isinstance(error, TimeoutError):
        return "the request timed out."
    if isinstance(error, socket.gaierror):
        return "the host name is unknown."
    code = getattr(error, "sqlite_errorcode", None)
    if code == sqlite3.SQLITE_FULL or (isinstance(error, OSError) and error.errno in FULL):
        path = getattr(error, "filename2", None) or getattr(error, "filename", None)
        return f"the disk is full{f' at {path}' if path else ''}. Free some space there."
    return ""
