"""Snapshots: what they are called, how they are written, found whole and read.

This file knows tensors and plain data; what they mean is the trainer's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from ddpm_core.checkpoint import SETTINGS, Settings
from ddpm_core.console import warn
from ddpm_core.errors import Corrupt, UserError
from ddpm_core.storage import Unreachable, verify
from ddpm_core.storage.files import (
    Count,
    Schema,
    read_object,
    read_tensors,
    save_tensors,
    validated,
)
from ddpm_core.storage.workspace import SNAPSHOTS, Workspace, snapshot_key

OPTIMIZER = "optimizer.safetensors"
NOISE_LEVELS = "noise_levels.safetensors"
STATE = "state.json"

Tensors = Mapping[str, torch.Tensor]


class Chosen(Schema):
    """Fields of execution.Execution."""

    precision: Literal["fp32", "bf16", "fp16"]
    compile: bool


class Sums(Schema):
    """Fields of state.Totals."""

    loss: float
    grad_norm: float
    clipped: float
    skipped: float = 0.0
    steps: Count


class State(Schema):
    """All of state.json that is used."""

    step: Count
    execution: Chosen
    scaler: dict[str, int | float]
    totals: Sums
    history: list[float]


@dataclass(frozen=True)
class SnapshotContents:
    """All of a snapshot, on the host: tensors by file, plain data by file, other files."""

    tensors: Mapping[str, Tensors]
    documents: Mapping[str, Mapping[str, Any]]
    files: Mapping[str, bytes]


Draw = Callable[[SnapshotContents], Mapping[str, bytes]]


def write(workspace: Workspace, step: int, contents: SnapshotContents) -> None:
    """Write a snapshot; it is there whole, or not at all. Raises OSError."""
    with workspace.storage.new_folder(snapshot_key(step), {"step": step}) as folder:
        for name, tensors in contents.tensors.items():
            save_tensors(tensors, folder / name)
        for name, document in contents.documents.items():
            (folder / name).write_text(json.dumps(document, indent=1), encoding="utf-8")
        for name, data in contents.files.items():
            (folder / name).write_bytes(data)
    workspace.storage.forget(snapshot_key(step))


def newest_whole(workspace: Workspace, limit: int, end: int) -> tuple[int | None, dict[int, str]]:
    """Return the newest step up to `limit` to resume from, and why each newer one was skipped.

    At `end` nothing is left to train, so a snapshot of weights alone will do. Each candidate is
    read in full: its checksums hold for values that are not finite, too.
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
            return step, skipped
    return None, skipped


def read(folder: Path) -> SnapshotContents:
    """The tensors and plain data of a snapshot: the files that were written, and no others.

    Raises Corrupt.
    """
    files = verify(folder).files
    tensors = {n: read_tensors(folder / n) for n in files if n.endswith(".safetensors")}
    documents = {}
    for name, schema in ((STATE, State), (SETTINGS, Settings)):
        told = f"{folder.name}/{name}"
        if name not in files:
            raise Corrupt(f"{folder.name} has no {name} among the files that were written.")
        documents[name] = validated(read_object(folder / name, told), schema, told)
    return SnapshotContents(tensors, documents, {})


def _drawn(step: int, contents: SnapshotContents, draw: Draw) -> Mapping[str, bytes]:
    """What `draw` makes; nothing, and a warning, where it fails: a snapshot is worth more."""
    try:
        return draw(contents)
    except Exception as error:
        warn(f"The snapshot of step {step} has no images; they could not be drawn: {error}")
        return {}


class Writer:
    """The one background thread that writes snapshots; a second waits for the first.

    One failure is a warning, since the next snapshot may fit again; two in a row are the end.
    """

    def __init__(
        self,
        workspace: Workspace,
        may_write: Callable[[], None],
        written: Callable[[int], None],
        newest: int | None,
    ) -> None:
        """`may_write` is called before each snapshot, and raises where it must not be written;
        `written` after it, with its step. `newest` is the one there is."""
        self._workspace = workspace
        self._may_write = may_write
        self._written = written
        self._pool = ThreadPoolExecutor(1, "snapshot")
        self._pending: tuple[int, Future[None]] | None = None
        self._failed: str | None = None
        self.newest = newest

    def submit(self, step: int, contents: SnapshotContents, draw: Draw | None = None) -> None:
        """Start writing, with the files that `draw` makes of the contents, in the background.

        Raises UserError if the last two could not be written.
        """
        self.wait(final=False)
        self._pending = step, self._pool.submit(self._write, step, contents, draw)

    def wait(self, final: bool = True) -> None:
        """Until all is on disk. Raises UserError where a final, or a second, snapshot failed."""
        if self._pending is None:
            return
        step, future = self._pending
        self._pending = None
        try:
            future.result()
        except OSError as error:
            whole = f"that of step {self.newest} is whole" if self.newest else "none is written yet"
            message = f"Cannot write the snapshot of step {step}: {error}; {whole}."
            if final or self._failed:
                away = isinstance(error, Unreachable)
                mend = "Run" if away else "Make room or mend the disk, then run"
                raise UserError(f"{message} {mend} the same command again.") from error
            self._failed = message
            warn(f"{message} Training goes on and tries the next one.")
        else:
            self._failed = None
            self.newest = step

    def close(self) -> None:
        self._pool.shutdown()

    def _write(self, step: int, contents: SnapshotContents, draw: Draw | None) -> None:
        if draw:
            contents = replace(contents, files={**contents.files, **_drawn(step, contents, draw)})
        self._may_write()
        write(self._workspace, step, contents)
        self._written(step)
