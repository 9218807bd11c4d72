"""The pipeline as KFP has it."""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

import components_run  # noqa: F401  # adds the folder of pipelines to the path
import pytest


@pytest.fixture(scope="session")
def pipeline() -> Any:
    """Return the pipeline of pipelines/ddpm.py.

    For each setting of a task, KFP asks for the source lines of all callers, which searches all
    loaded modules: 10 seconds in a process that has collected all tests. So it gets none here.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspect, "stack", functools.partial(inspect.stack, 0))
        return importlib.import_module("ddpm").ddpm
