"""What an error of memory means, as a sentence that says what to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ddpm_core.errors import UserError


@contextmanager
def translate_errors(advice: str) -> Iterator[None]:
    """Raises UserError in the place of an error of memory; `advice` says with what it came."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        short = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(f"Out of memory with {advice} ({short})") from error


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )
