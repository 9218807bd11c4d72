"""What the live page shows of a workspace: progress, curves, grids of milestones and scores."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpm_core.config.durations import in_words
from ddpm_core.evaluation.chart import Chart, chart
from ddpm_core.evaluation.curves import Curve, Line, curves, loss_curves
from ddpm_core.evaluation.pages import environment
from ddpm_core.scores import Results, best, ranked, read_results
from ddpm_core.storage.workspace import GRID, LOG, RESULTS, SNAPSHOTS, Workspace, snapshot_key
from ddpm_core.text import shown
from ddpm_core.tracking.rows import is_number, read_rows
from ddpm_core.tracking.validation import of_rows, trend

POINTS = 200  # of a curve; more rows are thinned
RECENT = 20  # rows that the rate follows from
WARNINGS = 5
SILENT = 60.0  # seconds without a row after which training counts as interrupted, at least
PAUSES = 10  # times the usual pause between rows, likewise
LOCAL, REMOTE = 1.0, 10.0  # seconds between two looks at a workspace in a folder, or in S3

Row = Mapping[str, Any]


class Live:
    """The newest view of a workspace. Looks at it at most once per second, in S3 once in 10 s."""

    def __init__(self, workspace: Workspace, clock: Callable[[], float] = time.time) -> None:
        self._workspace, self._clock = workspace, clock
        self._every = REMOTE if workspace.uri.startswith("s3://") else LOCAL
        self._seen = -float("inf")
        self._view: dict[str, Any] = {}
        self._rows: tuple[int | None, Sequence[Row]] = (None, [])
        self._results: tuple[str | None, Results | None] = (None, None)
        self._grids: dict[int, bool] = {}  # by step, whether there is one

    def view(self) -> dict[str, Any]:
        """Return the title, the steps with a grid, and as HTML the head and the curves.

        Raises OSError or UserError if the workspace is unavailable.
        """
        now = self._clock()
        if now - self._seen >= self._every:
            self._view = self._read(now)
            self._seen = now
        return self._view

    def grid(self, step: int) -> bytes:
        """Return the grid of a milestone as a PNG. Raises OSError if there is none."""
        return self._workspace.storage.read(f"{snapshot_key(step)}/{GRID}")

    def _read(self, now: float) -> dict[str, Any]:
        rows, results = self._all_rows(), self._all_results()
        state = progress_of(rows, now)
        variables = {
            "workspace": shown(self._workspace.uri),
            **state,
            "charts": charts(rows, results),
            "learning": _learning(rows),
            "warnings": _warnings(rows),
            "best": results and best(ranked(results.rows, results.sample)),
        }
        templates = environment(Path(__file__).parent)
        parts = {
            part: templates.get_template(f"{part}.html.j2").render(variables)
            for part in ("head", "curves")
        }
        return {"title": state["title"], "grids": self._with_grids(), **parts}

    def _all_rows(self) -> Sequence[Row]:
        """Return all rows of the log; reads it again only if its size has changed."""
        size = self._workspace.storage.size(LOG)
        if size != self._rows[0]:
            rows = list(read_rows(self._workspace.path(LOG))) if size is not None else []
            self._rows = size, rows
        return self._rows[1]

    def _all_results(self) -> Results | None:
        checksum = self._workspace.storage.checksum(RESULTS)
        if checksum != self._results[0]:
            self._results = checksum, read_results(self._workspace)
        return self._results[1]

    def _with_grids(self) -> list[int]:
        """Return the steps whose snapshot has a grid. A complete snapshot does not change."""
        for step in self._workspace.steps(SNAPSHOTS):
            if step not in self._grids:
                key = f"{snapshot_key(step)}/{GRID}"
                self._grids[step] = self._workspace.storage.exists(key)
        return [step for step, found in sorted(self._grids.items()) if found]


def progress_of(rows: Sequence[Row], now: float) -> dict[str, Any]:
    """Return where a run is: its state in words, its share of the steps and a short title."""
    if not rows:
        return {"state": "Nothing is trained yet.", "share": 0.0, "title": "ddpm", "rate": ""}
    last = rows[-1]
    step, steps = last["step"], int(last.get("steps") or last["step"])
    share = min(1.0, step / max(1, steps))
    recent = rows[-RECENT:]
    seconds = last.get("time", now) - recent[0].get("time", now)
    done = step - recent[0]["step"]
    rate = done / seconds if seconds > 0 else 0.0
    silent = now - last.get("time", now)
    if step >= steps:
        state = f"Finished: {steps:,} steps"
    elif silent > max(SILENT, PAUSES * seconds / max(1, len(recent) - 1)):
        state = f"Interrupted? Step {step:,} of {steps:,} was {in_words(silent)} ago"
    else:
        left = f", about {in_words((steps - step) / rate)} left" if rate else ""
        state = f"Training: step {step:,} of {steps:,}{left}"
    speed = f"{rate:,.3g} steps/s" if rate else ""
    loss = f"loss {last['loss']:.4g}" if "loss" in last else ""
    facts = " · ".join(filter(None, [speed, loss]))
    return {"state": state, "share": share, "title": f"{share:.0%} ddpm", "rate": facts}


def charts(rows: Sequence[Row], results: Results | None) -> list[Chart]:
    """Return the charts of a run; those without values are left out."""
    found = loss_curves(of_rows(rows))
    found += [
        Curve("training loss", "lower is better", _line(rows, "loss", "training"), close=True),
        Curve("learning rate", "", _line(rows, "lr", "learning rate")),
        Curve("images per second", "", _line(rows, "images_per_second", "all workers")),
        Curve("memory, GB", "peak", _line(rows, "memory", "worker 0", 1e-9)),
    ]
    if results is not None:
        found += curves(ranked(results.rows, results.sample)).values()
    return [chart(curve) for curve in found if curve.lines]


def _line(rows: Sequence[Row], key: str, name: str, factor: float = 1.0) -> list[Line]:
    """Return a line of at most about POINTS values, the means of neighboring rows; [] of none."""
    points = [(row["step"], factor * row[key]) for row in rows if _is_finite(row.get(key))]
    width = -(-len(points) // POINTS) or 1
    parts = [points[i : i + width] for i in range(0, len(points), width)]
    means = [(part[-1][0], sum(v for _, v in part) / len(part)) for part in parts]
    return [Line(name, means)] if means else []


def _is_finite(value: Any) -> bool:
    return is_number(value) and math.isfinite(value)


def _learning(rows: Sequence[Row]) -> str:
    found = trend(of_rows(rows))
    return found.sentence() if found else ""


def _warnings(rows: Sequence[Row]) -> list[tuple[int, str]]:
    """Return the last warnings of the run, the newest first, with their steps."""
    listed = [
        (row["step"], shown(str(text)))
        for row in rows
        if isinstance(row.get("warnings"), list)
        for text in row["warnings"]
    ]
    return listed[-WARNINGS:][::-1]
