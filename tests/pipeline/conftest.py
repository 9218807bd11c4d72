"""The pipeline as KFP has it."""

from __future__ import annotations

import importlib
from typing import Any

import components_run  # noqa: F401  # adds the folder of pipelines to the path
import pytest


@pytest.fixture(scope="session")
def pipeline() -> Any:
    """Return the pipeline of pipelines/ddpm.py.

    Imported here and not by a module, because each setting of a task makes KFP look through all
    modules that are loaded: 10 seconds in every process that collects all tests.
    """
    return importlib.import_module("ddpm").ddpm
