"""What an error of MLflow, or of the libraries below it, means: whose it is, and in which words."""

from __future__ import annotations

import errno
import socket
import sqlite3
from collections.abc import Iterator

from ddpm_core.errors import UserError
from ddpm_core.runtime.memory import shortage
from ddpm_core.storage.staging import FULL
from ddpm_core.text import masked, sentence

REFUSALS = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE", "BAD_REQUEST")
# Exceptions of these packages come from this program or this machine, not from MLflow.
OWN = ("builtins", "shutil", "ddpm_core", "torch", "numpy", "pydantic")
UNREACHABLE = (errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH)
LONGEST = 300  # characters of a message that is not ours


def is_refusal(error: Exception) -> bool:
    """Return whether a server that answers will not accept what it was sent."""
    return getattr(error, "error_code", "") in REFUSALS


def is_mlflows(error: Exception) -> bool:
    """Return whether an error comes from MLflow or from the network.

    Other errors are a mistake of this program, or trouble of this machine such as a full disk.
    """
    if type(error).__module__.partition(".")[0] not in OWN:
        return True
    away = (ConnectionError, TimeoutError, ModuleNotFoundError)  # the last of a database's driver
    return isinstance(error, away) or getattr(error, "errno", None) in UNREACHABLE


def may_pass(error: Exception) -> bool:
    """Return whether a retry can help: MLflow, a disk or memory is short; no mistake of ours."""
    return is_mlflows(error) or isinstance(error, OSError | UserError) or bool(shortage(error))


def reason(error: Exception) -> str:
    """Describe an error in one short sentence without passwords."""
    if short := shortage(error):
        return f"out of memory ({type(short).__name__})."
    for cause in _causes(error):
        if meaning := _meaning(cause):
            return masked(meaning)
    text = sentence(masked(" ".join(str(error).split())) or type(error).__name__)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the ones that it was raised from or wraps."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        yield error
        seen.append(error)
        context = None if error.__suppress_context__ else error.__context__
        error = error.__cause__ or getattr(error, "orig", None) or context


def _meaning(error: BaseException) -> str:
    """Return what an error of the network, a disk or SQLite means to a person, or ""."""
    if isinstance(error, ConnectionRefusedError):
        return "the connection was refused."
    if isinstance(error, TimeoutError):
        return "it does not answer in time."
    if isinstance(error, socket.gaierror):
        return "the host name is unknown."
    code = getattr(error, "sqlite_errorcode", None)
    if code == sqlite3.SQLITE_FULL or (isinstance(error, OSError) and error.errno in FULL):
        place = getattr(error, "filename2", None) or getattr(error, "filename", None)
        return f"the disk is full{f' at {place}' if place else ''}. Free some space there."
    return ""
