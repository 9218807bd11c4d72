"""Which extractor a run uses, and the file of the Inception weights. Imports no torch.

The weights are a local file, or a URI that is downloaded into the workspace once.
"""

from __future__ import annotations

import shutil
import urllib.request
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

from ddpm_core.config import Evaluate
from ddpm_core.config.paths import input_path
from ddpm_core.console import say
from ddpm_core.errors import Corrupt, UserError
from ddpm_core.storage import MANIFEST, fetch_whole, sha256_of, web
from ddpm_core.storage.bucket import Bucket, connect, split
from ddpm_core.storage.workspace import EVALUATION, Workspace, fingerprint
from ddpm_core.text import masked

TIMEOUT = 60.0  # seconds without a byte
_SETTING = "evaluate.inception_weights"


def extractor_name(settings: Evaluate) -> str:
    """Return `inception` or `in_domain`; `auto` means inception if weights are given."""
    if settings.extractor == "auto":
        return "inception" if settings.inception_weights else "in_domain"
    return settings.extractor


def locate(given: str, workspace: Workspace) -> Path:
    """Return the file of `evaluate.inception_weights`: a path, file://, http(s):// or s3:// URI.

    Downloads it if necessary. `#sha256=HEX` at the end is checked.

    Raises:
        UserError: the file is missing, cannot be downloaded or has a different checksum.
    """
    uri, _, expected = given.partition("#sha256=")
    path = _local_file(uri)
    if path is None:
        return _downloaded(uri, expected.lower(), workspace)
    if not path.is_file():
        raise UserError(f"{_SETTING}: {path} does not exist or is not a file. Correct the path.")
    _check(path, expected.lower(), str(path))
    return path


def _check(path: Path, expected: str, name: str) -> None:
    """Raise Corrupt if a file does not have the expected SHA-256; "" accepts any."""
    if expected and (found := sha256_of(path)) != expected:
        raise Corrupt(
            f"{_SETTING}: {name} has the SHA-256 {found}, but #sha256= requires {expected}. "
            "Correct the checksum, or fetch the file again."
        )


def _local_file(uri: str) -> Path | None:
    parts = urlsplit(uri)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return input_path(uri) if "://" not in uri else None


def _downloaded(uri: str, expected: str, workspace: Workspace) -> Path:
    """Return the workspace's copy of a URI. Only a file with the expected checksum is kept."""
    # Without secrets the key stays the same when the URI is signed again.
    key = f"{EVALUATION}/inception/{fingerprint(masked(uri))}"
    name = Path(urlsplit(urldefrag(uri).url).path).name or "weights.pth"
    storage, file = workspace.storage, f"{key}/{name}"
    kept = storage.exists(f"{key}/{MANIFEST}") and storage.size(file) is not None
    if not kept or (expected and storage.checksum(file) != expected):
        say(f"evaluate: downloading {uri}")
        with storage.new_folder(key, {"uri": masked(uri)}) as folder:
            _download(uri, folder / name, expected)
    return workspace.path(file)


def _download(uri: str, path: Path, expected: str) -> None:
    scheme = urlsplit(uri).scheme
    if scheme not in ("http", "https", "s3"):
        raise UserError(
            f"{_SETTING}: got {uri!r}; must be a path, or a URI that begins with file://, http://, "
            "https:// or s3://."
        )
    if "@" in urlsplit(uri).netloc:
        raise UserError(
            f"{_SETTING}: {uri} contains a user or password, which is not supported. Download the "
            "file yourself and set its path."
        )
    is_s3 = scheme == "s3"

    def fetch() -> None:
        (_from_s3 if is_s3 else _from_web)(uri, path)
        _check(path, expected, uri)

    try:
        (fetch_whole if is_s3 else web.fetch)(fetch)
    except (OSError, *web.ERRORS) as error:
        raise UserError(
            f"{_SETTING}: downloading {uri} failed: {error}. Check the URI, or download the file "
            "yourself and set its path."
        ) from error


def _from_web(uri: str, path: Path) -> None:
    with urllib.request.urlopen(uri, timeout=TIMEOUT) as response, path.open("wb") as file:
        length = response.headers.get("Content-Length")
        shutil.copyfileobj(response, file, 2**20)
    if length is not None and path.stat().st_size != int(length):
        raise ConnectionError(f"received {path.stat().st_size} of {length} bytes")


def _from_s3(uri: str, path: Path) -> None:
    bucket, key = split(uri, _SETTING)
    Bucket(connect(), bucket).download(key, path)
