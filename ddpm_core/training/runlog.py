"""log.jsonl: one line a logged step, the record that everything else about a run follows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddpm_core.errors import UserError


class RunLog:
    """Rows with ascending `step`; a line half written by a killed process is no row."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, row: dict[str, Any]) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise UserError(f"Cannot write {self.path}: {error.strerror}.") from error

    def truncate(self, step: int) -> None:
        """Keep the rows up to `step`: the work after it is done again."""
        if not self.path.exists():
            return
        lines = "".join(
            json.dumps(row) + "\n" for row in read_rows(self.path) if row["step"] <= step
        )
        staging = self.path.with_name(f".{self.path.name}")
        staging.write_text(lines, encoding="utf-8")
        staging.replace(self.path)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The whole rows of a log, in order."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                yield row
