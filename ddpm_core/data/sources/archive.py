"""Images in a zip or tar archive. They are read in place: no file is written to the disk."""

from __future__ import annotations

import errno
import stat
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tarfile import BLOCKSIZE, HeaderError, ReadError, TarFile, TarInfo
from typing import Any, Self

from ddpm_core.data import names
from ddpm_core.data.sources.base import (
    Entry,
    Folder,
    Found,
    Item,
    Listing,
    Payload,
    Rejection,
    Unreadable,
    make_listing,
    size_problem,
)
from ddpm_core.data.sources.unpacking import Excess, Unpacked, unpacked_file, zip_content
from ddpm_core.errors import UserError
from ddpm_core.storage import sha256_of

# Images are already compressed, so an archive that unpacks to far more than its size is malicious.
BOMB_RATIO, BOMB_FLOOR = 200, 2**28  # at most BOMB_RATIO x its size + BOMB_FLOOR bytes
# Even the smallest image takes more than ENTRY_BYTES in an archive, and has a header on top.
ENTRY_BYTES, ENTRIES_FLOOR = 32, 100_000

_FILE, _FOLDER, _SPARSE = "a file", "a folder", "a sparse file"


def open_archive(path: Path, uri: str) -> Zip | Tar:
    """Open a zip or tar archive, recognised by its content. Raises UserError for other files."""
    with _user_errors(uri):
        # The mark of a zip is at its end, which a tar shares if its last file is a zip.
        if _is_tar(path):
            return Tar(path, uri)
        if zipfile.is_zipfile(path):
            return Zip(path, uri)
    raise UserError(
        f"prepare.source: {uri} is neither a zip nor a tar archive (plain, gz, bz2 or xz), or it "
        "is damaged. Use an archive, or the directory that contains the images."
    )


def archive_facts(path: Path, uri: str) -> dict[str, Any]:
    """Return the facts that identify an archive. Reads the whole file."""
    return {"uri": uri, "sha256": sha256_of(path), "state": archive_state(path)}


def archive_state(path: Path) -> dict[str, Any]:
    """Return the facts that change when an archive is written."""
    facts = path.stat()
    return {"size": facts.st_size, "modified": facts.st_mtime_ns}


class Zip:
    """The images of a zip archive."""

    def __init__(self, path: Path, uri: str) -> None:
        self.facts = archive_facts(path, uri)
        self._uri, self._path = uri, path

    def listing(self) -> Listing:
        """Return the entries of the archive. Raises UserError."""
        with _user_errors(self._uri), zipfile.ZipFile(self._path) as archive:
            if sum(member.file_size for member in archive.infolist()) > _limit(self._path):
                raise Excess(f"unpacks to more than {_limit(self._path):,} bytes")
            return make_listing(_zip_items(archive))

    def read(self, entries: Sequence[Entry]) -> Iterator[tuple[int, Payload]]:
        """Yield contents in the order of the file."""
        with _user_errors(self._uri), zipfile.ZipFile(self._path) as archive:
            members = archive.infolist()
            order = sorted(range(len(entries)), key=lambda n: members[entries[n].ref].header_offset)
            for position in order:
                yield position, _zip_content(archive, members[entries[position].ref])


def _zip_items(archive: zipfile.ZipFile) -> Iterator[Item]:
    for ref, member in enumerate(archive.infolist()):
        head = partial(_zip_head, archive, member)
        yield from _item(_zip_name(member), member.file_size, ref, head, _zip_kind(member))


def _zip_kind(member: zipfile.ZipInfo) -> str:
    if member.filename.endswith("/"):  # is_dir() fails on an empty name
        return _FOLDER
    mode = stat.S_IFMT(member.external_attr >> 16)
    if mode in (0, stat.S_IFREG):
        return _FILE
    return "a link" if mode == stat.S_IFLNK else "a device"


def _zip_name(member: zipfile.ZipInfo) -> str:
    """Return the name of an entry.

    Many programs write UTF-8 without setting its flag, and zipfile decodes such names as code
    page 437. Some Windows programs separate folders with backslashes.
    """
    name = member.filename
    if not member.flag_bits & 0x800:
        with suppress(UnicodeEncodeError):  # from the Unicode name in an extra field
            name = names.from_bytes(name.encode("cp437", "surrogateescape"))
    return name if "/" in name else name.replace("\\", "/")


def _zip_head(archive: zipfile.ZipFile, member: zipfile.ZipInfo, count: int) -> bytes:
    try:
        return zip_content(archive, member, count)
    except Excess as error:
        raise Unreadable(f"it {error}, the size in its header") from error
    except Exception as error:  # decompressors raise exceptions of many kinds for damaged data
        raise Unreadable(_reason(error)) from error


def _zip_content(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes | Rejection:
    if problem := size_problem(member.file_size):
        return Rejection(member.filename, problem)
    try:
        return _zip_head(archive, member, member.file_size)
    except Unreadable as error:
        return Rejection(member.filename, f"cannot be unpacked: {error}")


class Tar:
    """The images of a tar archive, which is read once to list it and once for the images."""

    def __init__(self, path: Path, uri: str) -> None:
        self.facts = archive_facts(path, uri)
        self._uri, self._path = uri, path

    def listing(self) -> Listing:
        """Return the entries of the archive. Raises UserError."""
        with _user_errors(self._uri):
            return make_listing(self._items())

    def read(self, entries: Sequence[Entry]) -> Iterator[tuple[int, Payload]]:
        """Yield contents in the order of the file."""
        positions = {entry.ref: position for position, entry in enumerate(entries)}
        with _user_errors(self._uri):
            for ref, stream, member in self._members():
                if ref in positions:
                    yield positions[ref], _tar_content(stream, member)

    def _items(self) -> Iterator[Item]:
        for ref, stream, member in self._members():
            head = partial(_tar_head, stream, member)
            yield from _item(member.name, member.size, ref, head, _tar_kind(member))

    def _members(self) -> Iterator[tuple[int, Unpacked, TarInfo]]:
        """Yield each entry's number, the unpacked stream, and its header. Raises Excess."""
        with unpacked_file(self._path, _limit(self._path)) as stream:
            stream.begin_headers()
            archive = TarFile(
                fileobj=stream,  # type: ignore[arg-type]  # it calls only read, seek and tell
                encoding="utf-8",
                errors="surrogateescape",
                tarinfo=_Header,
            )
            ref, limit = 0, ENTRIES_FLOOR + self._path.stat().st_size // ENTRY_BYTES
            while (member := archive.next()) is not None:
                yield ref, stream, member
                # Otherwise memory grows with the archive. Images need no global headers.
                archive.members.clear()  # type: ignore[attr-defined]
                archive.pax_headers = {}
                # Skip what is left of the content, with its limits, before tarfile reads on.
                stream.seek(archive.offset)
                stream.begin_headers()
                ref += 1
                if ref > limit:
                    raise Excess(f"has more than {limit:,} entries")


class _Header(TarInfo):
    """Raises ReadError for a damaged header, which tarfile alone treats as the end of the file."""

    @classmethod
    def fromtarfile(cls, tarfile: TarFile) -> Self:
        try:
            return super().fromtarfile(tarfile)
        except HeaderError as error:
            if type(error).__name__ == "EOFHeaderError":  # the regular end
                raise
            raise ReadError(f"after {tarfile.offset:,} bytes: {error}") from error


def _is_tar(path: Path) -> bool:
    """Return whether a file, after decompression, begins with a tar header or the end mark."""
    with unpacked_file(path, BLOCKSIZE) as stream:
        start = stream.take(BLOCKSIZE)
    try:
        TarInfo.frombuf(start, "utf-8", "surrogateescape")
    except HeaderError:
        return start == bytes(BLOCKSIZE)
    return True


def _tar_kind(member: TarInfo) -> str:
    if member.issparse():  # thousands of holes would make it very slow to read
        return _SPARSE
    if member.isdir() or member.isreg():
        return _FOLDER if member.isdir() else _FILE
    return "a link" if member.islnk() or member.issym() else "a device"


def _tar_head(stream: Unpacked, member: TarInfo, count: int) -> bytes:
    stream.seek(member.offset_data)
    content = stream.take(min(count, member.size))
    if len(content) < min(count, member.size):
        raise ReadError("unexpected end of data")
    return content


def _tar_content(stream: Unpacked, member: TarInfo) -> bytes | Rejection:
    if problem := size_problem(member.size):
        return Rejection(member.name, problem)
    return _tar_head(stream, member, member.size)


def _item(
    path: str, size: int, ref: int, head: Callable[[int], bytes], kind: str
) -> Iterator[Item]:
    """Yield the item for an entry of a zip or tar; nothing for entries to ignore."""
    name = _plain(path)
    if not name:
        if size:  # the entry of the top folder has no name either, but no content
            yield Rejection("", "an entry without a name")
    elif names.leaves_root(name):
        yield Rejection(name, "a path that leaves the archive")
    elif kind == _FOLDER:
        yield Folder(name)
    elif kind == _FILE:
        yield Found(name, size, ref, head)
    elif names.suffix(name) in names.IMAGE_SUFFIXES or kind == _SPARSE:
        yield Rejection(name, f"{kind}; only regular files are read")


def _plain(name: str) -> str:
    """Return a path without `.` parts and superfluous slashes; it stays absolute if it was."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    return ("/" if name.startswith("/") else "") + "/".join(parts)


def _limit(path: Path) -> int:
    """Return the number of bytes that an archive may unpack to."""
    return BOMB_FLOOR + BOMB_RATIO * path.stat().st_size


@contextmanager
def _user_errors(uri: str) -> Iterator[None]:
    """Turn any exception from reading an archive into a UserError.

    zipfile, tarfile and the decompressors raise exceptions of many kinds for damaged archives.
    """
    try:
        yield
    except UserError:
        raise
    except Excess as error:
        raise UserError(
            f"The archive {uri} {error}, too many for an archive of images of its size. If you "
            "trust it, unpack it yourself and use the directory."
        ) from error
    except MemoryError as error:
        raise UserError(
            f"Not enough memory to read the archive {uri}. Use a machine or container with more "
            "memory, or unpack the archive yourself and use the directory."
        ) from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise UserError(f"Cannot read {uri}: {error.strerror}.") from error
        raise UserError(
            f"The archive {uri} is damaged or of an unsupported kind: {_reason(error)}. Fetch it "
            "again, or unpack it and use the directory."
        ) from error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
