"""A run that is killed and resumed equals an uninterrupted one, bit by bit."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from support.program import (
    TINY,
    Program,
    ddpm,
    new_run,
    prepare_run,
    run_in,
    start,
    wait_until,
    write_params,
)
from support.runs import bits, final, rows

from ddpm_core.training import log as runlog
from ddpm_core.training import trainer

STEPS = 60  # room for ten kills
SOON = ("-S", "train.steps=30")  # enough to show whether a run resumed correctly
LONG = (
    TINY.replace("steps: 12", f"steps: {STEPS}")
    .replace("snapshot_every: 4", "snapshot_every: 5")
    .replace("milestone_every: 6", "milestone_every: 30")
    .replace("attention: [8]}", "attention: [8], dropout: 0.1, conditioning: class}")
    .replace("ema: [0.9]", "ema: [0.9, 0.99]\n  flip: true\n  augment: edm\n  balance: classes")
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_run(tmp_path_factory.mktemp("prepared"), LONG)


@pytest.fixture(scope="module")
def undisturbed(prepared: Path) -> dict[str, bytes]:
    return final_weights(train(prepared, "undisturbed"), STEPS)


@pytest.fixture(scope="module")
def begun(prepared: Path) -> Path:
    """A run with snapshots of steps 10 and 15, to be copied."""
    return train(prepared, "begun", "-S", "train.steps=15")


@pytest.fixture(scope="module")
def soon(prepared: Path) -> dict[str, bytes]:
    return final_weights(train(prepared, "soon", *SOON))


def train(prepared: Path, name: str, *arguments: str, status: int | None = 0) -> Path:
    """Train in a new workspace on the same data."""
    folder = new_run(prepared, name, LONG)
    ddpm(folder, "train", *arguments, status=status)
    return folder


def copy(begun: Path, name: str) -> Path:
    return Path(shutil.copytree(begun, begun.with_name(name), symlinks=True))


def final_weights(folder: Path, step: int = 30) -> dict[str, bytes]:
    """Return every tensor of the last snapshot as bytes."""
    return bits(final(folder, step))


def curve(folder: Path) -> list[tuple[float, float, float]]:
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows(folder)]


def snapshot_names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "workspace" / "snapshots").glob("*")}


@pytest.mark.slow
def test_run_killed_ten_times_equals_uninterrupted(
    prepared: Path, undisturbed: dict[str, bytes]
) -> None:
    chance = random.Random(7)
    folder = new_run(prepared, "killed", LONG)
    kills = 0
    log = folder / "workspace" / "log.jsonl"
    while kills < 10:
        process = start(folder, "train")
        number = chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
        moment = chance.choice(["row", "staging", "snapshot"])
        rows_before = log.stat().st_size if log.exists() else 0
        named = snapshot_names(folder)

        def reached(moment: str = moment, size: int = rows_before, old: set[str] = named) -> bool:
            if moment == "row":
                return log.exists() and log.stat().st_size > size
            new = snapshot_names(folder) - old
            return any(name.startswith(".") == (moment == "staging") for name in new)

        came = wait_until(reached, process)
        process.send_signal(number)
        process.ended()
        if process.returncode == 0 or not came:
            break
        kills += 1
    ddpm(folder, "train")
    assert kills == 10
    assert final_weights(folder, STEPS) == undisturbed
    steps = [row["step"] for row in rows(folder)]
    assert steps == list(range(2, STEPS + 1, 2))
    assert curve(folder) == curve(prepared / "undisturbed")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_signal_saves_a_snapshot_and_reports_the_step(prepared: Path, name: str) -> None:
    folder = new_run(prepared, name, LONG)
    process = start(folder, "train", *SOON)
    log = folder / "workspace" / "log.jsonl"
    assert wait_until(log.exists, process)
    number = signal.Signals[name]
    process.send_signal(number)
    said = process.ended()
    assert process.returncode == 128 + number
    assert "after writing a snapshot. To resume, run the same command again." in said
    assert max(snapshot_names(folder)) >= f"step-{rows(folder)[-1]['step']:08d}"


def test_signal_stops_a_process_that_waits_for_a_lease(prepared: Path) -> None:
    folder = new_run(prepared, "waiting", LONG)
    dead = {"id": "x", "fence": 1, "renewed": time.time(), "boot": "another", "pid": 1, "host": "h"}
    (folder / "workspace/lease.json").write_text(json.dumps(dead))
    process = start(folder, "train", *SOON)
    assert wait_until(lambda: "may be in use by process 1 on h" in process.said(), process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(5)
    assert process.returncode == 128 + signal.SIGTERM
    assert "Stopped" not in process.said()


def test_stop_before_the_first_step_reports_no_snapshot(prepared: Path) -> None:
    folder = new_run(prepared, "unbegun", LONG)
    program = Program(folder, ("train", *SOON), run_stopped)
    said = program.ended()
    assert program.returncode == 128 + signal.SIGTERM
    assert "Stopped at step 0 of 30; there is no snapshot yet." in said


def run_stopped(folder: Path, arguments: tuple[str, ...], output: Path) -> None:
    """Run with a signal before the first step."""
    loop = trainer.loop

    def asked(run: trainer.Run) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        loop(run)

    trainer.loop = asked
    run_in({}, folder, arguments, output)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="unshare --pid requires root")
def test_second_signal_ends_the_first_process_of_a_container(tmp_path: Path) -> None:
    code = (
        "import os, signal, torch\n"
        "from ddpm_core.runtime.distributed import World\n"
        "from ddpm_core.runtime.stopping import StopRequest\n"
        "with StopRequest(World(0, 1, torch.device('cpu'))):\n"
        "    for _ in range(2):\n"
        "        print('alive', os.getpid(), flush=True)\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "print('still alive')\n"
    )
    first = ["unshare", "--pid", "--fork", sys.executable, "-c", code]
    ended = subprocess.run(first, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ended.stdout == "alive 1\nalive 1\n"
    assert ended.returncode == 128 + signal.SIGTERM


def test_run_stopped_by_a_signal_equals_uninterrupted(
    prepared: Path, soon: dict[str, bytes]
) -> None:
    assert "resuming from step" in ddpm(prepared / "SIGTERM", "train", *SOON)
    assert final_weights(prepared / "SIGTERM") == soon
    assert curve(prepared / "SIGTERM") == curve(prepared / "soon")


@pytest.mark.parametrize("damage", ["bit", "manifest"])
def test_damaged_snapshot_is_skipped_and_named(
    begun: Path, soon: dict[str, bytes], damage: str
) -> None:
    """test_faults.py truncates and removes files."""
    folder = copy(begun, f"damaged-{damage}")
    file = folder / "workspace/snapshots/step-00000015/optimizer.safetensors"
    if damage == "bit":
        content = bytearray(file.read_bytes())
        content[-5] ^= 4
        file.write_bytes(bytes(content))
    else:
        (file.parent / "manifest.json").write_text("{")
    said = ddpm(folder, "train", *SOON)
    assert "A snapshot was skipped" in said
    assert "step-00000015" in said
    assert "resuming from step 10" in said
    assert final_weights(folder) == soon


def test_resume_ignores_settings_that_do_not_affect_weights(
    prepared: Path, soon: dict[str, bytes]
) -> None:
    folder = new_run(prepared, "free", LONG)
    ddpm(folder, "train", "-S", "train.steps=10", "-S", "train.snapshot_every=3")
    said = ddpm(folder, "train", *SOON, "-S", "train.log_every=7")
    assert "resuming from step 10" in said
    assert final_weights(folder) == soon


def test_from_step_resumes_from_that_snapshot(begun: Path, soon: dict[str, bytes]) -> None:
    folder = copy(begun, "picked")
    said = ddpm(folder, "train", *SOON, "--from-step", "10")
    assert "resuming from step 10" in said
    assert final_weights(folder) == soon
    assert "there is no such snapshot" in ddpm(folder, "train", *SOON, "--from-step", "7", status=1)


def test_second_run_in_a_workspace_is_refused(prepared: Path) -> None:
    folder = new_run(prepared, "twice", LONG)
    process = start(folder, "train", "-S", "train.steps=100000")
    try:
        assert wait_until((folder / "workspace/log.jsonl").exists, process)
        before = (folder / "workspace/data/manifest.json").read_bytes()
        for command in (["train"], ["prepare", "-S", "prepare.holdout=0.2"]):
            said = ddpm(folder, *command, status=1)
            assert f"is in use by process {process.pid} on" in said
        assert (folder / "workspace/data/manifest.json").read_bytes() == before
    finally:
        process.send_signal(signal.SIGKILL)
        process.ended()
    assert "taken over" not in ddpm(folder, "train", *SOON)


@pytest.mark.usefixtures("undisturbed")
def test_old_snapshots_are_pruned_and_milestones_kept(prepared: Path) -> None:
    folder = prepared / "undisturbed"
    assert snapshot_names(folder) == {"step-00000030", "step-00000055", "step-00000060"}
    milestone = folder / "workspace/snapshots/step-00000030"
    assert not (milestone / "optimizer.safetensors").exists()
    assert (milestone / "ema-0.9.safetensors").exists()
    assert (milestone / "grid.png").exists()


def test_full_disk_keeps_the_previous_snapshot(prepared: Path, soon: dict[str, bytes]) -> None:
    folder = new_run(prepared, "full", LONG)
    ddpm(folder, "train", "-S", "train.steps=5")
    largest = max(file.stat().st_size for file in (folder / "workspace/snapshots").rglob("*"))
    limited = Program(folder, ("train", *SOON), partial(run_limited, largest // 2))
    said = limited.ended()
    assert limited.returncode == 1, said
    assert "Cannot write the snapshot of step 15" in said
    assert "the newest complete snapshot is that of step 5" in said
    assert "Traceback" not in said
    assert snapshot_names(folder) == {"step-00000005"}
    ddpm(folder, "train", *SOON)
    assert final_weights(folder) == soon


def run_limited(size: int, folder: Path, arguments: tuple[str, ...], output: Path) -> None:
    """Run with a limit on file sizes, which makes a write fail halfway, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    run_in({}, folder, arguments, output)


def test_log_has_every_row_after_a_disk_was_full(prepared: Path, soon: dict[str, bytes]) -> None:
    folder = new_run(prepared, "unlogged", LONG)
    program = Program(folder, ("train", *SOON), run_unlogged)
    said = program.ended()
    assert program.returncode == 0, said
    assert "Cannot write the snapshot of step 5: " in said  # the rows come first
    assert "Training continues and tries the next one." in said
    assert [row["step"] for row in rows(folder)] == list(range(2, 31, 2))
    assert final_weights(folder) == soon


def run_unlogged(folder: Path, arguments: tuple[str, ...], output: Path) -> None:
    """Run with a disk that has space again after step 7."""
    append = runlog._append

    def refused(path: Path, data: bytes) -> None:
        if b'"step": 8' not in data:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(path, data)
        runlog._append = append

    runlog._append = refused
    run_in({}, folder, arguments, output)


def test_snapshot_is_written_if_its_grid_fails(prepared: Path) -> None:
    folder = new_run(prepared, "unseen", LONG)
    program = Program(folder, ("train", "-S", "train.steps=5"), run_blind)
    said = program.ended()
    assert program.returncode == 0, said
    assert "Cannot draw the images of the snapshot of step 5: out of memory" in said
    assert final_weights(folder, 5)


def run_blind(folder: Path, arguments: tuple[str, ...], output: Path) -> None:
    """Run with a device that has no memory for a second network."""

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    trainer.preview = full  # type: ignore[assignment]
    run_in({}, folder, arguments, output)


def test_non_finite_loss_stops_the_run_and_is_not_saved(prepared: Path) -> None:
    folder = new_run(prepared, "nan", LONG)
    text = LONG.replace("optimizer: {warmup: 2}", "optimizer: {warmup: 0, lr: 1e30, clip: 0}")
    write_params(folder, text)
    said = ddpm(folder, "train", status=1)
    assert "is not finite" in said
    assert "train.optimizer.lr 1e+30 is too high" in said
    assert "Traceback" not in said
    for path in (folder / "workspace" / "snapshots").glob("*/*.safetensors"):
        assert all(np.isfinite(array).all() for array in load_file(path).values())
