"""This machine's copies of what lies in S3: made once, checked, shared by processes, then gone.

They lie below the directory for temporary files (TMPDIR moves it), which every process of a pod
that works on the same workspace uses; the last one to end removes them. What a killed process left
is found, checked and used by the next.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ddpm_core.errors import Corrupt
from ddpm_core.storage.base import fetch_whole
from ddpm_core.storage.sealing import sha256_of
from ddpm_core.storage.staging import beside, remove, stage, staged_file, sweep


class Cache:
    """A directory of copies. `name` tells workspaces apart."""

    def __init__(self, name: str) -> None:
        base = _base()
        digest = hashlib.sha256(name.encode()).hexdigest()[:16]
        self._file = (base / f"{digest}.lock").open("a")
        fcntl.flock(self._file, fcntl.LOCK_SH)
        self.root = base / digest
        self.root.mkdir(exist_ok=True)
        self._scratch: Path | None = None
        self._process = os.getpid()
        self._known: dict[Path, tuple[str, int, int]] = {}
        atexit.register(self.close)

    def close(self) -> None:
        """Remove everything, unless another process uses it too."""
        if os.getpid() != self._process or self._file.closed:
            return
        with suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.root, ignore_errors=True)
        self._file.close()
        atexit.unregister(self.close)

    def fetch(self, key: str, size: int, sha256: str, download: Callable[[Path], None]) -> Path:
        """The copy of a file, downloaded if it isn't there with this checksum.

        Raises Corrupt where what comes is something else, each time.
        """
        path = self.root / key

        def fetch() -> Path:
            with staged_file(path) as staging:
                download(staging)
                staging.replace(path)
            if self._holds(path, size, sha256):
                return path
            found = path.stat().st_size
            remove(path)
            told = f"has {found} bytes; {size} were written" if found != size else "was changed"
            raise Corrupt(f"{key} {told}, or damaged: its checksum differs.")

        with self._lock(key):
            return path if self._holds(path, size, sha256) else fetch_whole(fetch)

    def put(self, key: str, data: bytes) -> Path:
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        with staged_file(path) as staging:
            staging.write_bytes(data)
            staging.replace(path)
        return path

    def adopt(self, key: str, folder: Path) -> None:
        """Keep a folder that was just stored as the copy of it."""
        final = self.root / key
        final.parent.mkdir(parents=True, exist_ok=True)
        self.drop(key)
        folder.rename(final)

    def keep_only(self, key: str, names: set[str]) -> None:
        """Remove the copies of a folder's files that are no longer part of it."""
        folder = self.root / key
        for path in folder.rglob("*"):
            if path.is_file() and path.relative_to(folder).as_posix() not in names:
                path.unlink(missing_ok=True)

    def drop(self, key: str) -> None:
        path = self.root / key
        if path.is_dir():
            doomed = beside(path)
            with suppress(OSError):
                path.rename(doomed)
            remove(doomed)
        else:
            remove(path)

    def scratch(self) -> Path:
        """A directory below the cache that is this process's own."""
        if self._scratch is None or not self._scratch.is_dir():
            sweep(self.root)
            self._scratch = beside(self.root / "scratch")
            stage(self._scratch, folder=True)
        return self._scratch

    def _holds(self, path: Path, size: int, sha256: str) -> bool:
        """Whether a copy is what it has to be; what was hashed once is not hashed again."""
        if not path.is_file() or (facts := path.stat()).st_size != size:
            return False
        known = self._known.get(path)
        if not known or known[1:] != (facts.st_mtime_ns, facts.st_ino):
            known = (sha256_of(path), facts.st_mtime_ns, facts.st_ino)
            self._known[path] = known
        return known[0] == sha256

    @contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        """One process at a time downloads a file."""
        (self.root / key).parent.mkdir(parents=True, exist_ok=True)
        name = hashlib.sha256(key.encode()).hexdigest()[:16]
        with (self.root / f".{name}.lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _base() -> Path:
    """A directory that belongs to this user alone."""
    base = Path(tempfile.gettempdir()) / f"ddpm-cache-{os.getuid()}"
    base.mkdir(mode=0o700, exist_ok=True)
    facts = base.lstat()
    if base.is_symlink() or facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        base = Path(tempfile.mkdtemp(prefix="ddpm-cache-"))
        atexit.register(shutil.rmtree, base, ignore_errors=True)
    return base
