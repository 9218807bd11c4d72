"""Temporary names for unfinished files and folders, and their removal after a writer was killed.

A writer keeps a lock on each file or folder that it stages. If another process can lock one, its
writer is dead. A workspace may be a folder that also contains files of the user, so staged names
end in a mark that no other program uses.

The locks are fcntl.flock, because filelock can lock neither a folder nor the staged file itself.
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

from ddpm_core.errors import UserError

_MARK = "ddpm-staged"
_STAGED = re.compile(rf"\..+\.[0-9a-f]{{8}}\.{_MARK}")
_NAME = 50  # characters kept of a name; at four bytes each the result stays below 255 bytes
# The folders of a run, as workspace.py names them. Other folders belong to the user.
FOLDERS = ("data", "snapshots", "samples", "evaluation", "superseded")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
ABANDONED = 24 * 3600.0  # seconds without a change; used where there are no locks


def temporary_name(path: Path) -> Path:
    """Return a hidden temporary name next to a final one."""
    return path.with_name(f".{path.name[:_NAME]}.{uuid.uuid4().hex[:8]}.{_MARK}")


@contextmanager
def staged_file(path: Path) -> Iterator[Path]:
    """Yield an empty file next to `path`, to be renamed; remove it after an exception."""
    with _staged(path, folder=False) as staging:
        yield staging


@contextmanager
def staged_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder next to `path`, to be renamed; remove it after an exception."""
    with _staged(path, folder=True) as staging:
        yield staging


@contextmanager
def output_folder(given: Path) -> Iterator[Path]:
    """Yield a staged folder, which gets its name `given` at the end.

    Raises UserError, before anything is written, unless `given` is new or an empty folder.
    """
    path = given.expanduser().absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{given} already exists and is not empty. Give a new folder.")
    path.parent.mkdir(parents=True, exist_ok=True)
    with staged_folder(path) as staging:
        yield staging
        staging.rename(path)


@contextmanager
def _staged(path: Path, folder: bool) -> Iterator[Path]:
    staging = temporary_name(path)
    with named(staging, path):
        # The descriptor stays open until the caller has renamed the file: closing it releases the
        # lock, and a sweep would then remove the file.
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
    """Raise disk errors with the final name `path` instead of the temporary one.

    A disk-full error may come without any name; it gets `path` and advice.
    """
    try:
        yield
    except OSError as error:
        full = error.errno in FULL
        # A rename has two names; the user knows the target.
        at = error.filename2 or error.filename or (path if full else None)
        if error.errno is None or at is None:
            raise
        renamed = OSError(error.errno, error.strerror, str(at).replace(str(staging), str(path)))
        if full:
            renamed.add_note("Free some space there, then run the same command again.")
        raise renamed from error


def stage(staging: Path, folder: bool) -> int:
    """Create and lock a staged file or folder; return the descriptor that holds the lock.

    Starts again if a sweep removed it between the two steps.
    """
    while True:
        if folder:
            staging.mkdir()
            descriptor = os.open(staging, os.O_RDONLY)
        else:
            descriptor = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with suppress(OSError):  # without locks, sweeps go by age
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A sweep may have removed the new file before it was locked. Then the lock is on a file
        # without a name.
        if staging.exists():
            return descriptor
        os.close(descriptor)


def exchange(staging: Path, final: Path) -> Path:
    """Rename a staged folder to its final name; return the new name of the old folder, if any.

    A reader finds no folder only between the two renames.
    """
    while True:
        # A folder can replace only an empty folder, so the old one moves to a staged name first. If
        # this process is killed before it removes the old one, a sweep does.
        replaced = temporary_name(final)
        with suppress(FileNotFoundError):
            final.rename(replaced)
        try:
            staging.rename(final)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                remove(replaced)
                continue  # another writer was faster; replace its folder
            with suppress(OSError):  # restore the old folder, if there was one
                replaced.rename(final)
            raise
        return replaced


def sweep(root: Path) -> None:
    """Remove staged files and folders without a writer from `root` and below its FOLDERS."""
    for folder, folders, files in os.walk(root):
        for name in [*folders, *files]:
            if _STAGED.fullmatch(name):
                _sweep_one(Path(folder) / name)
        # Changing `folders` in place keeps os.walk out of the user's folders and of staged ones.
        ours = FOLDERS if Path(folder) == root else folders
        folders[:] = [name for name in folders if name in ours and not name.startswith(".")]


def sweep_beside(path: Path) -> None:
    """Remove what killed writers have staged for `path`."""
    with suppress(OSError):  # the folder is missing or not readable
        for found in path.parent.iterdir():
            if found.name.startswith(f".{path.name[:_NAME]}.") and _STAGED.fullmatch(found.name):
                _sweep_one(found)


def _sweep_one(path: Path) -> None:
    try:
        # A link with a staged name could lead to a file that another program has locked.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        if _has_no_writer(descriptor):
            with suppress(OSError):  # read-only workspace
                remove(path)
    finally:
        os.close(descriptor)


def _has_no_writer(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # NFS, for example, cannot lock folders
        return time.time() - os.fstat(descriptor).st_mtime > ABANDONED
    return True


def remove(path: Path) -> None:
    """Remove a file or folder if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
