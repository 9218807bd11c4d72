"""Open the source that `prepare.source` names, and detect when it has changed."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddpm_core.config import Prepare
from ddpm_core.config.paths import input_path
from ddpm_core.data.names import one_line
from ddpm_core.data.sources import dvc
from ddpm_core.data.sources.base import Listing, Source
from ddpm_core.data.sources.cifar import CifarBinary
from ddpm_core.data.sources.digits import DIGITS_STATE, Digits
from ddpm_core.data.sources.download import DOWNLOADS, KNOWN, known_archive
from ddpm_core.data.sources.file import open_file
from ddpm_core.data.sources.folder import Directory, directory_state
from ddpm_core.data.sources.limits import file_state
from ddpm_core.data.sources.s3 import open_s3, s3_state
from ddpm_core.data.sources.shards import Shards
from ddpm_core.data.sources.sidecars import FIND, Columns
from ddpm_core.errors import UserError
from ddpm_core.storage import sha256_of
from ddpm_core.storage.staging import remove, staged_folder

ALLOWED = (
    "digits, cifar10, dtd, a directory, a zip or tar archive, a parquet file, an array (.npy or "
    ".npz), s3://bucket/prefix or dvc:REPO#PATH@REV"
)
_CONVERT = (
    "Convert it, with a program that you trust, to image files in one folder per class, such as "
    "train/apple/1.png, and use that folder."
)


@contextmanager
def open_source(settings: Prepare, root: Path, excluded: Sequence[str] = ()) -> Iterator[Source]:
    """Open the source that `settings.source` names.

    Downloads stay below `root` while the source is open. `excluded` are the paths and URIs where
    the run writes its own files. The source omits them, so that a run does not train on its own
    output, and its output does not make the prepared data stale.

    Raises:
        UserError: the source cannot be read.
    """
    uri, columns = settings.source, _columns(settings)
    if uri == "digits":
        yield Digits()
    elif uri in KNOWN:
        path = known_archive(uri, root / DOWNLOADS, settings.download)
        yield open_file(path, KNOWN[uri].url)
    elif uri.startswith(("s3://", "dvc:")):
        with staged_folder(root / "source") as scratch:
            try:
                if uri.startswith("s3://"):
                    yield open_s3(uri, scratch, excluded, settings.anonymous, columns)
                else:
                    yield _open_dvc(uri, scratch, columns)
            finally:
                remove(scratch)
    else:
        yield _open_local(_local_path(uri), uri, excluded, columns)


def recognise(source: Source, settings: Prepare) -> tuple[Source, Listing]:
    """Return the source and its listing, after a look at the kind of files in it.

    A source of CIFAR-10's binary files becomes a source of their records. A source without images
    but with archives, parquet files or arrays becomes a source of the images in them.

    Raises:
        UserError: the source contains no images but pickled files, or lacks a column that the
            settings name.
    """
    listing = source.listing()
    if listing.shards and not (listing.images or listing.batches):
        source = Shards(source, listing, _columns(settings))
        listing = source.listing()
    _refuse_unused_columns(settings, listing)
    if listing.batches:
        records = CifarBinary(source, listing.batches)
        return records, records.listing()
    if listing.pickles and not listing.images:
        raise UserError(_pickles_refused(source.facts["uri"], listing.pickles))
    return source, listing


def _columns(settings: Prepare) -> Columns:
    return Columns(settings.image_column, settings.label_column, settings.caption_column)


def _refuse_unused_columns(settings: Prepare, listing: Listing) -> None:
    """Raise UserError if a setting names a column, and the source has nothing of that kind."""
    labelled = any(entry.class_name is not None for entry in listing.images)
    for name, used in (("image_column", bool(listing.columns)), ("label_column", labelled)):
        value = getattr(settings, name)
        if value is not None and not used:
            kinds = "parquet files" if name == "image_column" else "parquet or .json files"
            raise UserError(
                f"prepare.{name}: got {value!r}, but the source has no {kinds} with this column. "
                "Remove the setting."
            )


def has_changed(settings: Prepare, facts: dict[str, Any], excluded: Sequence[str] = ()) -> bool:
    """Return whether the source differs from the one with these `facts`.

    Returns False if that is unknown, for example because the source is unavailable.
    """
    if settings.source in KNOWN:
        return bool(facts.get("sha256") != KNOWN[settings.source].sha256)
    try:
        now = _state(settings, excluded)
    except (UserError, OSError):
        return False
    before = facts.get("state")
    if now is None or now == before:
        return False
    path = input_path(settings.source)
    if path.is_file() and isinstance(before, dict) and now.get("size") == before.get("size"):
        # A file that was copied or touched has a new modification time but the same content.
        return sha256_of(path) != facts.get("sha256")
    return True


def _state(settings: Prepare, excluded: Sequence[str]) -> dict[str, Any] | None:
    """Return facts that change with the source and are quick to find, or None if unknown."""
    uri = settings.source
    if uri == "digits":
        return dict(DIGITS_STATE)
    if uri.startswith("s3://"):
        return s3_state(uri, excluded, settings.anonymous)
    if uri.startswith("dvc:"):
        return dvc.state(dvc.parse(uri))
    path = _local_path(uri)
    return directory_state(path, excluded) if path.is_dir() else file_state(path)


def _local_path(uri: str) -> Path:
    """Return the path of a directory or regular file. Raises UserError."""
    if "://" in uri or not uri.strip():  # an empty path would be the current folder
        raise UserError(f"prepare.source: got {uri!r}; must be {ALLOWED}.")
    try:
        path = input_path(uri)
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise UserError(
            f"prepare.source: {uri!r} does not exist in {Path.cwd()}; must be {ALLOWED}."
        ) from None
    except (OSError, RuntimeError, ValueError) as error:  # long names, unknown ~users, NUL bytes
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"prepare.source: {uri!r} cannot be read: {reason}.") from error
    # Reading a pipe would hang, and a device such as /dev/zero has no end.
    if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
        raise UserError(
            f"prepare.source: {uri!r} is neither a directory nor a regular file; must be {ALLOWED}."
        )
    return path


def _open_local(
    path: Path, uri: str, excluded: Sequence[str] = (), columns: Columns = FIND
) -> Source:
    if path.is_dir():
        return Directory(path, uri, excluded, columns)
    return open_file(path, uri, columns)


def _open_dvc(uri: str, scratch: Path, columns: Columns) -> Source:
    """Fetch a path that DVC tracks into `scratch` and open it."""
    tracked = dvc.parse(uri)
    # Resolve the revision first: a branch or tag could move while its data are fetched.
    commit = dvc.commit(tracked)
    target = scratch / "data"
    dvc.fetch(tracked._replace(rev=commit or tracked.rev), target)
    source = _open_local(target, uri, columns=columns)
    source.facts.update(revision=commit or tracked.rev, state={"commit": commit})
    return source


def _pickles_refused(uri: str, pickles: Sequence[str]) -> str:
    """Return the error message for a source of pickled files."""
    files = {name.rpartition("/")[2] for name in pickles}
    problem, advice = f"contains pickled files, such as {one_line(min(files))}", _CONVERT
    if "data_batch_1" in files or "test_batch" in files:
        problem = "is the Python version of CIFAR-10, which is pickled"
        advice = "Use the binary version, cifar-10-binary.tar.gz."
    elif {"train", "test"} <= files:
        problem = "is the Python version of CIFAR-100, which is pickled"
    return f"{uri} {problem}. Reading a pickle can run code, so it is not supported. {advice}"
