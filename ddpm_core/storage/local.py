"""A directory as storage.

A file is written under a temporary name, synced and renamed. A folder also gets a manifest.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ddpm_core.errors import UserError
from ddpm_core.storage.base import Changed, Locked, Tagged
from ddpm_core.storage.files import read_bytes
from ddpm_core.storage.manifest import seal, sha256_of, sync
from ddpm_core.storage.staging import (
    exchange,
    remove,
    staged_file,
    staged_folder,
    sweep,
    temporary_name,
)

LOCK = ".lock"
# What network volumes without locks return.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EIO)
READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
LARGEST = 2**30  # bytes of the largest file that `read` returns


class LocalStorage:
    """A directory on a local disk or a mounted network volume."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.uri = str(self.root)
        with self._report_unusable(), suppress(FileNotFoundError):
            if not stat.S_ISDIR(self.root.stat().st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))

    @contextmanager
    def _report_unusable(self) -> Iterator[None]:
        """Raise UserError if the root cannot be used."""
        try:
            yield
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"Cannot use {self.root} as workspace: {reason}.") from error

    @contextmanager
    def _advise_if_read_only(self) -> Iterator[None]:
        """Add advice to errors about a read-only workspace."""
        try:
            yield
        except OSError as error:
            if error.errno in READ_ONLY and str(error.filename or "").startswith(self.uri):
                error.add_note("Choose another workspace with -w.")
            raise

    def local(self, key: str) -> Path:
        return self.root / key

    def _writable(self, key: str) -> Path:
        """Return the path to write for a key. Raises UserError if a link leads out of the root.

        A workspace from an untrusted source may contain links to files outside it. The root is
        created here, so that reading from a mistyped workspace creates nothing.
        """
        path = self.scratch() / key
        if not path.parent.resolve().is_relative_to(self.root.resolve()):
            raise UserError(
                f"{path.parent} is a link out of the workspace, and ddpm does not write through "
                "links. Move the workspace to the link's target, and use that with -w."
            )
        return path

    def forget(self, key: str) -> None:
        """Do nothing: this storage has no copies."""

    def scratch(self) -> Path:
        with self._report_unusable():
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
        """Return all names: a folder gets its final name when it is complete."""
        return self.names(key)

    def size(self, key: str) -> int | None:
        path = self.local(key)
        return path.stat().st_size if path.is_file() else None

    def checksum(self, key: str) -> str | None:
        path = self.local(key)
        return sha256_of(path) if path.is_file() else None

    def read(self, key: str) -> bytes:
        return read_bytes(self.local(key), key, LARGEST)

    def write(self, key: str, data: bytes) -> None:
        path = self._writable(key)
        with self._advise_if_read_only():
            path.parent.mkdir(parents=True, exist_ok=True)
            with staged_file(path) as staging:
                staging.write_bytes(data)
                sync(staging)
                staging.replace(path)
            sync(path.parent)

    def remove(self, key: str) -> None:
        path = self._writable(key)
        if path.is_dir() and not path.is_symlink():
            # Renamed first, so that no reader finds a folder that is partly removed.
            doomed = temporary_name(path)
            path.rename(doomed)
            shutil.rmtree(doomed)
        else:
            path.unlink(missing_ok=True)

    def move(self, key: str, target: str) -> None:
        destination = self._writable(target)
        destination.parent.mkdir(parents=True, exist_ok=True)
        self._writable(key).rename(destination)

    @contextmanager
    def new_folder(self, key: str, facts: dict[str, object] | None = None) -> Iterator[Path]:
        """Yield a temporary directory; at the end write its manifest and rename it to `key`.

        Replaces an existing folder. After an exception the directory is removed.
        """
        final = self._writable(key)
        with self._advise_if_read_only():
            final.parent.mkdir(parents=True, exist_ok=True)
            with staged_folder(final) as staging:
                yield staging
                seal(staging, facts)
                replaced = exchange(staging, final)
            sync(final.parent)
            remove(replaced)

    def mirror(self, key: str, turn: int) -> InPlace:
        return InPlace(self._writable(key))

    @contextmanager
    def lock(self) -> Iterator[bool]:
        """Hold a file lock, which the kernel releases when the process ends in any way."""
        from filelock import FileLock, Timeout  # 40 ms; commands that only read never need it

        # A marker file as substitute would outlive a killed process, so there is no fallback.
        # Other users of a shared volume must be able to open it, hence the mode.
        lock = FileLock(self._writable(LOCK), timeout=0, mode=0o666, fallback_to_soft=False)
        locked = True
        try:
            lock.acquire()
        except Timeout:
            raise Locked from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            locked = False
        try:
            yield locked
        finally:
            lock.release()

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
        """Compare, then write. On one machine `lock` keeps other writers out in between."""
        current = self.read_tagged(key)
        if (current.tag if current else None) != tag:
            raise Changed
        self.write(key, data)
        return hashlib.sha256(data).hexdigest()


class InPlace:
    """A growing file in a directory: appended lines are in the storage already."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def start(self) -> None: ...

    def push(self) -> None:
        """Sync the file to disk, so that no snapshot survives a crash that loses its log lines."""
        with suppress(FileNotFoundError):
            sync(self.path)

    def close(self) -> None: ...
