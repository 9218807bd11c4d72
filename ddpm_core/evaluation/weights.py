"""Where the Inception weights lie: a file of this machine, or a URI that is fetched once."""

from __future__ import annotations

import shutil
import time
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

from ddpm_core.config.paths import input_path
from ddpm_core.console import say
from ddpm_core.errors import Corrupt, UserError
from ddpm_core.storage import MANIFEST, fetch_whole, sha256_of
from ddpm_core.storage.bucket import connect, split
from ddpm_core.storage.workspace import EVALUATION, Workspace, fingerprint
from ddpm_core.text import masked

ATTEMPTS = 3
TIMEOUT = 60.0  # seconds without a byte


def locate(given: str, workspace: Workspace) -> Path:
    """The file of `evaluate.inception_weights`: a path, file://, http(s):// or s3://.

    `#sha256=HEX` at the end of either is what the file must have. Raises UserError.
    """
    uri, _, wanted = given.partition("#sha256=")
    path = _file(uri)
    if path is None:
        return _fetched(uri, wanted.lower(), workspace)
    if not path.is_file():
        raise UserError(f"evaluate.inception_weights: there is no file {path}.")
    _must_be(path, wanted.lower(), str(path))
    return path


def _must_be(path: Path, wanted: str, told: str) -> None:
    """Raise Corrupt unless a file has the SHA-256 that is wanted, or none is."""
    if wanted and (found := sha256_of(path)) != wanted:
        raise Corrupt(
            f"evaluate.inception_weights: {told} has the SHA-256 {found}; {wanted} is asked for."
        )


def _file(uri: str) -> Path | None:
    parts = urlsplit(uri)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return input_path(uri) if "://" not in uri else None


def _fetched(uri: str, wanted: str, workspace: Workspace) -> Path:
    """The workspace's copy of what a URI names: only a file that is the wanted one is kept."""
    # The same file when the URI is signed again, or its credentials change.
    key = f"{EVALUATION}/inception/{fingerprint(masked(uri))}"
    name = Path(urlsplit(urldefrag(uri).url).path).name or "weights.pth"
    storage, file = workspace.storage, f"{key}/{name}"
    kept = storage.exists(f"{key}/{MANIFEST}") and storage.size(file) is not None
    if not kept or (wanted and storage.checksum(file) != wanted):
        say(f"evaluate: fetching {uri}")
        with storage.new_folder(key, {"uri": masked(uri)}) as folder:
            fetch_whole(partial(_fetch, uri, folder / name, wanted))
    return workspace.path(file)


def _fetch(uri: str, path: Path, wanted: str) -> None:
    scheme = urlsplit(uri).scheme
    if scheme not in ("http", "https", "s3"):
        raise UserError(
            f"evaluate.inception_weights: {uri!r} given; a file, or a URI that begins with "
            "file://, http://, https:// or s3://, is needed."
        )
    if "@" in urlsplit(uri).netloc:
        raise UserError(
            f"evaluate.inception_weights: {uri} has a user or password, which is not "
            "supported: fetch the file yourself, and give its path."
        )
    for attempt in range(1, ATTEMPTS + 1):
        try:
            (_from_s3 if scheme == "s3" else _from_web)(uri, path)
            break
        except UserError:
            raise
        except Exception as error:  # boto3 and urllib have families of their own
            if attempt == ATTEMPTS or _is_final(error):
                raise UserError(
                    f"evaluate.inception_weights: {uri} cannot be fetched: {error}."
                ) from error
            time.sleep(attempt)
    _must_be(path, wanted, uri)


def _is_final(error: Exception) -> bool:
    return isinstance(error, urllib.error.HTTPError) and error.code < 500


def _from_web(uri: str, path: Path) -> None:
    with urllib.request.urlopen(uri, timeout=TIMEOUT) as response, path.open("wb") as file:
        length = response.headers.get("Content-Length")
        shutil.copyfileobj(response, file, 2**20)
    if length is not None and path.stat().st_size != int(length):
        raise OSError(f"{path.stat().st_size} of {length} bytes came")


def _from_s3(uri: str, path: Path) -> None:
    bucket, key = split(uri, "evaluate.inception_weights")
    connect().download_file(bucket, key, str(path))
