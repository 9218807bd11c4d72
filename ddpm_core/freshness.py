"""Where each verb's own check is: whether its output is whole and of these settings."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from ddpm_core.config import Config
from ddpm_core.storage.workspace import Workspace

Check = Callable[[Config, Workspace], str | None]  # why the verb has work to do; None: it has none

# In their order. Whoever waits for data and training imports these alone, and is a tenth of what
# it is with torch.
CHECKS = {
    "prepare": "ddpm_core.data.prepare",
    "train": "ddpm_core.training.freshness",
    "sample": "ddpm_core.sampling.run",
    "evaluate": "ddpm_core.evaluation.freshness",
    "register": "ddpm_core.registry.register",
}


def check(verb: str) -> Check:
    """The check of a verb; its module is imported only now."""
    found: Check = importlib.import_module(CHECKS[verb]).stale
    return found
