"""The official archives of CIFAR-10 and DTD: downloaded once, verified by their SHA-256."""

from __future__ import annotations

import urllib.request
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ddpm_core import console
from ddpm_core.errors import Corrupt, UserError
from ddpm_core.storage import sha256_of, web

DOWNLOADS = "downloads"
_TIMEOUT = 60.0  # seconds for each read of the connection
_BLOCK = 2**20  # bytes


class Archive(NamedTuple):
    """Where to download an archive, and what it must be."""

    url: str
    size: int
    sha256: str


KNOWN = {
    "cifar10": Archive(
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        170_052_171,
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    ),
    "dtd": Archive(
        "https://www.robots.ox.ac.uk/~vgg/data/dtd/download/dtd-r1.0.1.tar.gz",
        625_239_812,
        "e42855a52a4950a3b59612834602aa253914755c95b0cff9ead6d07395f8e205",
    ),
}


def known_archive(name: str, folder: Path, download: bool) -> Path:
    """Return the path of the official archive of `cifar10` or `dtd` in `folder`.

    If `download` is true, a missing archive, or a file with another SHA-256, is downloaded.

    Raises:
        UserError: the archive is missing or different and `download` is false, or the download
            failed.
    """
    archive = KNOWN[name]
    path = folder / archive.url.rpartition("/")[2]
    found = sha256_of(path) if path.is_file() else ""
    if found == archive.sha256:
        return path
    if found and not download:
        raise UserError(
            f"prepare.source: {path} is not the official archive of {name}: its SHA-256 is "
            f"{found}; it must be {archive.sha256}. Replace it with -S prepare.download=true, or "
            "set prepare.source to its path to use it as your own archive."
        )
    if not download:
        raise UserError(
            f"prepare.source: {name} is not in {folder}, and prepare.download is false. To "
            f"download it from {archive.url}, run ddpm prepare with -S prepare.download=true; or "
            "set prepare.source to the path of its archive or folder."
        )
    folder.mkdir(parents=True, exist_ok=True)
    fetch(archive, path)
    return path


def fetch(archive: Archive, path: Path) -> None:
    """Download an archive to `path`. Only a complete file with the right SHA-256 is kept.

    A download that fails or is damaged is repeated a few times. Raises UserError.
    """
    try:
        web.fetch(partial(_fetch, archive, path))
    except web.ERRORS as error:
        raise UserError(f"Cannot download {archive.url}: {error}.") from error


def _fetch(archive: Archive, path: Path) -> None:
    partial_file = path.with_name(f".{path.name}.part")
    try:
        with urllib.request.urlopen(archive.url, timeout=_TIMEOUT) as response:
            _copy(response, partial_file, archive)
        found = sha256_of(partial_file)
        if found != archive.sha256:
            raise Corrupt(
                f"The download of {archive.url} is not the official archive: its SHA-256 is "
                f"{found}; must be {archive.sha256}. It was deleted."
            )
        partial_file.replace(path)
    finally:
        partial_file.unlink(missing_ok=True)


def _copy(response: Any, path: Path, archive: Archive) -> None:
    """Copy as many bytes as the archive has. Raises Corrupt if the response has fewer or more."""
    left = archive.size
    with path.open("wb") as file, console.progress("fetch", archive.size, "bytes") as advance:
        while left and (block := response.read(min(_BLOCK, left))):
            file.write(block)
            left -= len(block)
            advance(len(block))
    if left or response.read(1):
        raise Corrupt(
            f"The download of {archive.url} has {'fewer' if left else 'more'} than the expected "
            f"{archive.size:,} bytes. It was deleted."
        )
