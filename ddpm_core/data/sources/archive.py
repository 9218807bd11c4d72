"""Images in a zip or tar archive. They are read in place: no file is written to the disk."""

from __future__ import annotations

import stat
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from tarfile import BLOCKSIZE, HeaderError, ReadError, TarFile, TarInfo
from typing import Self

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
from ddpm_core.data.sources.limits import (
    entries_limit,
    file_facts,
    reason_of,
    unpacked_limit,
    user_errors,
)
from ddpm_core.data.sources.sidecars import FIND, Columns
from ddpm_core.data.sources.unpacking import Excess, Unpacked, unpacked_file, zip_content
from ddpm_core.errors import UserError

_FILE, _FOLDER, _SPARSE = "a file", "a folder", "a sparse file"


def open_archive(path: Path, uri: str, columns: Columns = FIND) -> Zip | Tar:
    """Open a zip or tar archive, recognised by its content. Raises UserError for other files."""
    with _user_errors(uri):
        # The mark of a zip is at its end, which a tar shares if its last file is a zip.
        if _is_tar(path):
            return Tar(path, uri, columns)
        if zipfile.is_zipfile(path):
            return Zip(path, uri, columns)
    raise UserError(
        f"prepare.source: {uri} is neither a zip nor a tar archive (plain, gz, bz2 or xz), nor a "
        "parquet file or NumPy array (.npy, .npz), or it is damaged. Use such a file, or the "
        "directory that contains the images."
    )


class Zip:
    """The images of a zip archive."""

    def __init__(self, path: Path, uri: str, columns: Columns = FIND) -> None:
        self.facts = file_facts(path, uri)
        self._uri, self._path, self._columns = uri, path, columns

    def listing(self) -> Listing:
        """Return the entries of the archive. Raises UserError."""
        with _user_errors(self._uri), zipfile.ZipFile(self._path) as archive:
            if sum(member.file_size for member in archive.infolist()) > unpacked_limit(self._path):
                raise Excess(f"unpacks to more than {unpacked_limit(self._path):,} bytes")
            return make_listing(_zip_items(archive), self._columns)

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
        raise Unreadable(reason_of(error)) from error


def _zip_content(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes | Rejection:
    if problem := size_problem(member.file_size):
        return Rejection(member.filename, problem)
    try:
        return _zip_head(archive, member, member.file_size)
    except Unreadable as error:
        return Rejection(member.filename, f"cannot be unpacked: {error}")


class Tar:
    """The images of a tar archive, which is read once to list it and once for the images."""

    def __init__(self, path: Path, uri: str, columns: Columns = FIND) -> None:
        self.facts = file_facts(path, uri)
        self._uri, self._path, self._columns = uri, path, columns

    def listing(self) -> Listing:
        """Return the entries of the archive. Raises UserError."""
        with _user_errors(self._uri):
            return make_listing(self._items(), self._columns)

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
        with unpacked_file(self._path, unpacked_limit(self._path)) as stream:
            stream.begin_headers()
            archive = TarFile(
                fileobj=stream,  # type: ignore[arg-type]  # it calls only read, seek and tell
                encoding="utf-8",
                errors="surrogateescape",
                tarinfo=_Header,
            )
            ref, limit = 0, entries_limit(self._path)
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


def _user_errors(uri: str) -> AbstractContextManager[None]:
    return user_errors(uri, "archive", "unpack it and use the directory")
