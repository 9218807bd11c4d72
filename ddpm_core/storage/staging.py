"""What is written beside its final name, and how the leavings of a killed writer are swept.

A writer holds the kernel's lock of what it stages. Whatever can be locked by another has no writer
any more. A workspace may be a folder with files of the user's: what is staged bears a mark that no
other program makes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_MARK = "ddpm-staged"
_STAGED = re.compile(rf"\..+\.[0-9a-f]{{8}}\.{_MARK}")
_NAME = 50  # characters kept of a name: with four bytes each there is room for the rest in 255
# In which a run stages, as workspace.py names them; other folders are the user's.
FOLDERS = ("data", "snapshots", "samples", "evaluation", "superseded")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
ABANDONED = 24 * 3600.0  # seconds without a change, where locks can't tell who still writes


def beside(path: Path) -> Path:
    """A hidden name next to a final one."""
    return path.with_name(f".{path.name[:_NAME]}.{uuid.uuid4().hex[:8]}.{_MARK}")


@contextmanager
def staged_file(path: Path) -> Iterator[Path]:
    """An empty file beside `path` for as long as its content is written; gone after a mistake."""
    with _held(path, folder=False) as staging:
        yield staging


@contextmanager
def staged_folder(path: Path) -> Iterator[Path]:
    """The same for a folder."""
    with _held(path, folder=True) as staging:
        yield staging


@contextmanager
def _held(path: Path, folder: bool) -> Iterator[Path]:
    staging = beside(path)
    with named(staging, path):
        descriptor = stage(staging, folder)
        try:
            yield staging
        except BaseException:
            remove(staging)
            raise
        finally:
            os.close(descriptor)


@contextmanager
def named(staging: Path, path: Path) -> Iterator[None]:
    """Errors of the disk tell of what is written, not of what is staged for it.

    A full disk is one of several, and tells of nothing by itself.
    """
    try:
        yield
    except OSError as error:
        full = error.errno in FULL
        # A rename tells of two names; its target is the one that a person knows.
        at = error.filename2 or error.filename or (path if full else None)
        if error.errno is None or at is None:
            raise
        told = OSError(error.errno, error.strerror, str(at).replace(str(staging), str(path)))
        if full:
            told.add_note("Free some space there; the same command goes on.")
        raise told from error


def stage(staging: Path, folder: bool) -> int:
    """Make and lock it, again where a sweep came between the two; close the result to let go."""
    while True:
        if folder:
            staging.mkdir()
            descriptor = os.open(staging, os.O_RDONLY)
        else:
            descriptor = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with suppress(OSError):  # a file system without locks is one that is not swept
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if staging.exists():
            return descriptor
        os.close(descriptor)


def exchange(staging: Path, final: Path) -> Path:
    """Give a staged folder its final name; where what had it lies now, if there was any.

    The old one is there until the new one is: a reader misses it between two renames at most.
    """
    while True:
        replaced = beside(final)
        with suppress(FileNotFoundError):
            final.rename(replaced)
        try:
            staging.rename(final)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                remove(replaced)
                continue  # another writer was quicker, and is replaced in turn
            with suppress(OSError):
                replaced.rename(final)
            raise
        return replaced


def sweep(root: Path) -> None:
    """Remove everything staged in `root`, and below a run's FOLDERS there, that has no writer."""
    for folder, folders, files in os.walk(root):
        for name in [*folders, *files]:
            if _STAGED.fullmatch(name):
                _sweep_one(Path(folder) / name)
        ours = FOLDERS if Path(folder) == root else folders
        folders[:] = [name for name in folders if name in ours and not name.startswith(".")]


def sweep_beside(path: Path) -> None:
    """Remove what killed writers have staged for `path`."""
    with suppress(OSError):  # no such folder, or one that may not be read
        for found in path.parent.iterdir():
            if found.name.startswith(f".{path.name[:_NAME]}.") and _STAGED.fullmatch(found.name):
                _sweep_one(found)


def _sweep_one(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        if _has_no_writer(descriptor):
            with suppress(OSError):  # a workspace that may only be read keeps it
                remove(path)
    finally:
        os.close(descriptor)


def _has_no_writer(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # NFS, for one, has no locks of folders
        return time.time() - os.fstat(descriptor).st_mtime > ABANDONED
    return True


def remove(path: Path) -> None:
    """A file or folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
