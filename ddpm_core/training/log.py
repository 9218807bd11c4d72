"""log.jsonl: one line per logged step, from which MLflow and the pods report progress."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddpm_core.console import Outage, take_warnings
from ddpm_core.errors import UserError
from ddpm_core.storage.manifest import sync
from ddpm_core.storage.staging import staged_file
from ddpm_core.tracking.rows import read_rows


class RunLog:
    """Appends rows with ascending `step`.

    A resumed run repeats some steps, with the same results. Rows that exist are not written again,
    so a reader that follows the log sees each row once. If the disk is full, rows wait in memory
    until the next row, or until the next snapshot, which is written only after them.
    """

    def __init__(
        self, path: Path, follower: Callable[[dict[str, Any]], None] | None = None
    ) -> None:
        """Open a log; `follower` is called with each row that is added, after that."""
        self.path = path
        self._follower = follower
        self._last = 0
        self._waiting: list[str] = []
        self._lock = threading.Lock()
        self._outage = Outage()

    def recover(self, end: int) -> None:
        """Remove lines that a killed process left incomplete. Raises UserError.

        Rows beyond `end`, the last step of the run, do not keep later rows from being written.
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
        """Add a row and the warnings since the last one.

        If the log has a row of this step or a later one, the warnings wait for the next row.
        """
        if row["step"] <= self._last:
            return
        self._last = row["step"]
        if warnings := take_warnings():
            row = {**row, "warnings": warnings}
        with self._lock:
            self._waiting.append(json.dumps(row) + "\n")
        try:
            self.flush()
        except OSError as error:
            self._outage.begins(
                f"Cannot write {self.path}: {error.strerror}. Keeping rows in memory."
            )
        else:
            self._outage.ends(f"Writing {self.path} again.")
        if self._follower:
            self._follower(row)

    def flush(self) -> None:
        """Write the rows in memory. Raises OSError, and then leaves no part of a row."""
        with self._lock:
            if self._waiting:
                _append(self.path, "".join(self._waiting).encode())
                self._waiting.clear()


def _append(path: Path, data: bytes) -> None:
    """Append all of the data, or nothing, so that readers see complete lines. Raises OSError."""
    # O_NOFOLLOW: a symbolic link would lead out of the workspace.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    with os.fdopen(os.open(path, flags, 0o666), "ab", buffering=0) as file:
        before = os.fstat(file.fileno()).st_size
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            file.truncate(before)
            raise
