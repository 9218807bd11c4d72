"""From `prepare.source` to a source, and what tells that a source has changed."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddpm_core.config import Prepare
from ddpm_core.config.paths import input_path
from ddpm_core.data.sources import dvc
from ddpm_core.data.sources.archive import archive_state, open_archive
from ddpm_core.data.sources.base import Source
from ddpm_core.data.sources.digits import DIGITS_STATE, Digits
from ddpm_core.data.sources.download import DOWNLOADS, KNOWN, known_archive
from ddpm_core.data.sources.folder import Directory, directory_state
from ddpm_core.data.sources.s3 import open_s3, s3_state
from ddpm_core.errors import UserError
from ddpm_core.storage import sha256_of
from ddpm_core.storage.staging import remove, staged_folder

ALLOWED = (
    "digits, cifar10, dtd, a directory, a zip or tar archive, s3://bucket/prefix or "
    "dvc:REPO#PATH@REV"
)


@contextmanager
def open_source(settings: Prepare, root: Path, own: Sequence[str] = ()) -> Iterator[Source]:
    """The source that the settings name. What has to be fetched lies below `root` meanwhile.

    The places of a run's `own` that lie inside the source are no part of it: a run does not train
    on what it wrote itself, and is up to date in the end. Raises UserError where it can't be read.
    """
    uri = settings.source
    if uri == "digits":
        yield Digits()
    elif uri in KNOWN:
        path = known_archive(uri, root / DOWNLOADS, settings.download)
        yield open_archive(path, KNOWN[uri].url)
    elif uri.startswith(("s3://", "dvc:")):
        with staged_folder(root / "source") as place:
            try:
                if uri.startswith("s3://"):
                    yield open_s3(uri, place, own, settings.anonymous)
                else:
                    yield _tracked(uri, place)
            finally:
                remove(place)
    else:
        yield _local(_path(uri), uri, own)


def changed(settings: Prepare, facts: dict[str, Any], own: Sequence[str] = ()) -> bool:
    """Whether the source of these settings is another now than the one with these `facts`.

    What can't be told, or is no longer within reach, has not changed.
    """
    if settings.source in KNOWN:
        return bool(facts.get("sha256") != KNOWN[settings.source].sha256)
    try:
        found = _state(settings, own)
    except (UserError, OSError):
        return False
    before = facts.get("state")
    if found is None or found == before:
        return False
    path = input_path(settings.source)
    if path.is_file() and isinstance(before, dict) and found.get("size") == before.get("size"):
        return sha256_of(path) != facts.get("sha256")  # only copied or touched, perhaps
    return True


def _state(settings: Prepare, own: Sequence[str]) -> dict[str, Any] | None:
    uri = settings.source
    if uri == "digits":
        return dict(DIGITS_STATE)
    if uri.startswith("s3://"):
        return s3_state(uri, own, settings.anonymous)
    if uri.startswith("dvc:"):
        return dvc.state(dvc.parse(uri))
    path = _path(uri)
    return directory_state(path, own) if path.is_dir() else archive_state(path)


def _path(uri: str) -> Path:
    if "://" in uri or not uri.strip():  # empty, it would be the current folder
        raise UserError(f"prepare.source: {uri!r} given; {ALLOWED} is needed.")
    try:
        path = input_path(uri)
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise UserError(
            f"prepare.source: there is no {uri!r} in {Path.cwd()}; {ALLOWED} is needed."
        ) from None
    except (OSError, RuntimeError, ValueError) as error:  # too long a name, ~nobody, a NUL byte
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"prepare.source: {uri!r} cannot be read: {reason}.") from error
    if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):  # a pipe hangs, a device never ends
        raise UserError(f"prepare.source: {uri!r} is neither a directory nor a regular file.")
    return path


def _local(path: Path, uri: str, own: Sequence[str] = ()) -> Source:
    return Directory(path, uri, own) if path.is_dir() else open_archive(path, uri)


def _tracked(uri: str, scratch: Path) -> Source:
    """What DVC tracks. The revision is that of the moment before it is fetched."""
    tracked = dvc.parse(uri)
    commit = dvc.commit(tracked)
    target = scratch / "data"
    dvc.fetch(tracked._replace(rev=commit or tracked.rev), target)
    source = _local(target, uri)
    source.facts.update(revision=commit or tracked.rev, state={"commit": commit})
    return source
