"""TensorBoard's event files, a copy of log.jsonl and of the scores: tracking.tensorboard.

Each training has a folder with its rows and grids, and in it one for each way of scoring, so that
no curve mixes two. PyTorch's SummaryWriter writes the files, by tensorboard's own record writer.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpm_core.config import Config
from ddpm_core.config.paths import output_path
from ddpm_core.console import warn
from ddpm_core.errors import not_installed
from ddpm_core.storage.workspace import Workspace
from ddpm_core.tracking.rows import is_number
from ddpm_core.tracking.run import child_name, evidence_key, metric_name

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

NOT_METRICS = ("step", "time")  # of a row

Score = tuple[int, Mapping[str, float]]  # a step, and values by name


class Events:
    """Event files of one folder, from one step on. After a first error, nothing more is written.

    A reader of the folder drops events of earlier files from that step on. So a resumed run, which
    repeats the steps since its snapshot, has each step once.
    """

    def __init__(self, folder: Path | None, first: int = 0) -> None:
        """Open a new file in `folder`; None: write nothing.

        `first` is the first step that will be written; 0 if the folder is new.
        """
        self._folder = folder
        self._writer: SummaryWriter | None = None
        self._first = first if folder and has_events(folder) else 0
        if folder is not None:
            self._attempt(self._open)

    def _open(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=self._first)

    def _attempt(self, write: Callable[[], object]) -> None:
        """Call a function that writes; after an error of the disk report it once and stop."""
        try:
            write()
        except OSError as error:
            self._writer = None
            warn(f"Stopped writing events for TensorBoard to {self._folder}: {error}.")

    def row(self, row: Mapping[str, Any]) -> None:
        """Write the numbers of a row of log.jsonl, unless its step is before the first."""
        if row["step"] >= self._first:
            numbers = {
                metric_name("train", name): float(value)
                for name, value in row.items()
                if is_number(value) and name not in NOT_METRICS
            }
            self.values(row["step"], numbers, row.get("time"))

    def values(self, step: int, values: Mapping[str, float], time: float | None = None) -> None:
        """Write values of a step; `time` is in Unix seconds, None: now."""
        for name, value in values.items():
            if self._writer:
                add = self._writer.add_scalar
                self._attempt(lambda: add(name, value, step, walltime=time))  # noqa: B023

    def image(self, step: int, name: str, png: bytes) -> None:
        """Write an image of a step."""
        import numpy as np
        from PIL import Image

        if self._writer:
            pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
            add = self._writer.add_image
            self._attempt(lambda: add(name, pixels, step, dataformats="HWC"))

    def flush(self) -> None:
        """Write to disk what waits in memory."""
        if self._writer:
            self._attempt(self._writer.flush)

    def close(self) -> None:
        """Flush, and close the file."""
        if self._writer:
            self._attempt(self._writer.close)
        self._writer = None


def has_events(folder: Path) -> bool:
    """Return whether a folder has an event file."""
    return any(folder.glob("events.out.tfevents.*"))


def folder_of(config: Config, workspace: Workspace, identity: str) -> Path | None:
    """Return the folder of a training, or None if TensorBoard is off.

    It is named like the run in MLflow, so that trainings with different settings are separate.
    """
    given = config.tracking.tensorboard
    if given is None:
        return None
    if find_spec("tensorboard") is None:
        warn(f"tracking.tensorboard is off. {not_installed('tensorboard', 'tensorboard')}")
        return None
    return output_path(given) / f"{Path(workspace.uri).name}-{identity[:8]}"


def write_rows(folder: Path | None, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write the rows of a training that has ended, unless its folder has events already."""
    if folder is not None and not has_events(folder):
        events = Events(folder)
        for row in rows:
            events.row(row)
        events.close()


def write_scores(
    folder: Path | None, scored: Iterable[tuple[Mapping[str, Any], Score]], new: bool
) -> None:
    """Write all scores of a training, in a folder for each evidence.

    Args:
        folder: That of the training; None: write nothing.
        scored: The evidence, step and values of each checkpoint, by step.
        new: Whether there are new scores. If not, only missing folders are written.
    """
    if folder is None:
        return
    groups: dict[str, list[Score]] = {}
    for evidence, score in scored:
        name = f"{child_name(evidence)}, {evidence_key(evidence)[:6]}".replace(", ", "-")
        groups.setdefault(name.replace(" ", "-"), []).append(score)
    for name, scores in groups.items():
        if new or not has_events(folder / name):
            events = Events(folder / name)  # from step 0, which replaces earlier scores
            for step, values in scores:
                events.values(step, {metric_name("", key): v for key, v in values.items()})
            events.close()
