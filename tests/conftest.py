"""Fixtures and settings for all tests: one torch thread, a clean environment, the test order."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

if TYPE_CHECKING:
    from support.s3_server import Bucket

torch.set_num_threads(1)

# The slowest files. They run first, so that no process is left alone with one at the end.
LONGEST = (
    "test_compare",
    "test_kfp",
    "test_faults",
    "test_backend",
    "test_registry",
    "test_dvc",
    "test_tracking",
    "test_s3_workspace",
    "test_resume",
    "test_training",
    "test_evaluate",
    "test_devices",
    "test_worlds",
    "test_serving",
    "test_best",
    "test_dvc_source",
    "test_s3_source",
    "test_s3_chain",
    "test_fuzz",
    "test_throughput",
    "test_serve",
    "test_samplers",
    "test_compile",
    "test_superseded",
    "test_finite",
    "test_scaling",
    "test_sample",
    "test_mlflow_limits",
    "test_report",
    "test_s3_storage",
)


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    """Yield a new bucket of an S3 server; with moto, both end with the module."""
    from support.s3_server import Bucket, server

    with server() as environment:
        yield Bucket(environment)


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the tracking server and credentials of the user; repeat downloads at once."""
    for name in list(os.environ):
        if name.startswith("MLFLOW_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    if "boto3" in sys.modules:  # its session keeps the credentials of the previous test
        monkeypatch.setattr(sys.modules["boto3"], "DEFAULT_SESSION", None)
    if "ddpm_core.storage.web" in sys.modules:  # its tests repeat downloads
        monkeypatch.setattr(sys.modules["ddpm_core.storage.web"], "PAUSE", 0.01)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the slowest files first, and skip the tests for CUDA without a GPU.

    The tests of a file share a process and so its fixtures (--dist loadfile).
    """
    if not torch.cuda.is_available() and "DDPM_TEST_GPU" not in os.environ:
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="CUDA finds no GPU"))
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else 99)
