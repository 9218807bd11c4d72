"""Recognize errors that mean out of memory, and report them with what to change.

Nothing here imports torch: that import is among what fails where memory is short.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ddpm_core.errors import Interrupted, UserError

# Of libraries that raise RuntimeError or ImportError for everything: PyTorch's allocators, C++'s,
# oneDNN's, cuBLAS's and cuDNN's, and the dynamic linker's.
_TEXTS = (
    "out of memory",
    "allocate memory",
    "not enough memory",
    "std::bad_alloc",
    "could not create a primitive",
    "_STATUS_ALLOC_FAILED",
    "failed to map segment from shared object",
)
_DENIED = "Operation not permitted"  # the linker's reason where a file system forbids execution
_GENERAL = (
    "what this process may use: raise its limit (ulimit -v, or the memory of the container), "
    "close other programs, or lower batch sizes, processes and workers."
)


class OutOfMemory(UserError):
    """Memory ran out, and the message says what to change."""

    def __init__(self, error: BaseException, advice: str = _GENERAL) -> None:
        short = " ".join(str(error).split())[:300] or type(error).__name__
        super().__init__(f"Out of memory with {advice} ({short})")


def shortage(error: BaseException | None) -> BaseException | None:
    """Return the error that means out of memory: the given one, or one that led to it."""
    while error is not None and not _is_shortage(error):
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return error


def _is_shortage(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    torch = sys.modules.get("torch")
    typed = getattr(torch, "OutOfMemoryError", MemoryError)
    if isinstance(error, MemoryError | typed):
        return True
    text = str(error)
    return (
        isinstance(error, RuntimeError | ImportError)
        and any(known in text for known in _TEXTS)
        and _DENIED not in text
    )


@contextmanager
def translate_errors(advice: str = _GENERAL) -> Iterator[None]:
    """Raise OutOfMemory in the place of an error that means it; `advice` says what to change.

    Errors of a package that could not be loaded, or of a file that could not be read, for want of
    memory mean it too.
    """
    try:
        yield
    except (OutOfMemory, Interrupted):
        raise
    except Exception as error:
        if found := shortage(error):
            raise OutOfMemory(found, advice) from error
        raise
