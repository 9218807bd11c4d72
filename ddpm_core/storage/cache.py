"""Local copies of files in S3: downloaded once, checked, shared by processes, then removed.

The copies are below the directory for temporary files (set TMPDIR to move it). All processes on
this machine with the same workspace share them, and the last one to exit removes them. The next
process finds, checks and uses what a killed process has left.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ddpm_core.errors import Corrupt
from ddpm_core.storage.manifest import sha256_of
from ddpm_core.storage.retry import fetch_whole
from ddpm_core.storage.staging import remove, stage, staged_file, sweep, temporary_name


class Cache:
    """A directory of copies. `name` identifies the workspace."""

    def __init__(self, name: str) -> None:
        base = _base()
        digest = hashlib.sha256(name.encode()).hexdigest()[:16]
        # Every user of the cache holds a shared lock, and who gets the exclusive one is the last.
        # filelock has no shared locks of the kernel (its ReadWriteLock needs SQLite).
        self._users = (base / f"{digest}.lock").open("a")
        fcntl.flock(self._users, fcntl.LOCK_SH)
        self.root = base / digest
        self.root.mkdir(exist_ok=True)
        self._scratch: Path | None = None
        self._process = os.getpid()
        self._known: dict[Path, tuple[str, int, int]] = {}
        atexit.register(self.close)

    def close(self) -> None:
        """Remove all copies, unless another process uses them."""
        if os.getpid() != self._process or self._users.closed:
            return
        with suppress(OSError):
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.root, ignore_errors=True)
        self._users.close()
        atexit.unregister(self.close)

    def fetch(self, key: str, size: int, sha256: str, download: Callable[[Path], None]) -> Path:
        """Return the copy of a file, and download it first if it is missing or does not match.

        Raises Corrupt if no download has this size and checksum.
        """
        from filelock import FileLock  # 40 ms; commands on a directory never need it

        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = self.root / f".{hashlib.sha256(key.encode()).hexdigest()[:16]}.lock"

        def fetch() -> Path:
            with staged_file(path) as staging:
                download(staging)
                staging.replace(path)
            if self._matches(path, size, sha256):
                return path
            found = path.stat().st_size
            remove(path)
            if found != size:
                raise Corrupt(f"{key} has {found} bytes; {size} were written.")
            raise Corrupt(f"{key} was changed or damaged: its checksum differs.")

        with FileLock(lock):  # one process at a time downloads a file
            return path if self._matches(path, size, sha256) else fetch_whole(fetch)

    def put(self, key: str, data: bytes) -> Path:
        """Write a copy and return its path."""
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        with staged_file(path) as staging:
            staging.write_bytes(data)
            staging.replace(path)
        return path

    def adopt(self, key: str, folder: Path) -> None:
        """Move a folder that was just uploaded into the cache."""
        final = self.root / key
        final.parent.mkdir(parents=True, exist_ok=True)
        self.drop(key)
        folder.rename(final)

    def keep_only(self, key: str, names: set[str]) -> None:
        """Remove copies from a folder that are not among `names`."""
        folder = self.root / key
        for path in folder.rglob("*"):
            if path.is_file() and path.relative_to(folder).as_posix() not in names:
                path.unlink(missing_ok=True)

    def drop(self, key: str) -> None:
        """Remove the copy of a file or folder."""
        path = self.root / key
        if path.is_dir():
            doomed = temporary_name(path)
            with suppress(OSError):
                path.rename(doomed)
            remove(doomed)
        else:
            remove(path)

    def scratch(self) -> Path:
        """Return a directory in the cache that only this process uses."""
        if self._scratch is None or not self._scratch.is_dir():
            sweep(self.root)
            self._scratch = temporary_name(self.root / "scratch")
            stage(self._scratch, folder=True)
        return self._scratch

    def _matches(self, path: Path, size: int, sha256: str) -> bool:
        """Return whether a copy has this size and checksum. An unchanged file is hashed once."""
        if not path.is_file() or (facts := path.stat()).st_size != size:
            return False
        known = self._known.get(path)
        if not known or known[1:] != (facts.st_mtime_ns, facts.st_ino):
            known = (sha256_of(path), facts.st_mtime_ns, facts.st_ino)
            self._known[path] = known
        return known[0] == sha256


def _base() -> Path:
    """Return a directory that only this user can write to."""
    base = Path(tempfile.gettempdir()) / f"ddpm-cache-{os.getuid()}"
    base.mkdir(mode=0o700, exist_ok=True)
    # In a directory for all users, another user may have created it, to put files or links in it.
    facts = base.lstat()
    if base.is_symlink() or facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        base = Path(tempfile.mkdtemp(prefix="ddpm-cache-"))
        atexit.register(shutil.rmtree, base, ignore_errors=True)
    return base
