"""What a person reads while work goes on: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

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
from ddpm_core.errors import Interrupted, UserError
from ddpm_core.masking import masked, shown
from ddpm_core.runtime import log_records, memory

WIDE = 70  # columns of a terminal that has room for more than what is done and the time left
PLAIN_INTERVAL = 10.0  # seconds between the first lines where there is no terminal

_console = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)


def say(message: str) -> None:
    """One line to stderr; stdout is for results."""
    _console.print(printable(message), markup=False)


def warn(message: str) -> None:
    _console.print("warning: " + printable(message), markup=False, style="yellow")


class _Guarded:
    """A stream of text that masks what is written to it."""

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
    """Mask all that this process prints: log records and tracebacks of libraries too."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Guarded):
            setattr(sys, name, _Guarded(stream))


@contextmanager
def telling(who: str) -> Iterator[None]:
    """Turn our errors and the machine's into one sentence, `who: ...`, and the exit status.

    What the process prints is masked from then on.
    """
    guard()

    def report(message: str) -> None:
        say(f"{who}: {message}")
        log_records.write_error(message)

    try:
        with memory.translate_errors():
            yield
    except UserError as error:
        report(str(error))
        raise SystemExit(1) from None
    except Interrupted as stop:
        say(str(stop))
        raise SystemExit(stop.status) from None
    except BrokenPipeError:
        raise
    except OSError as error:  # a full disk, a file of another's
        # Of a copy or a rename that is the target.
        at = error.filename2 or error.filename
        place = f": {at}" if at else ""
        notes = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
        report(f"{error.strerror or error}{place}.{notes}")
        raise SystemExit(1) from None


class Outage:
    """Something that is away for a while: told once when it goes, and once when it is back."""

    def __init__(self) -> None:
        self.on = False

    def begins(self, message: str) -> None:
        if not self.on:
            warn(message)
        self.on = True

    def ends(self, message: str) -> None:
        if self.on:
            say(message)
        self.on = False


def printable(text: str) -> str:
    """Text without secrets and with nothing that steers a terminal, in the terminal's encoding."""
    encoding = getattr(sys.stderr, "encoding", None) or "ascii"
    return shown(text).encode(encoding, "backslashreplace").decode(encoding)


@contextmanager
def progress(
    description: str, total: int, unit: str, done: int = 0
) -> Iterator[Callable[..., None]]:
    """Yield `advance(n=1, note="")`; shows what is done, the rate in units/s and the time left.

    `done` is what an earlier run has done already; it does not count for the rate. A note stays
    until the next one.
    """
    if _console.is_terminal and not _console.is_dumb_terminal:
        with _bar(description, total, unit, done) as advance:
            yield advance
    else:
        yield _plain(description, total, unit, done)


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
            bar.update(task, advance=n, rate=f"{digits(pace.after(n))} {unit}/s", note=last)

        yield advance


def _plain(description: str, total: int, unit: str, done: int) -> Callable[..., None]:
    pace, last = Pace(done), ""
    shown = pace.started

    def advance(n: int = 1, note: str = "") -> None:
        nonlocal shown, last
        rate, now = pace.after(n), time.monotonic()
        last = note or last
        finished = n > 0 and pace.count >= total
        if now - shown < plain_interval(now - pace.started) and not finished:
            return
        shown = now
        unknown = pace.count >= total or not rate
        left = "" if unknown else f", {in_words((total - pace.count) / rate)} left"
        after = f", {last}" if last else ""
        say(f"{description}: {pace.count}/{total} {unit}, {digits(rate)}/s{left}{after}")
        log_records.write_progress(description, pace.count)

    return advance


def digits(rate: float) -> str:
    return f"{rate:,.1f}" if rate >= 1 or not rate else f"{rate:.2g}"


def plain_interval(elapsed: float) -> float:
    """Seconds to the next line: 10 at first, and a minute for what takes hours."""
    return min(PLAIN_INTERVAL * 6, max(PLAIN_INTERVAL, elapsed / 20))


class Pace:
    """How fast work goes at present: over the last minute, so that a slow start is forgotten."""

    WINDOW = 60.0

    def __init__(self, done: int) -> None:
        self.count = done
        self.started = time.monotonic()
        self._seen = deque([(self.started, done)])

    def after(self, n: int) -> float:
        """Units per second, with `n` more of them done now."""
        self.count += n
        now = time.monotonic()
        while len(self._seen) > 1 and self._seen[1][0] <= now - self.WINDOW:
            self._seen.popleft()
        since, before = self._seen[0]
        if now >= self._seen[-1][0] + 1:
            self._seen.append((now, self.count))
        return (self.count - before) / max(1e-9, now - since)
