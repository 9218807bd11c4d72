"""Unpack streams without trusting what their headers claim.

A few kilobytes can unpack to terabytes. Every read here is in blocks and has a limit, so memory
stays bounded whatever a size field says, and a stream that unpacks to more than it may is refused.
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
_LZMA_LEAST = 2**12  # the smallest dictionary of LZMA

Stream = IO[bytes] | gzip.GzipFile | bz2.BZ2File | lzma.LZMAFile


class Excess(Exception):
    """An archive holds more than it may. The text continues a sentence about the archive."""


class Unpacked:
    """The bytes that a stream unpacks to, from its beginning to its end, at most `most` of them.

    tarfile reads headers with `read`, `seek` and `tell`; content is read with `take`.
    """

    def __init__(self, stream: Stream, most: int) -> None:
        self._stream, self._most = stream, most
        self._position = 0
        self._header_left = 0

    def begin_headers(self) -> None:
        """Let `read` give HEADER_BYTES from here on."""
        self._header_left = HEADER_BYTES

    def read(self, count: int) -> bytes:
        """The next `count` bytes, of a header. Raises Excess."""
        self._header_left -= count
        if self._header_left < 0:
            raise Excess(f"has an entry with headers of more than {HEADER_BYTES:,} bytes")
        return self.take(count)

    def take(self, count: int) -> bytes:
        """The next `count` bytes, or fewer where the stream ends. Raises Excess."""
        content = io.BytesIO()  # its value is not a second copy, unlike that of joined blocks
        for block in self._blocks(count):
            content.write(block)
        return content.getvalue()

    def seek(self, position: int) -> int:
        """Pass over the bytes up to `position`, or up to the end. Raises Excess."""
        if position < self._position:
            raise ValueError(f"an entry begins before the end of the one before, at {position:,}")
        for _ in self._blocks(position - self._position):
            pass
        return self._position

    def tell(self) -> int:
        return self._position

    def _blocks(self, count: int) -> Iterator[bytes]:
        end = self._position + count
        while left := end - self._position:
            block = self._stream.read(min(left, BLOCK))
            if not block:
                return
            self._position += len(block)
            if self._position > self._most:
                raise Excess(f"unpacks to more than {self._most:,} bytes")
            yield block


@contextmanager
def unpacked_file(path: Path, most: int) -> Iterator[Unpacked]:
    """A file that may be packed with gzip, bzip2 or xz, by its first bytes."""
    with path.open("rb") as file:
        yield Unpacked(_opened(file), most)


def _opened(file: io.BufferedReader) -> Stream:
    start = file.peek(10)
    if start.startswith(b"\x1f\x8b"):
        return gzip.open(file)
    if start.startswith(b"BZh") and start[4:10] == b"1AY&SY":
        return bz2.open(file)
    if start.startswith((b"\xfd7zXZ\0", b"]\0\0\x80")):
        return lzma.open(file)
    return file


def zip_content(archive: zipfile.ZipFile, member: zipfile.ZipInfo, count: int) -> bytes:
    """The first `count` bytes of a zip's entry; all of it, and then checked, where it has fewer.

    Raises ValueError, Excess, or whatever a damaged entry leads its decompressor to.
    """
    claimed = member.file_size
    with _zip_stream(archive, member) as stream:
        unpacked = Unpacked(stream, claimed)
        content = unpacked.take(min(count, claimed))
        if count < claimed:
            return content
        with suppress(EOFError):  # LZMA without the mark of its end, which zip allows
            unpacked.take(1)
    if len(content) < claimed:
        raise ValueError(f"it holds {len(content):,} bytes; its header claims {claimed:,}")
    if zlib.crc32(content) != member.CRC:
        raise ValueError("Bad CRC-32")
    return content


def _zip_stream(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Stream:
    """An entry's content. zipfile itself unpacks bzip2 and LZMA without a limit."""
    if member.compress_type not in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        return archive.open(member)
    packed = copy.copy(member)
    packed.compress_type, packed.file_size = zipfile.ZIP_STORED, member.compress_size
    del packed.CRC  # it is that of the content
    stream = archive.open(packed)
    if member.compress_type == zipfile.ZIP_BZIP2:
        return bz2.open(stream)
    properties, dictionary = struct.unpack("<4xBI", stream.read(9))
    # A dictionary that is larger than the content is of no use, and its memory is taken at once.
    settings = {
        "id": lzma.FILTER_LZMA1,
        "lc": properties % 9,
        "lp": properties // 9 % 5,
        "pb": properties // 45,
        "dict_size": max(_LZMA_LEAST, min(dictionary, member.file_size)),
    }
    return lzma.open(stream, format=lzma.FORMAT_RAW, filters=[settings])
