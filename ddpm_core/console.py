"""Messages and progress: a bar in a terminal, plain lines in a log file."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from ddpm_core.config.durations import in_words
from ddpm_core.errors import Denied, Interrupted, UserError, write_termination_message
from ddpm_core.runtime import log_records, memory
from ddpm_core.text import masked, shown

WIDE = 70  # columns from which on the bar also shows the rate and a note
PLAIN_INTERVAL = 10.0  # seconds between the first lines in a log file

# The newest warnings that `take_warnings` has not returned yet.
_warnings: deque[str] = deque(maxlen=10)

_console = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)


def say(message: str) -> None:
    """Print a message to stderr. Results go to stdout."""
    _console.print(printable(message), markup=False)


def warn(message: str) -> None:
    """Print a warning to stderr."""
    _warnings.append(printable(message))
    _console.print("warning: " + printable(message), markup=False, style="yellow")


def take_warnings() -> list[str]:
    """Return the newest warnings since the last call, at most 10."""
    found = list(_warnings)
    for _ in found:
        _warnings.popleft()
    return found


class _Masked:
    """A text stream that masks the secrets of URIs in everything written to it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(masked(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stream)


def guard() -> None:
    """Mask secrets in all output of this process, including tracebacks and logs of libraries."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Masked):
            setattr(sys, name, _Masked(stream))


@contextmanager
def report_errors(who: str) -> Iterator[None]:
    """Print errors that the user can fix as `who: MESSAGE`, and exit with their status.

    Everything that the process prints is masked from then on. In a pod the error also becomes the
    termination message, in place of that of an earlier process of the container.
    """
    guard()
    write_termination_message("")

    def report(message: str, error: BaseException) -> None:
        message = f"{message} {advice_in_pod(error)}".strip()
        say(f"{who}: {message}")
        log_records.write_error(message)
        write_termination_message(message)

    try:
        with memory.translate_errors():
            yield
    except UserError as error:
        report(str(error), error)
        raise SystemExit(1) from None
    except Interrupted as stop:
        say(str(stop))
        raise SystemExit(stop.status) from None
    except BrokenPipeError:
        raise
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        report("PyTorch is missing, as in the light image. Use the full image for this.", error)
        raise SystemExit(1) from None
    except OSError as error:  # a full disk, a file of a different user
        at = error.filename2 or error.filename  # the target of a copy or a rename
        place = f": {at}" if at else ""
        notes = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
        report(f"{error.strerror or error}{place}.{notes}", error)
        raise SystemExit(1) from None


_VOLUME_ADVICE = (
    "If this is a volume that belongs to root, mount it once in a pod with an fsGroup "
    '(docs/kubeflow.md, "First use of a claim").'
)
_KEYS_ADVICE = (
    "In a pod the keys come from the Secret ddpm-s3, or from the Secrets of the job's option "
    "`secrets`."
)


def advice_in_pod(error: BaseException | None) -> str:
    """Return what to do about an error that has its usual cause in the pod it happened in.

    That is the advice for the error or the first of its causes that has one; "" outside a pod.
    """
    while error is not None and "KUBERNETES_SERVICE_HOST" in os.environ:
        if isinstance(error, Denied):
            return _KEYS_ADVICE
        if isinstance(error, PermissionError):
            return _VOLUME_ADVICE
        error = error.__cause__
    return ""


class Outage:
    """A service that is unavailable for a while: a warning first, a message at the end."""

    def __init__(self) -> None:
        self.on = False

    def begins(self, message: str) -> None:
        """Print a warning unless the outage has begun before."""
        if not self.on:
            warn(message)
        self.on = True

    def ends(self, message: str) -> None:
        """Print a message if there was an outage."""
        if self.on:
            say(message)
        self.on = False


def printable(text: str) -> str:
    """Return a text without secrets and control characters that the terminal can encode."""
    encoding = getattr(sys.stderr, "encoding", None) or "ascii"
    return shown(text).encode(encoding, "backslashreplace").decode(encoding)


@contextmanager
def progress(
    description: str, total: int, unit: str, done: int = 0
) -> Iterator[Callable[..., None]]:
    """Yield `advance(n=1, note="")`, which shows the count, the rate in units/s and the time left.

    `done` is the number of units that an earlier run finished. They do not count for the rate. A
    note is shown until the next note.
    """
    if _console.is_terminal and not _console.is_dumb_terminal:
        with _bar(description, total, unit, done) as advance:
            yield advance
    else:
        yield _lines(description, total, unit, done)


@contextmanager
def _bar(description: str, total: int, unit: str, done: int) -> Iterator[Callable[..., None]]:
    wide = _console.width >= WIDE
    columns = [
        TextColumn("{task.description}"),
        *([BarColumn()] if wide else []),
        MofNCompleteColumn(),
        *([TextColumn("{task.fields[rate]}")] if wide else []),
        TimeRemainingColumn(compact=not wide),
        *([TextColumn("{task.fields[note]}")] if wide else []),
    ]
    with Progress(*columns, console=_console) as bar:
        task = bar.add_task(description, total=total, completed=done, rate="", note="")
        pace, last = Pace(done), ""

        def advance(n: int = 1, note: str = "") -> None:
            nonlocal last
            last = printable(note) or last
            bar.update(task, advance=n, rate=f"{_digits(pace.after(n))} {unit}/s", note=last)

        yield advance


def _lines(description: str, total: int, unit: str, done: int) -> Callable[..., None]:
    pace, last = Pace(done), ""
    printed = pace.started  # time of the last line

    def advance(n: int = 1, note: str = "") -> None:
        nonlocal printed, last
        rate, now = pace.after(n), time.monotonic()
        last = note or last
        finished = n > 0 and pace.count >= total
        if now - printed < _line_interval(now - pace.started) and not finished:
            return
        printed = now
        parts = [f"{description}: {pace.count}/{total} {unit}", f"{_digits(rate)}/s"]
        if pace.count < total and rate:
            parts.append(f"{in_words((total - pace.count) / rate)} left")
        say(", ".join([*parts, last] if last else parts))
        log_records.write_progress(description, pace.count)

    return advance


def _digits(rate: float) -> str:
    """Return a rate with one decimal place, or with two digits if it is below 1."""
    return f"{rate:,.1f}" if rate >= 1 or not rate else f"{rate:.2g}"


def _line_interval(elapsed: float) -> float:
    """Return the seconds between two lines: 10 at first, 60 after 20 minutes."""
    return min(PLAIN_INTERVAL * 6, max(PLAIN_INTERVAL, elapsed / 20))


class Pace:
    """The rate of the last minute, which forgets a slow start.

    rich has its own estimate (`Task.speed`), but none after the first unit, and none at all while a
    unit takes longer than its window: steps of 65 s would never show a rate.
    """

    WINDOW = 60.0  # seconds

    def __init__(self, done: int) -> None:
        self.count = done
        self.started = time.monotonic()
        self._seen = deque([(self.started, done)])

    def after(self, n: int) -> float:
        """Count `n` more units as done now, and return the units per second."""
        self.count += n
        now = time.monotonic()
        while len(self._seen) > 1 and self._seen[1][0] <= now - self.WINDOW:
            self._seen.popleft()
        since, before = self._seen[0]
        if now >= self._seen[-1][0] + 1:
            self._seen.append((now, self.count))
        return (self.count - before) / max(1e-9, now - since)
