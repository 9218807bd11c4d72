"""A file that grows, in S3, where nothing can be appended to.

Its lines lie in segments, KEY.parts/TURN-NUMBER: a run's turn is its lease's fence, so that no two
runs write the same segment. The last segment of a turn is written anew as it grows; the others
stay as they are. The segments in order are the file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from ddpm_core.console import Outage, warn
from ddpm_core.storage.base import Unreachable

PARTS = ".parts"  # a file's segments lie in the folder KEY.parts
SEGMENT = 2**20  # bytes after which a new one begins
INTERVAL = 10.0  # seconds between two writings


def segment(key: str, turn: int, number: int) -> str:
    return f"{key}{PARTS}/{turn:08d}-{number:04d}"


class Segments:
    """Follows a local file, and puts what was appended to it into segments."""

    def __init__(
        self, path: Path, key: str, turn: int, write: Callable[[str, bytes], None]
    ) -> None:
        self.path = path
        self._key, self._turn, self._write = key, turn, write
        self._number, self._start, self._written = 0, 0, 0
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name="mirror", daemon=True)
        self._outage = Outage()

    def start(self) -> None:
        self._start = self.path.stat().st_size if self.path.exists() else 0
        self._thread.start()

    def push(self) -> None:
        """Put every whole line into the storage now. Raises OSError."""
        with self._lock:
            while data := self._new():
                self._write(segment(self._key, self._turn, self._number), data)
                self._written = len(data)
                if len(data) < SEGMENT:
                    break
                self._number, self._start, self._written = (
                    self._number + 1,
                    self._start + len(data),
                    0,
                )

    def close(self) -> None:
        """Write what is left. Raises OSError."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        self.push()

    def _new(self) -> bytes:
        """The segment as it should be, if that is more than what was written of it."""
        if not self.path.exists():
            return b""
        with self.path.open("rb") as file:
            file.seek(self._start)
            data = file.read(SEGMENT)
            data += file.readline() if len(data) == SEGMENT else b""
        whole = data[: data.rfind(b"\n") + 1]
        return whole if len(whole) > self._written else b""

    def _follow(self) -> None:
        while not self._closing.wait(INTERVAL):
            try:
                self.push()
            except Unreachable as error:
                self._outage.begins(f"{error} The log is written once it is there again.")
            except OSError as error:
                warn(f"The log cannot be read: {error.strerror}.")
            else:
                self._outage.ends("The log is written again.")


def assemble(parts: list[bytes]) -> bytes:
    """The file that segments make; a half line that a killed run left ends with its segment."""
    return b"".join(part if part.endswith(b"\n") or not part else part + b"\n" for part in parts)
