"""log.jsonl: one line a logged step, the record that everything else about a run follows."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddpm_core.console import Outage
from ddpm_core.errors import UserError
from ddpm_core.storage.manifest import sync
from ddpm_core.storage.staging import staged_file


class RunLog:
    """Rows with ascending `step`; a line half written by a killed process is no row.

    A resumed run does some steps again, with the same result: a row that is there stays, and is
    not written twice, so that whoever follows the log has seen each row once. Rows that a full
    disk refuses wait in memory for the next, or for the snapshot, which is not written before them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last = 0
        self._waiting: list[str] = []
        self._lock = threading.Lock()
        self._outage = Outage()

    def recover(self, end: int) -> None:
        """Drop what a killed process left half written. Raises UserError.

        A damaged row of a step beyond `end`, the last of the run, keeps no later row out.
        """
        rows = list(read_rows(self.path))
        self._last = max((row["step"] for row in rows if row["step"] <= end), default=0)
        if not self.path.exists():
            return
        text = "".join(json.dumps(row) + "\n" for row in rows)
        try:
            with staged_file(self.path) as staging:
                staging.write_text(text, encoding="utf-8")
                sync(staging)
                staging.replace(self.path)
        except OSError as error:
            raise UserError(f"Cannot write {self.path}: {error.strerror}.") from error

    def append(self, row: dict[str, Any]) -> None:
        """Add a row, unless there is one of its step or a later one."""
        if row["step"] <= self._last:
            return
        self._last = row["step"]
        with self._lock:
            self._waiting.append(json.dumps(row) + "\n")
        try:
            self.flush()
        except OSError as error:
            self._outage.begins(f"Cannot write {self.path}: {error.strerror}. Its rows wait.")
        else:
            self._outage.ends(f"{self.path} is written again.")

    def flush(self) -> None:
        """Write the rows that wait. Raises OSError, and leaves no part of a row."""
        with self._lock:
            if self._waiting:
                _append(self.path, "".join(self._waiting).encode())
                self._waiting.clear()


def _append(path: Path, data: bytes) -> None:
    """All of it, or nothing: a follower reads whole lines, and finds the same ones again."""
    # A link would lead out of the workspace.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    with os.fdopen(os.open(path, flags, 0o666), "ab", buffering=0) as file:
        before = os.fstat(file.fileno()).st_size
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            file.truncate(before)
            raise


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The whole rows of a log, each step once.

    The last segment of a run that lost its lease may hold steps that its follower made too. A row
    of a later step than the next new one has is damaged.
    """
    last, held = -1, None
    for row in _parsed(path):
        if row["step"] <= last or (held and held["step"] == row["step"]):
            continue
        if held and held["step"] < row["step"]:
            last = held["step"]
            yield held
        held = row
    if held:
        yield held


def _parsed(path: Path) -> Iterator[dict[str, Any]]:
    """Every line that is a row, in the order of the file."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict) and type(row.get("step")) is int:
                yield row
