"""A log.jsonl read while it grows."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

ROWS_AT_ONCE = 100


@dataclass(frozen=True)
class Row:
    """One line of log.jsonl: its numbers, their step, and when it was written (unix ms)."""

    step: int
    milliseconds: int
    values: dict[str, float]


class Log:
    """The rows of a log.jsonl, from where the last reading ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0  # bytes that have been sent

    def peek(self, limit: int = ROWS_AT_ONCE) -> tuple[list[Row], int]:
        """Up to `limit` whole lines from the offset on, as rows; and the offset after them."""
        if not self.path.is_file():
            return [], self.offset
        if self.path.stat().st_size < self.offset:  # cut by a run that resumed
            self.offset = 0
        rows, end = [], self.offset
        with self.path.open("rb") as file:
            file.seek(self.offset)
            for line, _ in zip(file, range(limit), strict=False):
                if not line.endswith(b"\n"):
                    break
                end += len(line)
                if row := parse(line):
                    rows.append(row)
        return rows, end

    def remaining(self) -> int:
        """How many whole rows lie beyond the offset."""
        rows, _ = self.peek(limit=2**62)
        return len(rows)


def parse(line: bytes) -> Row | None:
    """A line's numbers; a line that is damaged is no row."""
    try:
        values = json.loads(line)
        step = int(values.pop("step"))
        milliseconds = int(1000 * float(values.pop("time", None) or time.time()))
        numbers = {
            key: float(value)
            for key, value in values.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    return Row(step, milliseconds, numbers)
