"""Where a workspace lives, behind one small interface.

A key is a relative path with `/`. Everything written becomes visible whole or not at all: a file
is written beside its final name, synced and renamed; a folder gets a manifest of checksums and is
renamed as one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from ddpm_core.errors import UserError

MANIFEST = "manifest.json"


class Corrupt(UserError):
    """A folder whose files are not those that its manifest lists."""


class Storage(Protocol):
    """What a workspace needs of its storage. Keys name files or folders."""

    uri: str

    def exists(self, key: str) -> bool: ...

    def names(self, key: str) -> list[str]:
        """Names directly below a folder, sorted; of an absent folder none."""

    def read(self, key: str) -> bytes:
        """The content of a file. Raises FileNotFoundError."""

    def write(self, key: str, data: bytes) -> None:
        """Put a whole file in place of what was there."""

    def remove(self, key: str) -> None:
        """Remove a file or folder; one that is absent is no mistake."""

    def move(self, key: str, target: str) -> None: ...

    def local(self, key: str) -> Path:
        """A path on this machine with the same content."""

    def new_folder(
        self, key: str, facts: dict[str, object] | None = None
    ) -> AbstractContextManager[Path]:
        """`with storage.new_folder(key) as path:` fills a folder, in place once it ends well."""


class LocalStorage:
    """A directory of this machine, or of a network volume mounted on it."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.uri = str(self.root)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"Cannot use {root} as workspace: {error.strerror}.") from error

    def local(self, key: str) -> Path:
        return self.root / key

    def exists(self, key: str) -> bool:
        return self.local(key).exists()

    def names(self, key: str) -> list[str]:
        path = self.local(key)
        return (
            sorted(item.name for item in path.iterdir() if not item.name.startswith("."))
            if path.is_dir()
            else []
        )

    def read(self, key: str) -> bytes:
        return self.local(key).read_bytes()

    def write(self, key: str, data: bytes) -> None:
        path = self.local(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        staging = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
        try:
            with staging.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            staging.replace(path)
        except BaseException:
            staging.unlink(missing_ok=True)
            raise
        _sync_directory(path.parent)

    def remove(self, key: str) -> None:
        path = self.local(key)
        if path.is_dir() and not path.is_symlink():
            # Renamed first, so that no reader meets a folder half removed.
            doomed = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
            path.rename(doomed)
            shutil.rmtree(doomed)
        else:
            path.unlink(missing_ok=True)

    def move(self, key: str, target: str) -> None:
        destination = self.local(target)
        destination.parent.mkdir(parents=True, exist_ok=True)
        self.local(key).rename(destination)

    @contextmanager
    def new_folder(self, key: str, facts: dict[str, object] | None = None) -> Iterator[Path]:
        """Yield a staging directory; at the end write its manifest, with `facts`, and rename it.

        Replaces a folder of the same key. After an exception nothing of it is left.
        """
        final = self.local(key)
        final.parent.mkdir(parents=True, exist_ok=True)
        staging = final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}")
        staging.mkdir()
        try:
            yield staging
            seal(staging, facts)
            if final.exists():
                self.remove(key)
            staging.rename(final)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        _sync_directory(final.parent)


def open_storage(uri: str) -> Storage:
    """The storage of a URI: a directory, or (one day of its own) s3://bucket/prefix."""
    if "://" in uri:
        raise UserError(f"workspace: {uri!r} given; a directory is needed.")
    return LocalStorage(Path(uri).expanduser())


def seal(folder: Path, facts: dict[str, object] | None = None) -> None:
    """Write the manifest of a folder (size and SHA-256 of every file) and sync it to disk."""
    files = {}
    for path in sorted(item for item in folder.rglob("*") if item.is_file()):
        files[path.relative_to(folder).as_posix()] = {
            "size": path.stat().st_size,
            "sha256": sha256_of(path),
        }
        with path.open("rb") as file:
            os.fsync(file.fileno())
    manifest = {**(facts or {}), "files": files}
    with (folder / MANIFEST).open("w", encoding="utf-8") as text:
        json.dump(manifest, text, indent=1)
        text.flush()
        os.fsync(text.fileno())
    _sync_directory(folder)


def verify(folder: Path) -> dict[str, object]:
    """The manifest of a folder whose files are all there, whole. Raises Corrupt, with the file."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        listed = {
            str(name): (int(f["size"]), str(f["sha256"])) for name, f in manifest["files"].items()
        }
    except FileNotFoundError:
        raise Corrupt(f"{folder.name} has no {MANIFEST}: it was not written to its end.") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Corrupt(f"The {MANIFEST} of {folder.name} is damaged: {error}.") from error
    for name, (size, checksum) in listed.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise Corrupt(f"The {MANIFEST} of {folder.name} names a file outside it: {name!r}.")
        if not path.is_file():
            raise Corrupt(f"{folder.name} lacks its file {name}.")
        if path.stat().st_size != size:
            raise Corrupt(
                f"{folder.name}/{name} has {path.stat().st_size} bytes; {size} were written."
            )
        if sha256_of(path) != checksum:
            raise Corrupt(f"{folder.name}/{name} was changed or damaged: its checksum differs.")
    return dict(manifest)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
