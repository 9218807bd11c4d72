"""Manifests: the size and SHA-256 of every file of a folder. Written last, verified by readers."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from pydantic import ConfigDict

from ddpm_core.errors import Corrupt
from ddpm_core.storage.files import (
    LARGEST_JSON,
    Count,
    Schema,
    inside,
    must_be_inside,
    open_regular,
    parse_model,
    read_bytes,
)

MANIFEST = "manifest.json"


class FileRecord(Schema):
    """The size in bytes and the SHA-256 of a file."""

    size: Count
    sha256: str


class Manifest(Schema):
    """The files of a folder by name. The writer's facts are extra fields (`model_extra`)."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    files: dict[str, FileRecord]


def seal(folder: Path, facts: dict[str, object] | None = None) -> None:
    """Write the manifest of a folder, and sync all its files to disk."""
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


def verify(folder: Path) -> Manifest:
    """Return the manifest of a folder after a check of every file's size and SHA-256.

    Raises Corrupt with the first file that is missing or does not match.
    """
    try:
        data = read_bytes(folder / MANIFEST, _title(folder.name), LARGEST_JSON)
    except FileNotFoundError:
        raise Corrupt(f"{folder.name} has no {MANIFEST}: it is incomplete.") from None
    manifest = parse_manifest(data, folder.name)
    for name, record in manifest.files.items():
        path = inside(folder, name)
        if not path.is_file():
            raise Corrupt(f"{folder.name}/{name} is missing.")
        if path.stat().st_size != record.size:
            raise Corrupt(
                f"{folder.name}/{name} has {path.stat().st_size} bytes; {record.size} were written."
            )
        if sha256_of(path) != record.sha256:
            raise Corrupt(f"{folder.name}/{name} was changed or damaged: its checksum differs.")
    return manifest


def parse_manifest(data: bytes, folder: str) -> Manifest:
    """Return the manifest in `data`. Raises Corrupt, also for a file name outside the folder."""
    manifest = parse_model(data, Manifest, _title(folder))
    for name in manifest.files:
        must_be_inside(folder, name)
    return manifest


def _title(folder: str) -> str:
    return f"The {MANIFEST} of {folder}"


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a regular file in hex. Raises Corrupt for a device or a pipe."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flush a file, or a folder's list of names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
