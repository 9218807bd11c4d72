"""Errors in a pod name the volume's owner, or the Secret with the keys."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from support.s3_server import Bucket

from ddpm_core.console import advice_in_pod, report_errors
from ddpm_core.errors import UserError
from ddpm_core.storage.base import Unreachable
from ddpm_core.storage.workspace import Workspace

ROOT = Path(__file__).parents[1]
PARAGRAPH = "First use of a claim"
ADVICE = "If this is a volume that belongs to root, mount it once in a pod with an fsGroup"
VOLUME = f'{ADVICE} (docs/kubeflow.md, "{PARAGRAPH}").'


def forbidden() -> None:
    raise PermissionError(errno.EACCES, "Permission denied", "/workspace/run")


def wrapped() -> None:
    try:
        forbidden()
    except OSError as error:
        raise UserError("Cannot write to the workspace.") from error


def unrelated() -> None:
    raise UserError("There are no prepared data.")


@pytest.fixture
def in_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")


@pytest.mark.usefixtures("in_pod")
@pytest.mark.parametrize(
    ("fail", "expected"),
    [
        (
            forbidden,
            f"Permission denied: /workspace/run. {VOLUME}",
        ),
        (
            wrapped,
            f"Cannot write to the workspace. {VOLUME}",
        ),
        (unrelated, "There are no prepared data."),
    ],
)
def test_a_forbidden_path_names_the_volumes_owner(
    fail: Callable[[], None], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit), report_errors("ddpm train"):
        fail()
    assert capsys.readouterr().err.strip() == f"ddpm train: {expected}"


def test_outside_a_pod_the_error_stands_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(SystemExit), report_errors("ddpm train"):
        forbidden()
    assert capsys.readouterr().err == "ddpm train: Permission denied: /workspace/run.\n"


@pytest.mark.usefixtures("in_pod")
def test_missing_s3_keys_name_the_secret(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.enter(monkeypatch, tmp_path)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(Unreachable) as refused:
        Workspace.open(bucket.uri("run"))
    assert "the Secret ddpm-s3" in advice_in_pod(refused.value)


def test_the_advice_names_a_paragraph_of_the_document() -> None:
    text = (ROOT / "docs/kubeflow.md").read_text(encoding="utf-8")
    assert f"**{PARAGRAPH}:**" in text
