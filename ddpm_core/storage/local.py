"""A directory as storage.

A file is written beside its final name, synced and renamed; a folder gets a manifest of checksums
and is renamed as one.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ddpm_core.errors import UserError
from ddpm_core.storage import files as reading
from ddpm_core.storage.base import Changed, Locked, Tagged
from ddpm_core.storage.sealing import seal, sha256_of, sync
from ddpm_core.storage.staging import (
    beside,
    exchange,
    remove,
    staged_file,
    staged_folder,
    sweep,
)

LOCK = ".lock"
FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)
LARGEST = 2**30  # bytes of a file that is read into memory as a whole


class LocalStorage:
    """A directory of this machine, or of a network volume mounted on it."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.uri = str(self.root)
        with self._usable(), suppress(FileNotFoundError):
            if not stat.S_ISDIR(self.root.stat().st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))

    @contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"Cannot use {self.root} as workspace: {reason}.") from error

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """A workspace that must not be changed is told with what to do."""
        try:
            yield
        except OSError as error:
            if error.errno in FORBIDDEN and str(error.filename or "").startswith(self.uri):
                error.add_note("Write to another place: a workspace is named with -w.")
            raise

    def local(self, key: str) -> Path:
        return self.root / key

    def _own(self, key: str) -> Path:
        """The path of what is to be changed. Raises UserError where a link leads out of the root.

        Whoever made the workspace may have put links into it, to places that are not theirs. The
        root is made here, so that looking into a workspace that is none makes nothing.
        """
        path = self.scratch() / key
        if not path.parent.resolve().is_relative_to(self.root.resolve()):
            raise UserError(
                f"{path.parent} is a link out of the workspace, and nothing is changed through "
                "one. Put the whole workspace where the link leads, and name that with -w."
            )
        return path

    def forget(self, key: str) -> None:
        """Nothing: what lies here is no copy."""

    def scratch(self) -> Path:
        with self._usable():
            self.root.mkdir(parents=True, exist_ok=True)
        return self.root

    def exists(self, key: str) -> bool:
        return self.local(key).exists()

    def names(self, key: str) -> list[str]:
        path = self.local(key)
        return (
            sorted(item.name for item in path.iterdir() if not item.name.startswith("."))
            if path.is_dir()
            else []
        )

    def sealed(self, key: str) -> list[str]:
        """All: a folder has its name once it is whole."""
        return self.names(key)

    def size(self, key: str) -> int | None:
        path = self.local(key)
        return path.stat().st_size if path.is_file() else None

    def checksum(self, key: str) -> str | None:
        path = self.local(key)
        return sha256_of(path) if path.is_file() else None

    def read(self, key: str) -> bytes:
        return reading.read_bytes(self.local(key), key, LARGEST)

    def write(self, key: str, data: bytes) -> None:
        path = self._own(key)
        with self._changing():
            path.parent.mkdir(parents=True, exist_ok=True)
            with staged_file(path) as staging:
                staging.write_bytes(data)
                sync(staging)
                staging.replace(path)
            sync(path.parent)

    def remove(self, key: str) -> None:
        path = self._own(key)
        if path.is_dir() and not path.is_symlink():
            # Renamed first, so that no reader meets a folder half removed.
            doomed = beside(path)
            path.rename(doomed)
            shutil.rmtree(doomed)
        else:
            path.unlink(missing_ok=True)

    def move(self, key: str, target: str) -> None:
        destination = self._own(target)
        destination.parent.mkdir(parents=True, exist_ok=True)
        self._own(key).rename(destination)

    @contextmanager
    def new_folder(self, key: str, facts: dict[str, object] | None = None) -> Iterator[Path]:
        """Yield a staging directory; at the end write its manifest, with `facts`, and rename it.

        Replaces a folder of the same key. After an exception nothing of it is left.
        """
        final = self._own(key)
        with self._changing():
            final.parent.mkdir(parents=True, exist_ok=True)
            with staged_folder(final) as staging:
                yield staging
                seal(staging, facts)
                replaced = exchange(staging, final)
            sync(final.parent)
            remove(replaced)

    def mirror(self, key: str, turn: int) -> Whole:
        return Whole(self._own(key))

    @contextmanager
    def lock(self) -> Iterator[bool]:
        """Gone with the process, however that ended."""
        # Through a link the file would be made elsewhere.
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
        with os.fdopen(os.open(self._own(LOCK), flags, 0o666), "w") as file:
            locked = True
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Locked from None
            except OSError:
                locked = False  # a network volume without locks
            yield locked

    def sweep(self) -> None:
        self.sweep_staged()

    def sweep_staged(self) -> None:
        sweep(self.root)

    def read_tagged(self, key: str) -> Tagged | None:
        try:
            data = self.read(key)
            age = time.time() - self.local(key).stat().st_mtime
        except FileNotFoundError:
            return None
        return Tagged(data, hashlib.sha256(data).hexdigest(), max(0.0, age))

    def write_if(self, key: str, data: bytes, tag: str | None) -> str:
        """Compared, then written: who holds `lock` has no rival on this machine."""
        there = self.read_tagged(key)
        if (there.tag if there else None) != tag:
            raise Changed
        self.write(key, data)
        return hashlib.sha256(data).hexdigest()


class Whole:
    """A growing file that lies where it belongs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def start(self) -> None: ...

    def push(self) -> None:
        """Put on disk what was written: what follows a row may not outlive it."""
        with suppress(FileNotFoundError):
            sync(self.path)

    def close(self) -> None: ...
