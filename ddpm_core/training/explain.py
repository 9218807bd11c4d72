"""What PyTorch raises and the user can mend, as a sentence that says how."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ddpm_core import compiling
from ddpm_core.config import Config
from ddpm_core.errors import UserError


@contextmanager
def explained(config: Config) -> Iterator[None]:
    """Raises UserError in the place of an error of memory or of torch.compile."""
    try:
        with compiling.explained("train.compile"):
            yield
    except (RuntimeError, MemoryError) as error:
        if _is_out_of_memory(error):
            raise UserError(_memory(config, _short(error))) from error
        raise


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def _memory(config: Config, reason: str) -> str:
    train, model = config.train, config.model
    return (
        f"Out of memory with train.batch_size {train.batch_size} in train.microbatches "
        f"{train.microbatches}, model.channels {model.channels} times {list(model.multipliers)}: "
        "raise microbatches (the result stays the same to rounding), or lower batch_size or "
        f"channels. ({reason})"
    )


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
