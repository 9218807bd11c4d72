"""Read the rows of log.jsonl: one per logged step, with everything that was measured at it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def is_number(value: object) -> bool:
    """Return whether a value of a row is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete rows of a log, each step once, in ascending order.

    The last segment of a run that lost its lease may contain steps that its successor logged too.
    A row with a later step than the row after it is damaged, and is left out.
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
    """Yield every line that is a row, in the order of the file."""
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
