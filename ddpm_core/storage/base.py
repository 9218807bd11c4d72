"""The interface of a workspace's storage, and its errors."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

from ddpm_core.errors import Denied, Unavailable, UserError


class Unreachable(UserError, OSError):
    """The storage is unavailable or returned an error. An OSError, as a full disk is."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.strerror = message.rstrip(".")

    def __str__(self) -> str:
        return str(self.args[0])


class Silent(Unreachable, Unavailable):
    """The storage's server does not respond, or reports an internal problem."""


class Refused(Unreachable, Denied):
    """The storage denied access."""


class Changed(Exception):
    """A conditional write failed: another process has replaced the version that was read."""


class Locked(Exception):
    """Another process on this machine holds the storage's lock."""


class Tagged(NamedTuple):
    """A file's content, the tag of this version, and its age in seconds by the storage's clock."""

    data: bytes
    tag: str
    age: float


class Mirror(Protocol):
    """A growing local file whose content is also kept in the storage."""

    path: Path

    def start(self) -> None:
        """Start to copy what is appended to `path` to the storage from time to time."""

    def push(self) -> None:
        """Copy all complete lines to the storage now. Raises OSError."""

    def close(self) -> None: ...


class Storage(Protocol):
    """Files and folders by key, a relative path with `/`.

    A write becomes visible completely or not at all. All methods may raise OSError.
    """

    uri: str

    def exists(self, key: str) -> bool:
        """Return whether the key is a file or a complete folder."""

    def names(self, key: str) -> list[str]:
        """Return the sorted names directly below a folder; [] if there is none."""

    def sealed(self, key: str) -> list[str]:
        """Return the names of the complete folders directly below a folder."""

    def size(self, key: str) -> int | None:
        """Return a file's size in bytes, or None if it is missing."""

    def checksum(self, key: str) -> str | None:
        """Return a file's SHA-256 in hex, or None if it is missing."""

    def read(self, key: str) -> bytes:
        """Return a file's content. Raises FileNotFoundError."""

    def write(self, key: str, data: bytes) -> None:
        """Create or replace a file."""

    def remove(self, key: str) -> None:
        """Remove a file or folder if it exists."""

    def move(self, key: str, target: str) -> None: ...

    def local(self, key: str) -> Path:
        """Return a local path with the key's content. Raises Corrupt if it is damaged."""

    def forget(self, key: str) -> None:
        """Drop the local copy of a key, if the storage itself is elsewhere."""

    def scratch(self) -> Path:
        """Return a local directory for temporary files."""

    def new_folder(
        self, key: str, facts: dict[str, object] | None = None
    ) -> AbstractContextManager[Path]:
        """Yield a directory to fill, and store it under `key` unless the block raises.

        `facts` become part of the folder's manifest.
        """

    def mirror(self, key: str, turn: int) -> Mirror:
        """Return a growing file with the content of `key`. `turn` must grow with every run."""

    def lock(self) -> AbstractContextManager[bool]:
        """Hold the operating system's lock; yield False if there is none. Raises Locked."""

    def sweep(self) -> None:
        """Remove unfinished files of killed writers. Requires the lease."""

    def sweep_staged(self) -> None:
        """Do the same without the lease, where file locks show which writers are alive."""

    def read_tagged(self, key: str) -> Tagged | None:
        """Return a small file and its tag, with short timeouts; None if it is missing."""

    def write_if(self, key: str, data: bytes, tag: str | None) -> str:
        """Replace the version with this tag (None: create the file) and return the new tag.

        Raises Changed if another process has written the file since.
        """
