"""A folder's manifest: size and SHA-256 of every file. Written last; readers verify it."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from ddpm_core.errors import Corrupt
from ddpm_core.storage import files as reading

MANIFEST = "manifest.json"


def seal(folder: Path, facts: dict[str, object] | None = None) -> None:
    """Write the manifest of a folder (size and SHA-256 of every file) and sync it to disk."""
    files = {}
    for path in sorted(item for item in folder.rglob("*") if item.is_file()):
        files[path.relative_to(folder).as_posix()] = {
            "size": path.stat().st_size,
            "sha256": sha256_of(path),
        }
        sync(path)
    manifest = {**(facts or {}), "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    sync(folder / MANIFEST)
    sync(folder)


def verify(folder: Path) -> dict[str, Any]:
    """The manifest of a folder whose files are all there, whole. Raises Corrupt, with the file."""
    try:
        data = reading.read_bytes(folder / MANIFEST, _told(folder.name), reading.LARGEST_JSON)
    except FileNotFoundError:
        raise Corrupt(f"{folder.name} has no {MANIFEST}: it was not written to its end.") from None
    manifest = reading.parse_object(data, _told(folder.name))
    for name, (size, checksum) in _files(manifest, folder.name).items():
        path = reading.inside(folder, name)
        if not path.is_file():
            raise Corrupt(f"{folder.name} lacks its file {name}.")
        if path.stat().st_size != size:
            raise Corrupt(
                f"{folder.name}/{name} has {path.stat().st_size} bytes; {size} were written."
            )
        if sha256_of(path) != checksum:
            raise Corrupt(f"{folder.name}/{name} was changed or damaged: its checksum differs.")
    return manifest


def listed(data: bytes, folder: str) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 by file name, of a manifest's bytes. Raises Corrupt."""
    return _files(reading.parse_object(data, _told(folder)), folder)


def _files(manifest: dict[str, Any], folder: str) -> dict[str, tuple[int, str]]:
    files = reading.validated(manifest, reading.Manifest, _told(folder))["files"]
    for name in files:
        reading.must_be_inside(folder, name)
    return {name: (file["size"], file["sha256"]) for name, file in files.items()}


def _told(folder: str) -> str:
    return f"The {MANIFEST} of {folder}"


def sha256_of(path: Path) -> str:
    """SHA-256 of a regular file, in hex. Raises Corrupt for a device or pipe, which has no end."""
    with reading.open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Put on disk what a file, or a folder's list of names, holds by now."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
