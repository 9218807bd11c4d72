"""JSON records in the log of a worker, for the launcher that follows it.

`ddpm jobs train` must know how far training has come and why a worker failed. It sets
DDPM_LOG_RECORDS=1 in the workers' pods; the program then writes a line of JSON beside the lines for
people. The launcher reads these records alone, so the wording of messages can change freely.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import PurePath

VARIABLE = "DDPM_LOG_RECORDS"
LONGEST = 3000  # characters of a message: a pipe takes short lines of several processes unmixed

_START = '{"ddpm": '


@dataclass(frozen=True)
class Error:
    """The error with which a process ends. `attempt` is the same for all processes of a start."""

    message: str
    attempt: str


@dataclass(frozen=True)
class Progress:
    """How many units of a task, such as steps of "train", are done."""

    task: str
    done: int


_KINDS: dict[str, type[Error] | type[Progress]] = {"error": Error, "progress": Progress}


def write_error(message: str) -> None:
    """Write the error with which this process ends."""
    _write("error", Error(message[:LONGEST], _attempt()))


def write_progress(task: str, done: int) -> None:
    """Write how much of a task is done."""
    _write("progress", Progress(task, done))


def parse(line: str) -> Error | Progress | None:
    """Return the record in a line of a log; None for any other line."""
    if not line.startswith(_START):
        return None
    try:
        fields = json.loads(line)
        return _KINDS[fields.pop("ddpm")](**fields)
    except (ValueError, KeyError, TypeError):
        return None


def _write(kind: str, record: Error | Progress) -> None:
    if os.environ.get(VARIABLE) == "1" and sys.stderr is not None:
        sys.stderr.write(json.dumps({"ddpm": kind, **asdict(record)}) + "\n")
        sys.stderr.flush()


def _attempt() -> str:
    """Return an id that the processes of one start share, and no other start in any container.

    torchrun makes a random folder, in it a folder for each start, and in that a folder for each
    process, which contains the error file.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return str(PurePath(error_file).parent.parent) if error_file else str(os.getpid())
