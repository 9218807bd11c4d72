"""What a workspace needs of its storage, and what can go wrong with one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from ddpm_core.errors import Corrupt, UserError

TRIES = 3
Fetched = TypeVar("Fetched")


class Unreachable(UserError, OSError):
    """A storage that does not answer, or refuses; an OSError too, as a full disk is one."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.strerror = message.rstrip(".")

    def __str__(self) -> str:
        return str(self.args[0])


class Refused(Unreachable):
    """A storage that denies access: keys are missing, wrong, or without the right."""


class Changed(Exception):
    """What was to be replaced is no longer what was read."""


class Locked(Exception):
    """Another process on this machine holds the storage's lock."""


class Tagged(NamedTuple):
    """A file's content, the tag of this version of it, and its age in seconds by the storage."""

    data: bytes
    tag: str
    age: float


def fetch_whole(fetch: Callable[[], Fetched]) -> Fetched:
    """Return what `fetch` returns; while it raises Corrupt, call it again, TRIES times in all.

    A bit that flips on its way is right in the next copy. What is damaged where it is stored is
    damaged in every copy, and stays Corrupt.
    """
    for _ in range(TRIES - 1):
        try:
            return fetch()
        except Corrupt:
            continue
    return fetch()


class Mirror(Protocol):
    """A file of this machine that grows, and is kept in the storage as it does."""

    path: Path

    def start(self) -> None:
        """From here on, what is appended to `path` goes to the storage now and then."""

    def push(self) -> None:
        """Put every whole line into the storage now. Raises OSError."""

    def close(self) -> None: ...


class Storage(Protocol):
    """Keys are relative paths with `/` and name files or folders.

    Everything written becomes visible whole or not at all. All methods may raise OSError.
    """

    uri: str

    def exists(self, key: str) -> bool:
        """Whether there is such a file, or such a folder, written to its end."""

    def names(self, key: str) -> list[str]:
        """Names directly below a folder, sorted; of an absent folder none."""

    def sealed(self, key: str) -> list[str]:
        """Names of the folders directly below one that were written to their end."""

    def size(self, key: str) -> int | None:
        """Bytes of a file; None where it is absent."""

    def checksum(self, key: str) -> str | None:
        """SHA-256 of a file, in hex; None where it is absent."""

    def read(self, key: str) -> bytes:
        """The content of a file. Raises FileNotFoundError."""

    def write(self, key: str, data: bytes) -> None:
        """Put a whole file in place of what was there."""

    def remove(self, key: str) -> None:
        """Remove a file or folder; one that is absent is no mistake."""

    def move(self, key: str, target: str) -> None: ...

    def local(self, key: str) -> Path:
        """A path on this machine with the same content. Raises Corrupt for a damaged copy."""

    def forget(self, key: str) -> None:
        """Drop this machine's copy, where it is no more than that."""

    def scratch(self) -> Path:
        """A directory of this machine for files on their way."""

    def new_folder(
        self, key: str, facts: dict[str, object] | None = None
    ) -> AbstractContextManager[Path]:
        """`with storage.new_folder(key) as path:` fills a folder, in place once it ends well."""

    def mirror(self, key: str, turn: int) -> Mirror:
        """A growing file with the content of `key`; `turn` is higher than any before."""

    def lock(self) -> AbstractContextManager[bool]:
        """Hold the kernel's lock while it lasts; False where there is none. Raises Locked."""

    def sweep(self) -> None:
        """Remove what killed writers left half written; for the holder of the lease."""

    def sweep_staged(self) -> None:
        """The same on a disk, where locks tell who still writes; for anybody."""

    def read_tagged(self, key: str) -> Tagged | None:
        """A small file with its tag, asked for with little patience."""

    def write_if(self, key: str, data: bytes, tag: str | None) -> str:
        """Replace the version with this tag (None: where there is no file); the new tag.

        Raises Changed where another was quicker.
        """
