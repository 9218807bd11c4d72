"""What PyTorch raises and the user can mend, as a sentence that says how."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ddpm_core.config import Config
from ddpm_core.runtime import compiling, memory


@contextmanager
def translate_errors(config: Config) -> Iterator[None]:
    """Raises UserError in the place of an error of memory or of torch.compile."""
    train, model = config.train, config.model
    advice = (
        f"train.batch_size {train.batch_size} in train.microbatches {train.microbatches}, "
        f"model.channels {model.channels} times {list(model.multipliers)}: raise microbatches "
        "(the result stays the same to rounding), or lower batch_size or channels."
    )
    with memory.translate_errors(advice), compiling.translate_errors("train.compile"):
        yield
