"""From `prepare.source` to a source."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddpm_core.config import Prepare
from ddpm_core.data.known import DIGITS_STATE, Digits
from ddpm_core.data.sources import Source
from ddpm_core.errors import UserError


@contextmanager
def open_source(settings: Prepare, scratch: Path) -> Iterator[Source]:
    """The source that the settings name; `scratch` is where a download may lie meanwhile."""
    if settings.source == "digits":
        yield Digits()
        return
    raise UserError(f"prepare.source: {settings.source!r} given.")


def state(settings: Prepare) -> dict[str, Any] | None:
    """What changes whenever the source does, found without reading it; None: it can't be told."""
    if settings.source == "digits":
        return dict(DIGITS_STATE)
    return None
