"""Fixtures of the cluster tests: a namespace per file, and its logs when a test fails."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

import pytest
from cluster import Namespace, kubectl

HOW = (
    "These tests need a Kubernetes cluster with the Training Operator: set KUBECONFIG (kind, "
    "minikube or GKE will do; see docs/kubernetes.md for what to install), load the images of "
    "`make image`, and set DDPM_IMAGE and DDPM_LIGHT_IMAGE if they have other names there."
)


def pytest_sessionstart() -> None:
    if not os.environ.get("KUBECONFIG"):
        pytest.exit(HOW, returncode=2)
    try:
        kubectl("get", "crd", "pytorchjobs.kubeflow.org")
    except (AssertionError, OSError) as error:
        pytest.exit(f"{error}\n{HOW}", returncode=2)


@pytest.fixture(scope="module")
def namespace(request: pytest.FixtureRequest) -> Iterator[Namespace]:
    """Create a namespace with the platform for this file; delete it at the end."""
    about = request.module.__name__.removeprefix("test_").replace("_", "-")
    made = Namespace(f"ddpm-test-{about}-{secrets.token_hex(3)}")
    try:
        made.create()
        yield made
    finally:
        made.delete()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Print events, pod states and logs of the namespaces that a failed test used."""
    report = yield
    if report.failed:
        for value in getattr(item, "funcargs", {}).values():
            if isinstance(value, Namespace):
                report.sections.append((f"namespace {value.name}", value.explain()))
    return report
