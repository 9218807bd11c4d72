"""Decompress archives that may be malicious.

A few kilobytes can unpack to terabytes. Every read is in blocks and has a limit, so memory stays
bounded whatever the size fields in headers say.
"""

from __future__ import annotations

import bz2
import copy
import gzip
import io
import lzma
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

BLOCK = 2**16
HEADER_BYTES = 2**20  # of all headers of one tar entry: long names, pax records, sparse maps
_LZMA_MIN = 2**12  # bytes of the smallest dictionary that LZMA supports

Stream = IO[bytes] | gzip.GzipFile | bz2.BZ2File | lzma.LZMAFile


class Excess(Exception):
    """An archive exceeds a limit. The text is the predicate of a sentence about the archive."""


class Unpacked:
    """A decompressed stream that is read forwards and yields at most `limit` bytes.

    tarfile reads headers with `read`, `seek` and `tell`; our code reads content with `take`.
    """

    def __init__(self, stream: Stream, limit: int) -> None:
        self._stream, self._limit = stream, limit
        self._position = 0
        self._header_left = 0

    def begin_headers(self) -> None:
        """Let `read` return HEADER_BYTES from here on."""
        self._header_left = HEADER_BYTES

    def read(self, count: int) -> bytes:
        """Return the next `count` bytes of a header. Raises Excess."""
        self._header_left -= count
        if self._header_left < 0:
            raise Excess(f"has an entry with headers of more than {HEADER_BYTES:,} bytes")
        return self.take(count)

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes, or fewer at the end of the stream. Raises Excess."""
        content = io.BytesIO()  # joining a list of blocks would need twice the memory
        for block in self._blocks(count):
            content.write(block)
        return content.getvalue()

    def seek(self, position: int) -> int:
        """Skip the bytes up to `position` or the end of the stream. Raises Excess."""
        if position < self._position:
            raise ValueError(f"an entry begins inside the previous one, at byte {position:,}")
        for _ in self._blocks(position - self._position):
            pass
        return self._position

    def tell(self) -> int:
        """Return the number of bytes read or skipped so far."""
        return self._position

    def _blocks(self, count: int) -> Iterator[bytes]:
        end = self._position + count
        while left := end - self._position:
            block = self._stream.read(min(left, BLOCK))
            if not block:
                return
            self._position += len(block)
            if self._position > self._limit:
                raise Excess(f"unpacks to more than {self._limit:,} bytes")
            yield block


@contextmanager
def unpacked_file(path: Path, limit: int) -> Iterator[Unpacked]:
    """Open a file; decompress it if its first bytes are those of gzip, bzip2 or xz."""
    with path.open("rb") as file:
        yield Unpacked(_decompressed(file), limit)


def _decompressed(file: io.BufferedReader) -> Stream:
    start = file.peek(10)
    if start.startswith(b"\x1f\x8b"):
        return gzip.open(file)
    if start.startswith(b"BZh") and start[4:10] == b"1AY&SY":
        return bz2.open(file)
    if start.startswith((b"\xfd7zXZ\0", b"]\0\0\x80")):
        return lzma.open(file)
    return file


def zip_content(archive: zipfile.ZipFile, member: zipfile.ZipInfo, count: int) -> bytes:
    """Return the first `count` bytes of an entry in a zip, or all of it if it has fewer.

    A complete entry is verified by its checksum.

    Raises:
        Excess: the entry is larger than its header says.
        ValueError: it is smaller, or its checksum is wrong.
        Exception: the decompressor failed on damaged data.
    """
    claimed = member.file_size
    with zip_stream(archive, member) as stream:
        unpacked = Unpacked(stream, claimed)
        content = unpacked.take(min(count, claimed))
        if count < claimed:
            return content
        with suppress(EOFError):  # zip allows LZMA without an end mark
            unpacked.take(1)
    if len(content) < claimed:
        raise ValueError(f"it has {len(content):,} bytes; {claimed:,} in its header")
    if zlib.crc32(content) != member.CRC:
        raise ValueError("Bad CRC-32")
    return content


def zip_stream(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Stream:
    """Open an entry's content. zipfile itself decompresses bzip2 and LZMA without a limit."""
    if member.compress_type not in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        return archive.open(member)
    packed = copy.copy(member)
    packed.compress_type, packed.file_size = zipfile.ZIP_STORED, member.compress_size
    del packed.CRC  # zipfile would compare it with the packed bytes
    stream = archive.open(packed)
    if member.compress_type == zipfile.ZIP_BZIP2:
        return bz2.open(stream)
    properties, dictionary = struct.unpack("<4xBI", stream.read(9))
    # The memory for the dictionary is allocated at once, and more than the content is useless.
    settings = {
        "id": lzma.FILTER_LZMA1,
        "lc": properties % 9,
        "lp": properties // 9 % 5,
        "pb": properties // 45,
        "dict_size": max(_LZMA_MIN, min(dictionary, member.file_size)),
    }
    return lzma.open(stream, format=lzma.FORMAT_RAW, filters=[settings])
