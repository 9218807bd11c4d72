"""Shared by all tests: one torch thread, nothing of the user's environment, who runs what."""

from __future__ import annotations

import os
import sys

os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

torch.set_num_threads(1)

# The longest groups of tests, which begin, so that none of them is left over for one process.
LONGEST = (
    "mlflow",
    "test_faults",
    "dvc",
    "evaluate",
    "diffusers",
    "test_resume",
    "test_training",
    "test_s3_workspace",
)


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tracking server or credentials of whoever runs the tests are none of a test's."""
    for name in list(os.environ):
        if name.startswith("MLFLOW_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    if "boto3" in sys.modules:  # its session keeps the credentials of the test before
        monkeypatch.setattr(sys.modules["boto3"], "DEFAULT_SESSION", None)


def group(item: pytest.Item) -> str:
    marker = item.get_closest_marker("xdist_group")
    return str(marker.args[0]) if marker else item.path.stem


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of a file share a process, as they share fixtures; some share one with others."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(group(item)))
    items.sort(key=lambda item: LONGEST.index(name) if (name := group(item)) in LONGEST else 99)
