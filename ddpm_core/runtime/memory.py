"""Recognize out-of-memory errors, and report them with the settings to change.

Nothing here imports torch, since that import can itself fail for lack of memory.
"""

from __future__ import annotations

import errno
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ddpm_core.errors import Interrupted, UserError

# Some libraries raise RuntimeError or ImportError for everything, so only the text shows the
# cause. These are texts of the allocators of PyTorch and C++, oneDNN, cuBLAS, cuDNN and the linker.
_TEXTS = (
    "out of memory",
    "allocate memory",
    "not enough memory",
    "std::bad_alloc",
    "could not create a primitive",
    "_STATUS_ALLOC_FAILED",
    "failed to map segment from shared object",
)
_DENIED = "Operation not permitted"  # the linker's reason if the file system is mounted noexec
_GENERAL = (
    "the memory limit of this process: raise it (ulimit -v, or the memory of the container), "
    "close other programs, or lower batch sizes, processes and workers."
)


class OutOfMemory(UserError):
    """Memory ran out; the message names the settings to change."""

    def __init__(self, error: BaseException, advice: str = _GENERAL) -> None:
        short = " ".join(str(error).split())[:300] or type(error).__name__
        super().__init__(f"Out of memory with {advice} ({short})")


def shortage(error: BaseException | None) -> BaseException | None:
    """Return the error or the first of its causes that means out of memory; None if none does."""
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
    """Raise OutOfMemory in place of an error that means it.

    That includes errors caused by it, such as a failed import. `advice` completes "Out of memory
    with ...": the settings in use, and how to change them.
    """
    try:
        yield
    except (OutOfMemory, Interrupted):
        raise
    except Exception as error:
        if found := shortage(error):
            raise OutOfMemory(found, advice) from error
        raise


def most_used(device: str) -> int:
    """Return the most bytes that this process has used: on a GPU if `device` is cuda, else RAM."""
    if device == "cuda":
        return int(sys.modules["torch"].cuda.max_memory_allocated())
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
