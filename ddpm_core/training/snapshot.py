"""Snapshots on disk: write them in the background, read them, and prune old ones.

This module handles tensors by name and plain data; state.py knows what they mean.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Literal

import torch
from pydantic import Field

from ddpm_core.checkpoint import SETTINGS, Settings
from ddpm_core.config import Train
from ddpm_core.console import warn
from ddpm_core.errors import Corrupt, UserError
from ddpm_core.storage import MANIFEST, Unreachable, verify
from ddpm_core.storage.files import (
    Count,
    Model,
    Schema,
    as_model,
    read_object,
    read_tensors,
    save_tensors,
)
from ddpm_core.storage.manifest import Manifest
from ddpm_core.storage.workspace import SNAPSHOTS, Workspace, snapshot_key

OPTIMIZER = "optimizer.safetensors"
NOISE_LEVELS = "noise_levels.safetensors"
STATE = "state.json"

Tensors = Mapping[str, torch.Tensor]


class SavedExecution(Schema):
    """Fields of optim.Execution."""

    precision: Literal["fp32", "bf16", "fp16"]
    compile: bool


class SavedTotals(Schema):
    """Fields of state.Totals."""

    loss: float
    grad_norm: float
    clipped: float
    skipped: float = 0.0
    steps: Count


class State(Schema):
    """The fields of state.json that are read."""

    step: Count
    execution: SavedExecution
    scaler: dict[str, int | float]
    totals: SavedTotals
    history: list[float]


@dataclass(frozen=True)
class SnapshotContents:
    """Everything in a snapshot, on the host. `tensors` and `files` have a key for each file."""

    tensors: Mapping[str, Tensors]
    state: State
    settings: Settings
    files: Mapping[str, bytes] = field(default_factory=dict)


Draw = Callable[[SnapshotContents], Mapping[str, bytes]]  # returns files, by name


def write(workspace: Workspace, step: int, contents: SnapshotContents) -> None:
    """Write a snapshot in full, or not at all. Raises OSError."""
    with workspace.storage.new_folder(snapshot_key(step), {"step": step}) as folder:
        for name, tensors in contents.tensors.items():
            save_tensors(tensors, folder / name)
        for name, document in ((STATE, contents.state), (SETTINGS, contents.settings)):
            text = json.dumps(document.model_dump(), indent=1)
            (folder / name).write_text(text, encoding="utf-8")
        for name, data in contents.files.items():
            (folder / name).write_bytes(data)
    workspace.storage.forget(snapshot_key(step))


def newest_complete(
    workspace: Workspace, limit: int, end: int
) -> tuple[int, SnapshotContents | None, dict[int, str]]:
    """Return the newest step up to `limit` to resume from, its contents, and skipped snapshots.

    The step is 0 if there is none. Of each skipped snapshot, returns the reason by step. At step
    `end` training is done, so there a snapshot without its optimizer is enough. Each candidate is
    read in full, since matching checksums do not rule out values that are not finite.
    """
    skipped: dict[int, str] = {}
    for step in reversed(workspace.steps(SNAPSHOTS)):
        if step > limit:
            continue
        try:
            contents = read(workspace.path(snapshot_key(step)))
        except Unreachable:
            raise
        except (Corrupt, OSError) as error:
            skipped[step] = str(error)
            continue
        if OPTIMIZER in contents.tensors or step == end:
            return step, contents, skipped
    return 0, None, skipped


def read(folder: Path) -> SnapshotContents:
    """Read the tensors and plain data of a snapshot, and only files in its manifest.

    Raises Corrupt.
    """
    files = verify(folder).files
    tensors = {n: read_tensors(folder / n) for n in files if n.endswith(".safetensors")}
    for name in (STATE, SETTINGS):
        if name not in files:
            raise Corrupt(f"{folder.name}/{name} is missing from the snapshot's manifest.")
    return SnapshotContents(
        tensors=tensors,
        state=_document(folder, STATE, State),
        settings=_document(folder, SETTINGS, Settings),
    )


def _document(folder: Path, name: str, schema: type[Model]) -> Model:
    label = f"{folder.name}/{name}"
    return as_model(read_object(folder / name, label), schema, label)


# Writing in the background


@dataclass
class _Job:
    """A snapshot to write, and what became of it."""

    step: int
    contents: SnapshotContents
    draw: Draw | None
    finished: threading.Event = field(default_factory=threading.Event)
    written: bool = False
    error: BaseException | None = None


class Writer:
    """Writes snapshots in one background thread; a second snapshot waits for the first.

    One failure is a warning, since the next snapshot may fit again. A second one in a row raises.
    """

    def __init__(
        self,
        workspace: Workspace,
        may_write: Callable[[], None],
        written: Callable[[int], None],
        newest: int | None,
    ) -> None:
        """Start the thread.

        Calls `may_write` before each snapshot, which raises if it must not be written, and
        `written` after it, with its step. `newest` is the step of the newest snapshot on disk.
        """
        self._workspace = workspace
        self._may_write = may_write
        self._written = written
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._pending: _Job | None = None
        self._failed = False  # whether the last snapshot could not be written
        self.newest = newest
        # Starting a thread needs memory, so start it here, before training takes the most.
        self._thread = threading.Thread(target=self._run, name="snapshot", daemon=True)
        self._thread.start()

    def submit(self, step: int, contents: SnapshotContents, draw: Draw | None = None) -> None:
        """Start writing a snapshot, with the files that `draw` makes from its contents.

        Raises UserError if the last two could not be written.
        """
        self.wait(final=False)
        self._pending = _Job(step, contents, draw)
        self._jobs.put(self._pending)

    def wait(self, final: bool = True) -> None:
        """Wait until every snapshot is on disk.

        Raises UserError if the snapshot could not be written and is the final one or the second
        such in a row, or if the thread died; and any other error than OSError that the thread met.
        """
        # Taken before anything is raised, so that a caller that continues does not meet it twice.
        job, self._pending = self._pending, None
        if job is None:
            return
        # A thread that dies outside of its `try`, such as for lack of memory, sets no event.
        while not job.finished.wait(timeout=1.0) and self._thread.is_alive():
            pass
        if job.written:
            self._failed = False
            self.newest = job.step
        elif isinstance(job.error, OSError):
            self._report(job.step, job.error, final)
            self._failed = True
        elif job.error:
            raise job.error
        else:
            raise UserError(
                f"Cannot write the snapshot of step {job.step}: the thread that writes it died, "
                "most likely because memory ran out. Run the same command again."
            )

    def close(self) -> None:
        """Write what is pending, and end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _report(self, step: int, error: OSError, final: bool) -> None:
        """Warn about a snapshot that could not be written; raise if training should not go on."""
        if self.newest:
            complete = f"the newest complete snapshot is that of step {self.newest}"
        else:
            complete = "there is no complete snapshot yet"
        message = f"Cannot write the snapshot of step {step}: {error}; {complete}."
        if final or self._failed:
            remedy = "Run" if isinstance(error, Unreachable) else "Free or repair the disk and run"
            raise UserError(f"{message} {remedy} the same command again.") from error
        warn(f"{message} Training continues and tries the next one.")

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._write(job.step, job.contents, job.draw)
                job.written = True
            except BaseException as error:  # whatever it is, `wait` raises it in the main thread
                job.error = error
            finally:
                job.finished.set()
            del job  # frees the tensors, since the next snapshot is copied while this thread waits

    def _write(self, step: int, contents: SnapshotContents, draw: Draw | None) -> None:
        # Drawing comes first because it takes long: `may_write` checks the lease right before the
        # write, and stores the log, which must not be older than the snapshot.
        if draw:
            contents = replace(contents, files={**contents.files, **_drawn(step, contents, draw)})
        self._may_write()
        write(self._workspace, step, contents)
        self._written(step)


def _drawn(step: int, contents: SnapshotContents, draw: Draw) -> Mapping[str, bytes]:
    """Return what `draw` makes; if it fails, warn and return nothing, so the snapshot is kept."""
    try:
        return draw(contents)
    except Exception as error:
        warn(f"Cannot draw the images of the snapshot of step {step}: {error}")
        return {}


# Pruning


class SavedTrain(Schema):
    """The field of `train` in a snapshot's settings that pruning reads."""

    milestone_every: Annotated[int, Field(ge=1)]


class SavedParams(Schema):
    """The section of a snapshot's params that pruning reads."""

    train: SavedTrain


class SavedSettings(Schema):
    """The part of config.json that pruning reads."""

    params: SavedParams


def prunable(steps: Iterable[int], train: Train) -> tuple[list[int], list[int]]:
    """Return the steps to remove, and the milestones to reduce to their weights.

    The newest `train.keep` snapshots stay as they are; of older ones only milestones stay.
    """
    older = sorted(steps)[: -train.keep]
    milestones = [step for step in older if train.is_milestone(step)]
    return [step for step in older if step not in milestones], milestones


def prune(workspace: Workspace, train: Train) -> None:
    """Delete what `prunable` names. A failed deletion is a warning.

    Milestones of an earlier `train.milestone_every` stay: changing the setting deletes nothing.
    """
    remove, reduce = prunable(workspace.steps(SNAPSHOTS), train)
    for step in sorted([*remove, *reduce]):
        try:
            if step in reduce or _was_milestone(workspace, step):
                _remove_optimizer(workspace, step)
            else:
                workspace.storage.remove(snapshot_key(step))
        except OSError as error:
            warn(f"Cannot prune the snapshot of step {step}: {error.strerror}.")


def _was_milestone(workspace: Workspace, step: int) -> bool:
    """Return whether a snapshot was a milestone by its own settings, or was reduced to weights."""
    key = snapshot_key(step)
    manifest = workspace.read_model(f"{key}/{MANIFEST}", Manifest)
    saved = workspace.read_model(f"{key}/{SETTINGS}", SavedSettings)
    milestone = saved is not None and step % saved.params.train.milestone_every == 0
    return milestone or (manifest is not None and OPTIMIZER not in manifest.files)


def _remove_optimizer(workspace: Workspace, step: int) -> None:
    """Remove the optimizer from a snapshot.

    The manifest is rewritten first: if the process dies in between, the snapshot is still complete.
    """
    key = snapshot_key(step)
    manifest = workspace.read_json(f"{key}/{MANIFEST}")
    if OPTIMIZER in manifest.get("files", {}):
        del manifest["files"][OPTIMIZER]
        workspace.write_json(f"{key}/{MANIFEST}", manifest)
    workspace.storage.remove(f"{key}/{OPTIMIZER}")
