"""What all files with many images have in common: how they are identified, limits, and errors."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddpm_core.data.sources.unpacking import Excess
from ddpm_core.errors import UserError
from ddpm_core.storage import sha256_of

# Images are already compressed, so a file that unpacks to far more than its size is malicious.
BOMB_RATIO, BOMB_FLOOR = 200, 2**28  # at most BOMB_RATIO x its size + BOMB_FLOOR bytes
# Even the smallest image takes more than ENTRY_BYTES in an archive, and has a header on top.
ENTRY_BYTES, ENTRIES_FLOOR = 32, 100_000


def file_facts(path: Path, uri: str) -> dict[str, Any]:
    """Return the facts that identify a file. Reads the whole file."""
    return {"uri": uri, "sha256": sha256_of(path), "state": file_state(path)}


def file_state(path: Path) -> dict[str, Any]:
    """Return the facts that change when a file is written."""
    facts = path.stat()
    return {"size": facts.st_size, "modified": facts.st_mtime_ns}


def unpacked_limit(path: Path) -> int:
    """Return the number of bytes that a file may unpack to."""
    return BOMB_FLOOR + BOMB_RATIO * path.stat().st_size


def entries_limit(path: Path) -> int:
    """Return the number of entries that a file may have."""
    return ENTRIES_FLOOR + path.stat().st_size // ENTRY_BYTES


@contextmanager
def user_errors(uri: str, kind: str, otherwise: str) -> Iterator[None]:
    """Turn any exception from reading a file of this kind into a UserError.

    The libraries that unpack files raise exceptions of many kinds for damaged ones. `otherwise` is
    what the user can do instead of reading this file, as an imperative.
    """
    try:
        yield
    except UserError:
        raise
    except Excess as error:
        raise UserError(
            f"The {kind} {uri} {error}, too many for a file of images of its size. If you trust "
            f"it, {otherwise}."
        ) from error
    except MemoryError as error:
        raise UserError(
            f"Not enough memory to read the {kind} {uri}. Use a machine or container with more "
            f"memory, or {otherwise}."
        ) from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise UserError(f"Cannot read {uri}: {error.strerror}.") from error
        raise UserError(
            f"The {kind} {uri} is damaged or of an unsupported kind: {reason_of(error)}. Fetch it "
            f"again, or {otherwise}."
        ) from error


def reason_of(error: Exception) -> str:
    """Return the text of an exception on one line, shortened."""
    return " ".join(str(error).split())[:200] or type(error).__name__
