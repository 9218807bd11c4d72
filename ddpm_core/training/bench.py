"""Measure training with 1 to N workers on this machine: `ddpm bench scaling`.

Each number of workers trains for real, in a temporary workspace. Speed-up is images/s divided by
those of one worker; efficiency is speed-up divided by the number of workers (Amdahl 1967).
Communication is the share of a worker's time spent in the all-reduce, including the wait for slower
workers.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from ddpm_core.config import Config
from ddpm_core.config import load as params
from ddpm_core.console import say
from ddpm_core.data.prepare import prepare
from ddpm_core.errors import UserError
from ddpm_core.runtime.device import choose_device, worker_count
from ddpm_core.storage.workspace import LOG, RUN, SNAPSHOTS, Workspace
from ddpm_core.tracking.rows import read_rows
from ddpm_core.training.launch import same_import_path

DEFAULT_WORKERS = 4  # the largest number measured by default on a machine without a GPU
OUTPUT_LIMIT = 2000  # characters shown of a failed run's output


@dataclass(frozen=True)
class Scaling:
    """The measurement of one number of workers."""

    workers: int
    images_per_second: float
    speedup: float
    efficiency: float
    communication: float  # in [0, 1]


def scaling(config: Config, workers: int | None, steps: int) -> list[Scaling]:
    """Measure 1 to `workers` workers, `steps` steps each, of which the first half warms up.

    Raises UserError for invalid numbers, or if a run fails.
    """
    on_cpu = choose_device(config.device).type == "cpu"
    default = (
        min(DEFAULT_WORKERS, os.cpu_count() or 1) if on_cpu else worker_count("auto", config.device)
    )
    most = worker_count(workers or default, config.device)
    if not 1 <= most <= config.train.batch_size:
        raise UserError(
            f"--workers: got {most}; must be from 1 to train.batch_size "
            f"({config.train.batch_size})."
        )
    if steps < 2:
        raise UserError(
            f"--steps: got {steps}; must be at least 2, since the first half is warm-up."
        )
    measured: list[Scaling] = []
    with tempfile.TemporaryDirectory(prefix="ddpm-scaling-") as folder:
        prepare(_settings(config, Path(folder), 1, steps), Workspace.open(folder))
        for count in range(1, most + 1):
            rate, communication = _run(_settings(config, Path(folder), count, steps), count)
            speedup = rate / (measured[0].images_per_second if measured else rate)
            measured.append(Scaling(count, rate, speedup, speedup / count, communication))
            say(f"{count} of {most} workers: {rate:,.1f} images/s")
    return measured


def table(measured: list[Scaling]) -> str:
    """Return the measurements as a table for a terminal."""
    shown = Table("workers", "images/s", "speed-up", "efficiency", "communication")
    for row in measured:
        shown.add_row(
            str(row.workers),
            f"{row.images_per_second:,.1f}",
            f"{row.speedup:.2f}",
            f"{row.efficiency:.0%}",
            f"{row.communication:.1%}",
        )
    console = Console(width=100)
    with console.capture() as capture:
        console.print(shown)
    cores = os.cpu_count() or 1
    few = f"\nThis machine has only {cores} cores, so the workers share them."
    return capture.get().rstrip() + (few if len(measured) > cores else "")


def document(measured: list[Scaling]) -> dict[str, Any]:
    """Return the measurements as JSON data."""
    return {"scaling": [asdict(row) for row in measured], "cores": os.cpu_count()}


def _settings(config: Config, folder: Path, workers: int, steps: int) -> Config:
    """Return settings with the user's network and batch that write only a log and one snapshot."""
    settings = config.dump()
    settings["workspace"] = str(folder)
    settings["train"] |= {
        "steps": steps,
        "processes": workers,
        "log_every": steps - steps // 2,
        "validate_every": 0,
        "snapshot_every": steps,
        "milestone_every": steps,
        "grid": 0,
        "restarts": 0,
    }
    settings["tracking"]["uri"] = ""
    return params.validate(settings)


def _run(config: Config, workers: int) -> tuple[float, float]:
    """Return images/s and the share of communication in the second half of a run."""
    workspace = Workspace.open(config.workspace)
    for key in (SNAPSHOTS, LOG, RUN):
        workspace.storage.remove(key)
    file = workspace.path("params.yaml")
    file.write_text(yaml.safe_dump(config.dump()), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "ddpm_core.cli", "train", "-p", str(file)],
        env={**os.environ, **same_import_path(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        output = (done.stdout + done.stderr)[-OUTPUT_LIMIT:].strip()
        raise UserError(f"Training with {workers} workers failed. The end of its output:\n{output}")
    last = list(read_rows(workspace.path(LOG)))[-1]
    owners = [f"worker-{worker}/" for worker in range(workers)] if workers > 1 else [""]
    shares = [float(last[f"{owner}share/reduce"]) for owner in owners]
    return float(last["images_per_second"]), sum(shares) / workers
