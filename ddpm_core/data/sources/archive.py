"""Pictures in a zip or tar archive, read where they lie: nothing is unpacked, nothing escapes."""

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
    FILE_BYTES,
    Entry,
    Folder,
    Found,
    Item,
    Listing,
    Payload,
    Rejection,
    Unreadable,
    make_listing,
)
from ddpm_core.data.sources.unpacking import Excess, Unpacked, unpacked_file, zip_content
from ddpm_core.errors import UserError
from ddpm_core.storage import sha256_of

# Images are compressed already: an archive that unpacks to far more than its own size is a bomb.
BOMB_RATIO, BOMB_FLOOR = 200, 2**28
# The smallest image has more bytes than ENTRY_BYTES, packed or not, and its header comes on top.
ENTRY_BYTES, ENTRIES_FLOOR = 32, 100_000

_FILE, _FOLDER, _SPARSE = "a file", "a folder", "a sparse file"


def open_archive(path: Path, uri: str) -> Zip | Tar:
    """By its content, whatever its name. Raises UserError for any other file."""
    with _told(uri):
        # A zip is known by its end, which a tar has too whose last file is one.
        if _is_tar(path):
            return Tar(path, uri)
        if zipfile.is_zipfile(path):
            return Zip(path, uri)
    raise UserError(
        f"prepare.source: {uri} is a file, but neither a zip nor a tar archive (plain, gz, bz2 or "
        "xz), or it is damaged. Give an archive, or the directory that holds the pictures."
    )


def archive_facts(path: Path, uri: str) -> dict[str, Any]:
    return {"uri": uri, "sha256": sha256_of(path), "state": archive_state(path)}


def archive_state(path: Path) -> dict[str, Any]:
    facts = path.stat()
    return {"size": facts.st_size, "modified": facts.st_mtime_ns}


class Zip:
    def __init__(self, path: Path, uri: str) -> None:
        self.facts = archive_facts(path, uri)
        self._uri, self._path = uri, path

    def listing(self) -> Listing:
        with _told(self._uri), zipfile.ZipFile(self._path) as archive:
            if sum(member.file_size for member in archive.infolist()) > _most(self._path):
                raise Excess(f"unpacks to more than {_most(self._path):,} bytes")
            return make_listing(_zip_items(archive))

    def read(self, entries: Sequence[Entry]) -> Iterator[tuple[int, Payload]]:
        """In the order in which they lie in the file."""
        with _told(self._uri), zipfile.ZipFile(self._path) as archive:
            members = archive.infolist()
            order = sorted(range(len(entries)), key=lambda n: members[entries[n].ref].header_offset)
            for position in order:
                yield position, _zip_content(archive, members[entries[position].ref])


def _zip_items(archive: zipfile.ZipFile) -> Iterator[Item]:
    for ref, member in enumerate(archive.infolist()):
        head = partial(_zip_head, archive, member)
        yield from _item(_zip_name(member), member.file_size, ref, head, _zip_kind(member))


def _zip_kind(member: zipfile.ZipInfo) -> str:
    if member.filename.endswith("/"):  # is_dir() fails where there is no name
        return _FOLDER
    mode = stat.S_IFMT(member.external_attr >> 16)
    if mode in (0, stat.S_IFREG):
        return _FILE
    return "a link" if mode == stat.S_IFLNK else "a device"


def _zip_name(member: zipfile.ZipInfo) -> str:
    """Bytes without the UTF-8 flag are UTF-8 from many programs all the same; zipfile takes them
    for code page 437. Some programs of Windows separate with backslashes."""
    name = member.filename
    if not member.flag_bits & 0x800:
        with suppress(UnicodeEncodeError):  # a name that is given a second time, in Unicode
            name = names.from_bytes(name.encode("cp437", "surrogateescape"))
    return name if "/" in name else name.replace("\\", "/")


def _zip_head(archive: zipfile.ZipFile, member: zipfile.ZipInfo, count: int) -> bytes:
    try:
        return zip_content(archive, member, count)
    except Excess as error:
        raise Unreadable(f"it {error}, which is what its header claims") from error
    except Exception as error:  # whatever a damaged entry leads its decompressor to
        raise Unreadable(_reason(error)) from error


def _zip_content(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes | Rejection:
    if member.file_size > FILE_BYTES:
        return _too_large(member.filename, member.file_size)
    try:
        return _zip_head(archive, member, member.file_size)
    except Unreadable as error:
        return Rejection(member.filename, f"cannot be unpacked: {error}")


class Tar:
    """Read from its beginning to its end, once to list it and once for the pictures."""

    def __init__(self, path: Path, uri: str) -> None:
        self.facts = archive_facts(path, uri)
        self._uri, self._path = uri, path

    def listing(self) -> Listing:
        with _told(self._uri):
            return make_listing(self._items())

    def read(self, entries: Sequence[Entry]) -> Iterator[tuple[int, Payload]]:
        positions = {entry.ref: position for position, entry in enumerate(entries)}
        with _told(self._uri):
            for ref, stream, member in self._members():
                if ref in positions:
                    yield positions[ref], _tar_content(stream, member)

    def _items(self) -> Iterator[Item]:
        for ref, stream, member in self._members():
            head = partial(_tar_head, stream, member)
            yield from _item(member.name, member.size, ref, head, _tar_kind(member))

    def _members(self) -> Iterator[tuple[int, Unpacked, TarInfo]]:
        with unpacked_file(self._path, _most(self._path)) as stream:
            stream.begin_headers()
            archive = TarFile(
                fileobj=stream,  # type: ignore[arg-type]  # of which it only reads
                encoding="utf-8",
                errors="surrogateescape",
                tarinfo=_Header,
            )
            ref, entries = 0, ENTRIES_FLOOR + self._path.stat().st_size // ENTRY_BYTES
            while (member := archive.next()) is not None:
                yield ref, stream, member
                # Or memory grows with the archive; no global header matters for an image.
                archive.members.clear()  # type: ignore[attr-defined]
                archive.pax_headers = {}
                stream.seek(archive.offset)
                stream.begin_headers()
                ref += 1
                if ref > entries:
                    raise Excess(f"has more than {entries:,} entries")


class _Header(TarInfo):
    """Raises where tarfile itself takes a damaged header, or a cut, for the end of the archive."""

    @classmethod
    def fromtarfile(cls, tarfile: TarFile) -> Self:
        try:
            return super().fromtarfile(tarfile)
        except HeaderError as error:
            if type(error).__name__ == "EOFHeaderError":  # the regular end
                raise
            raise ReadError(f"after {tarfile.offset:,} bytes: {error}") from error


def _is_tar(path: Path) -> bool:
    """Whether a file, unpacked if it is packed, begins with a tar header or with the end mark."""
    with unpacked_file(path, BLOCKSIZE) as stream:
        start = stream.take(BLOCKSIZE)
    try:
        TarInfo.frombuf(start, "utf-8", "surrogateescape")
    except HeaderError:
        return start == bytes(BLOCKSIZE)
    return True


def _tar_kind(member: TarInfo) -> str:
    if member.issparse():  # maps of thousands of holes make reading one very slow
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
    if member.size > FILE_BYTES:
        return _too_large(member.name, member.size)
    return _tar_head(stream, member, member.size)


def _too_large(name: str, size: int) -> Rejection:
    return Rejection(name, f"{size:,} bytes; at most {FILE_BYTES:,} are read")


def _item(
    path: str, size: int, ref: int, head: Callable[[int], bytes], kind: str
) -> Iterator[Item]:
    """An entry of either kind of archive, as far as it is one of a folder."""
    name = _plain(path)
    if not name:
        if size:  # the folder itself has no name either, and no content
            yield Rejection("", "an entry without a name")
    elif names.leaves_root(name):
        yield Rejection(name, "a path that leaves the archive")
    elif kind == _FOLDER:
        yield Folder(name)
    elif kind == _FILE:
        yield Found(name, size, ref, head)
    elif names.suffix(name) in names.PICTURE_SUFFIXES or kind == _SPARSE:
        yield Rejection(name, f"{kind}; only regular files are read")


def _plain(name: str) -> str:
    """Without `.` parts and doubled or closing slashes; an absolute path stays one."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    return ("/" if name.startswith("/") else "") + "/".join(parts)


def _most(path: Path) -> int:
    """Bytes that an archive may unpack to."""
    return BOMB_FLOOR + BOMB_RATIO * path.stat().st_size


@contextmanager
def _told(uri: str) -> Iterator[None]:
    """A damaged archive leads its reader to exceptions of any kind."""
    try:
        yield
    except UserError:
        raise
    except Excess as error:
        raise UserError(
            f"The archive {uri} {error}; no archive of images of its size does. If you trust it, "
            "unpack it yourself and give the directory."
        ) from error
    except MemoryError as error:
        raise UserError(
            f"There is not enough memory to read the archive {uri}. Use a machine or a container "
            "with more, or unpack it yourself and give the directory."
        ) from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise UserError(f"Cannot read {uri}: {error.strerror}.") from error
        raise UserError(
            f"The archive {uri} is damaged, or of a kind that is not read: {_reason(error)}. Fetch "
            "it again, or unpack it and give the directory."
        ) from error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
