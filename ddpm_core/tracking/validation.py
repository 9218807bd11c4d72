"""The held-out loss of a run, from its log: the curve, and the step from which it rises."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpm_core.config import Config
from ddpm_core.storage.workspace import LOG, SNAPSHOTS, Workspace
from ddpm_core.tracking.rows import is_number, read_rows

BINS = 8  # parts of equal probability, from little to much noise
LATER = 3  # measurements after the lowest one that must all be higher for the loss to rise
SIGNIFICANT = 0.01  # relative difference above which a measurement is higher

Measurement = dict[str, float]  # `step` and losses by `key`


def key(split: str, average: str = "", part: int = 0) -> str:
    """Return the name of a loss in a row of the log.

    Args:
        split: held_out or train.
        average: ema for the averaged weights, "" for the weights.
        part: From 1 to BINS; 0: all noise levels.
    """
    parts = ["val", "train" if split == "train" else "", "loss", average, f"bin{part}" * bool(part)]
    return "_".join(filter(None, parts))


def measurements(workspace: Workspace) -> list[Measurement]:
    """Return the rows of the log with a held-out loss, reduced to the losses by `key`."""
    return of_rows(read_rows(workspace.path(LOG))) if workspace.storage.exists(LOG) else []


def of_rows(rows: Iterable[Mapping[str, Any]]) -> list[Measurement]:
    """Return those of the rows of a log with a held-out loss, reduced to the losses by `key`."""
    return [
        {name: value for name, value in row.items() if name == "step" or name.startswith("val_")}
        for row in rows
        if is_number(row.get(key("held_out")))
    ]


def sentence(config: Config, workspace: Workspace, log: Path | None = None) -> str:
    """Return the trend of the run in a workspace, and the best milestone; "" if unmeasured.

    `log` is the file that the run writes now, if that is not the workspace's.
    """
    found = trend(of_rows(read_rows(log)) if log else measurements(workspace))
    steps = [step for step in workspace.steps(SNAPSHOTS) if config.train.is_milestone(step)]
    return found.sentence(steps) if found else ""


def line(rows: Iterable[Mapping[str, float]], split: str) -> list[tuple[float, float]]:
    """Return (step, loss) of a split, of the averaged weights if the run has an average."""
    averaged, plain = key(split, "ema"), key(split)
    return [(row["step"], row.get(averaged, row[plain])) for row in rows]


@dataclass(frozen=True)
class Trend:
    """What the held-out loss says about longer training."""

    step: int  # of the last measurement
    loss: float
    lowest_step: int
    lowest: float
    rises: bool  # whether the loss rises from the lowest step on

    def sentence(self, milestones: Sequence[int] = ()) -> str:
        """Return the trend in words, with the milestone nearest to the lowest loss if it rises."""
        if self.step == self.lowest_step:
            return f"The held-out loss is {self.loss:.4g} at step {self.step:,}, the lowest so far."
        lowest = f"{self.lowest:.4g} at step {self.lowest_step:,}"
        if not self.rises:
            return f"The held-out loss is {self.loss:.4g} at step {self.step:,}; lowest: {lowest}."
        found = (
            f"The held-out loss rises from step {self.lowest_step:,} on, from {self.lowest:.4g} to "
            f"{self.loss:.4g}: the network memorizes."
        )
        if milestones:
            best = min(milestones, key=lambda step: abs(step - self.lowest_step))
            found += f" The best milestone by this loss is step {best:,}."
        return found


def trend(rows: Sequence[Mapping[str, float]]) -> Trend | None:
    """Return the trend of measurements; None without any.

    The loss rises if the last LATER measurements are all SIGNIFICANT above the lowest one. Fixed
    images and noise leave only the fluctuation of the weights, which their average hides.
    """
    points = line(rows, "held_out")
    if not points:
        return None
    step, loss = points[-1]
    lowest_step, lowest = min(points, key=lambda point: point[1])
    later = [loss for at, loss in points if at > lowest_step]
    rises = len(later) >= LATER and min(later[-LATER:]) > (1 + SIGNIFICANT) * lowest
    return Trend(int(step), loss, int(lowest_step), lowest, rises)
