"""Play a schedule from start to judgement, in its own run on shared data."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from support.mlflow_server import Server, shared_server
from support.program import TINY, ddpm, write_params
from support.runs import at_start

from .attempt import Attempt, until
from .schedule import SNAPSHOT_EVERY, STEPS, Schedule

PARAMS = (
    TINY.replace("steps: 12", f"steps: {STEPS}\n  precision: fp32\n  worker_timeout: 5")
    .replace("snapshot_every: 4", f"snapshot_every: {SNAPSHOT_EVERY}")
    .replace("milestone_every: 6", f"milestone_every: {STEPS // 2}")
    .replace("attention: [8]}", "attention: [8], dropout: 0.1, conditioning: class}")
    .replace("ema: [0.9]", "ema: [0.9]\n  flip: true")
    # Adam's first steps follow the sign of the gradient, which rounding decides if the gradient is
    # tiny. At the full learning rate one such weight is 0.001 of the distance of so short a run.
    .replace("warmup: 2", "warmup: 20")
)

Worlds = set[int]  # world sizes that the log of a run must contain


class Stage:
    """What schedules share below `root`: data, undisturbed runs, and an MLflow server."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._prepared = root / "prepared"
        self._undisturbed: dict[int, Path] = {}

    def new_run(self, name: str, tracking: str = "") -> Path:
        """Return a folder with params and its own workspace on the shared data."""
        if not self._prepared.exists():
            self._prepared.mkdir(parents=True)
            write_params(self._prepared, PARAMS)
            ddpm(self._prepared, "prepare")
        folder = self.root / name / "run"
        (folder / "workspace").mkdir(parents=True)
        self.link_data(folder)
        write_params(folder, PARAMS.replace('uri: ""', f'uri: "{tracking}"'))
        return folder

    def link_data(self, folder: Path) -> None:
        (folder / "workspace" / "data").symlink_to(self._prepared / "workspace" / "data")

    def undisturbed(self, size: int) -> Path:
        """Return the folder of an undisturbed run of `size` workers; 0: before its first step."""
        if size not in self._undisturbed:
            folder = self.new_run(f"undisturbed-{size}")
            if size == 0:
                at_start(folder)
            else:
                attempt = Attempt(folder, "forked", size)
                assert attempt.wait(120), attempt.said()
                assert attempt.returncode == 0, attempt.said()
            self._undisturbed[size] = folder
        return self._undisturbed[size]

    def server(self) -> Server:
        return shared_server().running()


class Playing:
    """A run to which a schedule is applied."""

    def __init__(self, schedule: Schedule, stage: Stage, tracking: str = "") -> None:
        self.schedule, self.stage = schedule, stage
        self.folder = stage.new_run(f"{schedule.kind}-{schedule.seed}", tracking)
        self.workspace = self.folder / "workspace"
        self.attempts: list[Attempt] = []
        self.undo: list[Callable[[], object]] = []

    def begin(self, size: int, start: str = "", **more: object) -> Attempt:
        """Start the run, or restart it."""
        start = start or self.schedule.start
        attempt = Attempt(self.folder, start, size, **more)  # type: ignore[arg-type]
        self.attempts.append(attempt)
        return attempt

    def under_way(self, **more: object) -> Attempt:
        """Start the run, and wait until the time of the fault."""
        attempt = self.begin(self.schedule.worlds[0], **more)
        self.after(self.schedule.at[0], attempt)
        return attempt

    def after(self, step: int, attempt: Attempt) -> None:
        """Wait until a row of `step` or later is logged, then for the delay of the schedule."""

        def came() -> bool:
            assert attempt.returncode is None, f"it ended before step {step}"
            return self.last_step() >= step

        until(came, f"step {step}", 120)
        time.sleep(self.schedule.delay)

    def hit(self, number: int, attempt: Attempt) -> int:
        """Send a signal to the victim of the schedule; return its process ID."""
        pid = attempt.workers()[self.schedule.victim]
        attempt.kill(number, pid)
        return pid

    def finish(self, attempt: Attempt, limit: float = 150) -> None:
        """Wait until training is done and all its processes are gone."""
        attempt.workers()
        assert attempt.wait(limit), f"not ended within {limit:g} s"
        assert attempt.returncode == 0, f"it ended with status {attempt.returncode}"
        until(lambda: not attempt.left(), "all workers are gone", 20)

    def rows(self) -> list[dict[str, float]]:
        found = []
        with contextlib.suppress(OSError):
            for line in (self.workspace / "log.jsonl").read_text().splitlines():
                with contextlib.suppress(ValueError):
                    found.append(json.loads(line))
        return found

    def last_step(self) -> int:
        rows = self.rows()
        return int(rows[-1]["step"]) if rows else 0

    def starts(self) -> int:
        """Return how often rank 0 started, from the number of the workspace's lease."""
        return int(json.loads((self.workspace / "lease.json").read_text())["fence"])

    def snapshots(self) -> list[str]:
        """Return the folders of complete snapshots."""
        return [name for name in self._folders() if not name.startswith(".")]

    def staged(self) -> list[str]:
        """Return the folders that are being written, or that a killed writer left."""
        return [name for name in self._folders() if name.startswith(".")]

    def _folders(self) -> list[str]:
        with contextlib.suppress(OSError):
            return sorted(path.name for path in (self.workspace / "snapshots").iterdir())
        return []

    def said(self) -> str:
        return "\n".join(attempt.said() for attempt in self.attempts)

    def close(self) -> None:
        for attempt in self.attempts:
            attempt.close()
        for undo in reversed(self.undo):
            undo()


def play(schedule: Schedule, stage: Stage) -> None:
    """Play a schedule. Raises AssertionError with the schedule, the failure and the output.

    Removes its files if it succeeds.
    """
    from .faults import FAULTS
    from .judge import judge

    tracking = stage.server().uri if schedule.kind == "mlflow-down" else ""
    run = Playing(schedule, stage, tracking)
    try:
        worlds = FAULTS[schedule.kind](run)
        judge(run, worlds)
    except Exception as error:
        said = "\n".join(run.said().splitlines()[-60:])
        raise AssertionError(
            f"{schedule}\n{type(error).__name__}: {error}\nIn {run.folder}. It said:\n{said}"
        ) from error
    finally:
        run.close()
    shutil.rmtree(run.folder.parent)
