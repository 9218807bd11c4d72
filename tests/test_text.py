"""Secrets are never printed or stored, and comparisons ignore them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.program import TINY, ddpm, settings, write_params

from ddpm_core.config.load import load_text
from ddpm_core.data.prepare import stale
from ddpm_core.errors import UserError
from ddpm_core.storage.workspace import Workspace
from ddpm_core.text import masked, shown, throughout
from ddpm_kube import artifacts

SIGNED = (
    "https://bucket.s3.amazonaws.com/w.pth?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Date={}"
    "&X-Amz-Signature=hunter2#sha256=abc"
)
MASKED = "https://bucket.s3.amazonaws.com/w.pth?***#sha256=abc"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (SIGNED.format("20260101T000000Z"), MASKED),
        ("https://a.blob.core.windows.net/c/f.zip?sv=2022&se=2026&sig=hunter2", "?***"),
        ("https://storage.googleapis.com/b/o?X-Goog-Signature=hunter2", "?***"),
        ("https://h/f?AWSAccessKeyId=AK&Expires=1&Signature=hunter2", "?***"),
        ("dvc:https://h/r.git?private_token=hunter2#photos@v1", "?***#photos@v1"),
        ("postgresql://h/runs?user=me&password=hunter2", "?***"),
        (f"https://h/f?x={'hunter2' * 5}", "?***"),
        ("Max retries exceeded with url: /f?access_token=hunter2 (Caused by", "?*** (Caused by"),
        ('{"uri": "https://h/f?token=hunter2", "n": 1}', '?***", "n": 1}'),
    ],
)
def test_a_query_with_a_secret_is_masked_completely(text: str, expected: str) -> None:
    assert masked(text).endswith(expected) and "hunter2" not in masked(text)
    assert masked(masked(text)) == masked(text)


@pytest.mark.parametrize(
    "text",
    [
        "https://zenodo.org/records/1/files/weights.pth?download=1",
        "https://h/f?version=3&author=me&design=2#sha256=abc",
        "Is the Training Operator running? key=value",
        "s3://bucket/what?",
    ],
)
def test_a_query_without_a_secret_is_kept(text: str) -> None:
    assert masked(text) == text


def test_presigned_uris_are_stored_without_signature(tmp_path: Path) -> None:
    """With a new signature, the run is still up to date."""
    write_params(tmp_path, TINY)
    first = f"evaluate.inception_weights={SIGNED.format('20260101T000000Z')}"
    for verb in (["prepare"], ["train"]):
        assert "hunter2" not in ddpm(tmp_path, *verb, *settings(first))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if b"hunter2" in path.read_bytes()]
    config = tmp_path / "workspace/snapshots/step-00000012/config.json"
    assert MASKED in config.read_text()
    again = f"evaluate.inception_weights={SIGNED.format('20270101T000000Z')}"
    assert "hunter2" not in (planned := ddpm(tmp_path, "train", "--dry-run", *settings(again)))
    assert f"inception_weights: {MASKED}" in planned
    ddpm(tmp_path, "train", *settings(again))
    assert not (tmp_path / "workspace/superseded").exists()


def test_rotated_credentials_keep_data_up_to_date(tmp_path: Path) -> None:
    """Also if an earlier version stored the secret."""
    write_params(tmp_path, TINY)
    ddpm(tmp_path, "prepare")
    workspace = Workspace.open(str(tmp_path / "workspace"))
    manifest = workspace.read_json("data/manifest.json")

    def reason(stored: str, given: str) -> str | None:
        manifest["prepare"]["source"] = f"dvc:{stored}"
        workspace.write_json("data/manifest.json", manifest)
        return stale(load_text(TINY, "p", [f"prepare.source=dvc:{given}"]), workspace)

    assert reason("https://old@h.invalid/r#x", "https://new@h.invalid/r#x") is None
    assert reason("https://***@h.invalid/r#x", "https://new@h.invalid/r#x") is None
    found = reason("https://***@h.invalid/r#x", "https://new@h.invalid/r#y")
    assert found == (
        "prepare.source is 'dvc:https://***@h.invalid/r#y', it was 'dvc:https://***@h.invalid/r#x'"
    )


def test_errors_are_masked() -> None:
    assert str(UserError("https://me:hunter2@h/f is gone")) == "https://***@h/f is gone"


def test_log_records_and_tracebacks_are_masked() -> None:
    script = (
        "from ddpm_core.console import guard\n"
        "guard()\n"
        "import logging\n"
        "uri = 'https://me:hunter2@h/f?sig=hunter2'\n"
        "print(uri)\n"
        "logging.error('log %s', uri)\n"
        "raise ValueError(uri)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    printed = done.stdout + done.stderr
    for line in (
        "https://***@h/f?***",
        "log https://***@h/f?***",
        "ValueError: https://***@h/f?***",
    ):
        assert f"{line}\n" in printed
    assert printed.count("hunter2") == printed.count("uri = '")  # a source line, if Python shows it


def test_unknown_options_are_masked(tmp_path: Path) -> None:
    printed = ddpm(tmp_path, "check-data", "a", "https://me:hunter2@h/x.zip", status=2)
    assert "https://***@h/x.zip" in printed and "hunter2" not in printed


def test_control_and_bidirectional_characters_are_escaped() -> None:
    assert shown("a\x1b[31mb\u202ec\ud800\n\td") == "a\\x1b[31mb\\u202ec\\ud800\n\td"
    assert throughout(shown, {"k\x1b": ["\u202e", 1, None]}) == {"k\\x1b": ["\\u202e", 1, None]}


class Artifact:
    """Stands for an artifact of KFP."""

    def __init__(self, path: Path) -> None:
        self.path, self.metadata = str(path), {}


def test_pipeline_pages_are_masked_and_escaped(tmp_path: Path) -> None:
    artifact = Artifact(tmp_path / "page.html")
    facts = {"source": "https://me:hunter2@h/\u202ef"}
    artifacts.put_page(artifact, "Data", facts, [])
    for text in (Path(artifact.path).read_text(), artifact.metadata["source"]):
        assert "https://***@h/\\u202ef" in text
    artifacts.put(artifact, "From https://me:hunter2@h/f.", {})
    assert Path(artifact.path).read_text() == "From https://***@h/f."
