"""The official archives of known data sets, fetched once and checked."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ddpm_core import console
from ddpm_core.errors import Corrupt, UserError
from ddpm_core.storage import fetch_whole, sha256_of

DOWNLOADS = "downloads"
_TIMEOUT = 60.0
_BLOCK = 2**20


class Archive(NamedTuple):
    """Where an archive lies, and which one it must be."""

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
    """Return the official archive of `cifar10` or `dtd` in `folder`, by its SHA-256.

    A missing or different file is downloaded if `download` allows it. Raises UserError.
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
            "set prepare.source to its path to use it as an archive of your own."
        )
    if not download:
        raise UserError(
            f"prepare.source: {name} is not in {folder}, and prepare.download is false. With "
            f"-S prepare.download=true ddpm prepare fetches it from {archive.url}; or give the "
            "path of its archive or folder."
        )
    folder.mkdir(parents=True, exist_ok=True)
    fetch(archive, path)
    return path


def fetch(archive: Archive, path: Path) -> None:
    """Download to `path`, whole and with the right checksum, or not at all. Raises UserError."""
    fetch_whole(partial(_fetch, archive, path))


def _fetch(archive: Archive, path: Path) -> None:
    arriving = path.with_name(f".{path.name}.part")
    try:
        with urllib.request.urlopen(archive.url, timeout=_TIMEOUT) as response:
            _copy(response, arriving, archive)
        found = sha256_of(arriving)
        if found != archive.sha256:
            raise Corrupt(
                f"{archive.url} is not the archive it should be: its SHA-256 is {found}, "
                f"{archive.sha256} is needed. It was not kept."
            )
        arriving.replace(path)
    except (
        urllib.error.URLError,
        http.client.HTTPException,
        TimeoutError,
        ConnectionError,
    ) as error:
        raise UserError(f"Cannot fetch {archive.url}: {error}.") from error
    finally:
        arriving.unlink(missing_ok=True)


def _copy(response: Any, path: Path, archive: Archive) -> None:
    """Copy exactly the bytes that the archive has, and never more."""
    left = archive.size
    with path.open("wb") as file, console.progress("fetch", archive.size, "bytes") as advance:
        while left and (block := response.read(min(_BLOCK, left))):
            file.write(block)
            left -= len(block)
            advance(len(block))
    if left or response.read(1):
        raise Corrupt(
            f"{archive.url} has {'fewer' if left else 'more'} than the {archive.size:,} bytes it "
            "should have. It was not kept."
        )
