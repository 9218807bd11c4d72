"""log.jsonl: one line a logged step, the record that everything else about a run follows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddpm_core.errors import UserError
from ddpm_core.storage.sealing import sync
from ddpm_core.storage.staging import staged_file


class RunLog:
    """Rows with ascending `step`; a line half written by a killed process is no row.

    A resumed run does some steps again, with the same result: a row that is there stays, and is
    not written twice, so that whoever follows the log has seen each row once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last = 0

    def recover(self) -> None:
        """Drop what a killed process left half written. Raises UserError."""
        rows = list(read_rows(self.path))
        self._last = max((row["step"] for row in rows), default=0)
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
        """Add a row, unless there is one of its step or a later one. Raises UserError."""
        if row["step"] <= self._last:
            return
        try:
            # A link would lead out of the workspace.
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
            with os.fdopen(os.open(self.path, flags, 0o666), "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise UserError(f"Cannot write {self.path}: {error.strerror}.") from error
        self._last = row["step"]


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The whole rows of a log, each step once.

    The last segment of a run that lost its lease may hold steps that its follower made too.
    """
    last = -1
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict) and type(row.get("step")) is int and row["step"] > last:
                last = row["step"]
                yield row
