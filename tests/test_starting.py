"""How `ddpm train` starts its workers, and what they inherit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from faults.attempt import until
from support.program import (
    TINY,
    ddpm,
    environment,
    new_run,
    prepare_run,
    settings,
    start,
    wait_until,
)

from ddpm_core.training import launch as launcher

LONG = settings("train.steps=100000", "train.grid=0")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_run(tmp_path_factory.mktemp("prepared"), TINY)


@pytest.mark.parametrize("given", [["--from-step", "4"], ["--from-step=4"]])
def test_only_the_first_start_uses_from_step(
    monkeypatch: pytest.MonkeyPatch, given: list[str]
) -> None:
    """Restarted workers resume from the newest snapshot instead."""
    seen: list[Sequence[str]] = []

    def attempt(count: int, arguments: Sequence[str]) -> int:
        seen.append(list(arguments))
        return 138 if len(seen) < 3 else 0

    monkeypatch.setattr(launcher, "_attempt", attempt)
    launcher.launch(2, ["train", *given, "-w", "here"], 3)
    rest = ["train", "-w", "here"]
    assert seen == [["train", *given, "-w", "here"], rest, rest]


def test_restarted_workers_ignore_from_step(prepared: Path) -> None:
    folder = new_run(prepared, "again", TINY)
    ddpm(folder, "train", *settings("train.steps=8"))
    worker = start(folder, "train", "--from-step", "6", TORCHELASTIC_RESTART_COUNT="1")
    assert "resuming from step 8" in worker.ended()


def test_a_stop_warns_against_repeating_from_step(prepared: Path) -> None:
    folder = new_run(prepared, "stopped", TINY)
    ddpm(folder, "train", *settings("train.steps=8"))
    run = start(folder, "train", "--from-step", "6", *LONG)
    assert wait_until(lambda: (folder / "workspace/snapshots/step-00000012").exists(), run)
    run.send_signal(signal.SIGTERM)
    said = run.ended()
    assert run.returncode == 128 + signal.SIGTERM
    assert "Leave out --from-step 6, which would start from that step again." in said


@pytest.fixture
def two_workers(prepared: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`nohup ddpm train` with two workers, in a folder with a module of a Python library's name."""
    folder = new_run(prepared, "two", TINY)
    (folder / "grp.py").write_text("open('imported', 'w')")
    program = Path(sys.executable).with_name("ddpm")
    command = ["nohup", program, "train", *LONG, *settings("train.processes=2")]
    with (folder / "said").open("wb") as said:
        run = subprocess.Popen(
            command, cwd=folder, env=environment(), stdout=said, stderr=said, start_new_session=True
        )
        try:
            until((folder / "workspace/log.jsonl").exists, "training began")
            yield run
        finally:
            run.kill()
            run.wait(30)


def test_workers_outlive_their_terminal_and_ignore_its_folder(
    prepared: Path, two_workers: subprocess.Popen[bytes]
) -> None:
    log = prepared / "two/workspace/log.jsonl"
    os.killpg(two_workers.pid, signal.SIGHUP)
    size = log.stat().st_size
    until(lambda: log.stat().st_size > size + 5000, "training goes on")
    two_workers.terminate()
    assert two_workers.wait(60) == 128 + signal.SIGTERM
    assert not (prepared / "two/imported").exists()  # by a worker, for the library's own module
