"""What a person reads while work goes on: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from ddpm_core.errors import Interrupted, UserError

WIDE = 70  # columns of a terminal that has room for more than what is done and the time left
PLAIN_INTERVAL = 10.0  # seconds between two lines where there is no terminal

_console = Console(stderr=True, highlight=False, soft_wrap=True)


def say(message: str) -> None:
    """One line to stderr; stdout is for results."""
    _console.print(printable(message), markup=False)


def warn(message: str) -> None:
    _console.print("warning: " + printable(message), markup=False, style="yellow")


@contextmanager
def telling(who: str) -> Iterator[None]:
    """Turn our errors and the machine's into one sentence, `who: ...`, and the exit status."""
    try:
        yield
    except UserError as error:
        say(f"{who}: {error}")
        raise SystemExit(1) from None
    except Interrupted as stop:
        say(str(stop))
        raise SystemExit(stop.status) from None
    except BrokenPipeError:
        raise
    except OSError as error:  # a full disk, a file of another's
        place = f": {error.filename}" if error.filename else ""
        say(f"{who}: {error.strerror or error}{place}.")
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
    """Text from file names and other strangers, with nothing that steers a terminal."""
    escaped = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    encoding = getattr(sys.stderr, "encoding", None) or "ascii"
    return escaped.encode(encoding, "backslashreplace").decode(encoding)


@contextmanager
def progress(
    description: str, total: int, unit: str, done: int = 0
) -> Iterator[Callable[..., None]]:
    """Yield `advance(n=1, note="")`; shows what is done, the rate in units/s and the time left.

    `done` is what an earlier run has done already; it does not count for the rate.
    """
    if _console.is_terminal and not _console.is_dumb_terminal:
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
            started, count = time.monotonic(), 0

            def advance(n: int = 1, note: str = "") -> None:
                nonlocal count
                count += n
                rate = count / max(1e-9, time.monotonic() - started)
                bar.update(task, advance=n, rate=f"{rate:,.1f} {unit}/s", note=printable(note))

            yield advance
    else:
        yield _plain(description, total, unit, done)


def _plain(description: str, total: int, unit: str, done: int) -> Callable[..., None]:
    started = shown = time.monotonic()
    count = done

    def advance(n: int = 1, note: str = "") -> None:
        nonlocal count, shown
        count += n
        now = time.monotonic()
        finished = n > 0 and count >= total
        if now - shown < PLAIN_INTERVAL and not finished:
            return
        shown = now
        rate = (count - done) / max(1e-9, now - started)
        left = f", {(total - count) / rate:,.0f} s left" if count < total and rate > 0 else ""
        after = f", {note}" if note else ""
        say(f"{description}: {count}/{total} {unit}, {rate:,.1f}/s{left}{after}")

    return advance
