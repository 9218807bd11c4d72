"""What more workers bring on this machine: `ddpm bench scaling`.

Each number of workers really trains, in a workspace of its own that is gone afterwards. Speed-up is
images/s over those of one worker, efficiency that over the workers (Amdahl 1967), communication the
share of a worker's time that the all-reduce takes, waiting for slower workers included.
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
from ddpm_core.runtime.device import choose_device, processes
from ddpm_core.storage.workspace import LOG, RUN, SNAPSHOTS, Workspace
from ddpm_core.training.launch import importing_alike
from ddpm_core.training.log import read_rows

MOST = 4  # workers that are measured where nobody says how many, and there is no GPU
TOLD = 2000  # characters of a failed run's output


@dataclass(frozen=True)
class Scaling:
    """One number of workers, and what it gave."""

    workers: int
    images_per_second: float
    speedup: float
    efficiency: float
    communication: float  # in [0, 1]


def scaling(config: Config, workers: int | None, steps: int) -> list[Scaling]:
    """Measure 1 to `workers` workers, `steps` steps each, the first half of them to warm up.

    Raises UserError for numbers that make no sense, and for a run that fails.
    """
    on_cpu = choose_device(config.device).type == "cpu"
    some = min(MOST, os.cpu_count() or 1) if on_cpu else processes("auto", config.device)
    most = processes(workers or some, config.device)
    if not 1 <= most <= config.train.batch_size:
        raise UserError(
            f"--workers {most}: from 1 to train.batch_size, {config.train.batch_size}, are "
            "possible."
        )
    if steps < 2:
        raise UserError(f"--steps {steps}: at least 2 are needed, one of them to warm up.")
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
    """For a person, with what limits."""
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
    few = f"\nThis machine has {cores} cores, fewer than workers: they share them."
    return capture.get().rstrip() + (few if len(measured) > cores else "")


def document(measured: list[Scaling]) -> dict[str, Any]:
    return {"scaling": [asdict(row) for row in measured], "cores": os.cpu_count()}


def _settings(config: Config, folder: Path, workers: int, steps: int) -> Config:
    """The user's network and batch, in a workspace of its own, with nothing written on the way."""
    settings = config.dump()
    settings["workspace"] = str(folder)
    settings["train"] |= {
        "steps": steps,
        "processes": workers,
        "log_every": steps - steps // 2,
        "snapshot_every": steps,
        "milestone_every": steps,
        "grid": 0,
        "restarts": 0,
    }
    settings["tracking"]["uri"] = ""
    return params.validate(settings)


def _run(config: Config, workers: int) -> tuple[float, float]:
    """Images/s and the share of communication in the second half of a run."""
    workspace = Workspace.open(config.workspace)
    for key in (SNAPSHOTS, LOG, RUN):
        workspace.storage.remove(key)
    file = workspace.path("params.yaml")
    file.write_text(yaml.safe_dump(config.dump()), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "ddpm_core.cli", "train", "-p", str(file)],
        env={**os.environ, **importing_alike(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        output = (done.stdout + done.stderr)[-TOLD:].strip()
        raise UserError(f"Training by {workers} workers failed; it said:\n{output}")
    last = list(read_rows(workspace.path(LOG)))[-1]
    owners = [f"worker-{worker}/" for worker in range(workers)] if workers > 1 else [""]
    shares = [float(last[f"{owner}share/reduce"]) for owner in owners]
    return float(last["images_per_second"]), sum(shares) / workers
