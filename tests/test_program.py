"""The program `ddpm`: fast start, clear errors, readable logs."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.program import ddpm, environment, write_params
from typer.testing import CliRunner

from ddpm_core import chain
from ddpm_core.cli import app
from ddpm_core.config import load as params
from ddpm_core.storage.workspace import Workspace


def test_help_and_invalid_params_do_not_import_torch(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("trian: {}")
    for arguments in (["--help"], ["train", "--help"], ["train"]):
        result = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "ddpm_core.cli", *arguments],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
        assert "torch" not in imported
        assert "typer" in imported


@pytest.mark.parametrize(
    "verb", ["prepare", "train", "sample", "evaluate", "register", "run", "status"]
)
def test_every_verb_reports_invalid_params(tmp_path: Path, verb: str) -> None:
    (tmp_path / "params.yaml").write_text("trian: {}\nseed: x")
    output = ddpm(tmp_path, verb, status=1)
    assert "2 problems in params.yaml" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "ddpm prepare"),
        (["sample"], "ddpm train"),
        (["evaluate"], "ddpm"),
        (["sample", "--shard", "4/4"], "I from 0 to N - 1"),
        (["train", "--resume", "never"], "must be auto or strict"),
        (["train", "-S", "device=cuda:77"], "device: got cuda:77"),
        (["train", "-p", "absent.yaml"], "Cannot read the params file absent.yaml"),
        (["check-data", "absent"], "absent"),
        (["check-data", "gs://bucket/x"], "got 'gs://bucket/x'"),
        (["check-data", "dvc:x"], "got 'dvc:x'"),
    ],
)
def test_errors_name_the_remedy(tmp_path: Path, arguments: list[str], message: str) -> None:
    write_params(tmp_path)
    output = ddpm(tmp_path, *arguments, status=1)
    assert message in output
    assert "Traceback" not in output


def test_suggested_commands_keep_the_options(tmp_path: Path) -> None:
    given = ["-p", "a b.yaml", "-w", "runs/x", "-S", "train.steps=5"]
    write_params(tmp_path).rename(tmp_path / "a b.yaml")
    output = ddpm(tmp_path, "train", *given, status=1)
    assert "Run `ddpm prepare -p 'a b.yaml' -w runs/x -S train.steps=5`." in output


def test_help_fits_a_narrow_terminal() -> None:
    for arguments in ([], ["bench"]):
        output = CliRunner().invoke(app, [*arguments, "--help"], terminal_width=80).output
        assert "Commands:" in output and "..." not in output.partition("Commands:")[2], output


def test_log_files_have_no_escape_codes(tmp_path: Path) -> None:
    write_params(tmp_path)
    ddpm(tmp_path, "prepare")
    output = ddpm(tmp_path, "train")
    assert "12/12" in output
    assert "\x1b" not in output
    assert "\r" not in output


@pytest.mark.parametrize(
    ("kind", "columns", "seen", "unseen"),
    [
        ("xterm", 100, ["40/40", "images/s", "0:00:00"], []),
        ("xterm", 40, ["40/40", "00:00"], ["images/s"]),
        ("dumb", 100, ["draw: 40/40 images"], ["\x1b", "\r\x1b"]),
    ],
)
def test_the_progress_bar_fits_the_terminal(
    tmp_path: Path, kind: str, columns: int, seen: list[str], unseen: list[str]
) -> None:
    code = (
        "from ddpm_core.console import progress\n"
        "with progress('draw', 40, 'images') as advance:\n"
        "    for _ in range(40): advance(note='loss 0.1')\n"
    )
    ours, theirs = pty.openpty()
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**environment(), "TERM": kind, "COLUMNS": str(columns)},
        stdout=theirs,
        stderr=theirs,
        check=True,
    )
    os.close(theirs)
    text = os.read(ours, 65536).decode()
    os.close(ours)
    assert all(part in text for part in seen), text
    assert not any(part in text for part in unseen), text


def test_ctrl_c_during_start_prints_no_traceback(tmp_path: Path) -> None:
    code = (
        "import builtins, os, signal, sys\n"
        "from ddpm_core.__main__ import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job has none\n"
        "load = builtins.__import__\n"
        "def slowly(name, *rest):\n"
        "    if name == 'typer': os.kill(os.getpid(), signal.SIGINT)\n"
        "    return load(name, *rest)\n"
        "builtins.__import__ = slowly\n"
        "main()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (128 + signal.SIGINT, "", "")


def test_status_shows_what_is_stale_and_why(tmp_path: Path) -> None:
    write_params(tmp_path)
    long = f"{tmp_path}/{'nothing' * 20}"
    output = ddpm(tmp_path, "status", "-w", long).splitlines()
    assert output[0] == f"workspace {long}"
    assert "This workspace is empty" in output[1]
    ddpm(tmp_path, "prepare")
    assert "This workspace is empty" not in ddpm(tmp_path, "status")
    ddpm(tmp_path, "train", "-S", "train.steps=6")
    assert "at step 6 of 12" in ddpm(tmp_path, "status")
    assert "train.optimizer.lr: 0.001 -> 0.1" in ddpm(
        tmp_path, "status", "-S", "train.optimizer.lr=0.1"
    )


def test_methods_are_listed_with_one_line_each(tmp_path: Path) -> None:
    lines = ddpm(tmp_path, "methods").splitlines()
    line = "  min_snr  Weight the error of x0 by min(SNR, gamma), gamma = 5 by default."
    assert lines.index(line) > lines.index("train.loss.weighting")
    assert max(map(len, lines)) <= 120 and not any("Hang et al." in text for text in lines)
    assert lines[-1].endswith("ddpm methods -v")


def test_methods_have_formula_source_and_settings(tmp_path: Path) -> None:
    output = ddpm(tmp_path, "methods", "--verbose")
    for name in ("train.loss.weighting", "min_snr", "cosine", "dpmpp", "quadratic_official"):
        assert name in output
    for name in ("train.loss.kind", "huber", "adamw", "Uses train.loss.gamma and train.loss.k."):
        assert name in output
    for author in ("Ho et al.", "Nichol", "Hang et al.", "Lu et al.", "Song et al."):
        assert author in output


def test_version_is_that_of_the_package(tmp_path: Path) -> None:
    from importlib.metadata import version

    assert ddpm(tmp_path, "--version").split() == ["ddpm", version("ddpm-core")]


def test_a_run_without_tracking_skips_register(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for verb in ("prepare", "train", "sample", "evaluate"):
        monkeypatch.setitem(chain.CHECKS, verb, lambda: lambda config, workspace: None)
    config = params.load(overrides=("tracking.uri=",), workspace=str(tmp_path))
    chain.run(config, Workspace.open(config.workspace), {}, ["run"])
    output = capsys.readouterr().err
    assert "register: skipped, because tracking.uri is empty" in output
    assert "Done. Look at" in output
