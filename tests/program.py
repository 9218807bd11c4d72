"""The installed program, run as a user runs it: in a process of its own, in a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

TINY = """
seed: 3
workspace: workspace
prepare: {image_size: 8, workers: 1}
model: {channels: 8, multipliers: [1, 2], blocks: 1, attention: [4]}
diffusion: {timesteps: 50}
train:
  steps: 12
  batch_size: 8
  log_every: 2
  snapshot_every: 4
  milestone_every: 6
  keep: 2
  grid: 4
  optimizer: {warmup: 2}
  ema: [0.9]
sample: {count: 20, batch_size: 8, steps: 4}
tracking: {uri: ""}
"""


def write_params(folder: Path, text: str = TINY) -> Path:
    file = folder / "params.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def environment() -> dict[str, str]:
    """That of the tests, one thread, no terminal's width."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ddpm_core.cli", *arguments]


def ddpm(folder: Path, *arguments: str, status: int | None = 0) -> str:
    """What `ddpm ARGUMENTS` says, on stdout and stderr; fails on another exit status."""
    result = subprocess.run(
        command(*arguments),
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    assert status is None or result.returncode == status, result.stdout
    return result.stdout


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """`ddpm ARGUMENTS`, running in a process group of its own."""
    return subprocess.Popen(
        command(*arguments),
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_until(
    condition: Callable[[], bool], process: subprocess.Popen[str], limit: float = 60.0
) -> bool:
    """Whether the condition came true while the process was alive."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        try:
            process.wait(0.002)
        except subprocess.TimeoutExpired:
            continue
        return condition()
    return True
