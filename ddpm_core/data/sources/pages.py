"""The sizes of the pages in a parquet file, read from their headers before anything is unpacked.

pyarrow allocates what a page header claims, up to 2 GiB for a few bytes, and the sizes in the
footer may be false. Page headers are structs in Thrift's compact protocol:
https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

_HEADER, _LARGEST_HEADER = 2**14, 2**24  # bytes; pyarrow reads at most 16 MiB too
_DEPTH = 16
_UNPACKED_SIZE, _PACKED_SIZE = 2, 3  # numbers of fields
_STOP, _TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(
    13
)


def page_sizes(file: BinaryIO, start: int, length: int) -> Iterator[int]:
    """Yield the unpacked size of each page in `length` bytes from `start` on.

    Raises:
        ValueError: a header is damaged.
    """
    position = start
    if start < 0 or length < 0:
        raise ValueError(f"a column of {length:,} bytes at byte {start:,}")
    while position < start + length:
        fields, size = _header(file, position)
        unpacked, packed = fields.get(_UNPACKED_SIZE, -1), fields.get(_PACKED_SIZE, -1)
        if unpacked < 0 or packed < 0:
            raise ValueError(f"the page at byte {position:,} has no valid sizes")
        yield unpacked
        position += size + packed


def _header(file: BinaryIO, position: int) -> tuple[dict[int, int], int]:
    """Return the whole numbers in a page header by field, and the size of the header."""
    for most in (_HEADER, _LARGEST_HEADER):
        file.seek(position)
        data = file.read(most)
        reader = _Compact(data)
        try:
            return reader.struct(), reader.position
        except IndexError:
            if len(data) < most:
                break
    raise ValueError(f"the page at byte {position:,} has no complete header")


class _Compact:
    """Reads one struct. Raises IndexError at the end of the data, and ValueError."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.position = 0

    def struct(self, depth: int = 0) -> dict[int, int]:
        """Return the 32-bit integers of a struct by their field; skip all other fields."""
        found: dict[int, int] = {}
        field = 0
        while (start := self._byte()) & 15 != _STOP:
            kind, step = start & 15, start >> 4
            field = field + step if step else _signed(self._varint())
            if kind == _I32:
                found[field] = _signed(self._varint())
            elif kind not in (_TRUE, _FALSE):  # their value is in the type
                self._skip(kind, depth + 1)
        return found

    def _skip(self, kind: int, depth: int) -> None:
        if depth > _DEPTH:
            raise ValueError("a page header that is nested too deeply")
        if kind in (_TRUE, _FALSE, _BYTE):
            self._byte()
        elif kind in (_I16, _I32, _I64):
            self._varint()
        elif kind == _DOUBLE:
            self.position += 8
        elif kind == _BINARY:
            length = self._varint()  # advances the position, so it must be read before
            self.position += length
        elif kind == _STRUCT:
            self.struct(depth)
        elif kind in (_LIST, _SET):
            start = self._byte()
            count = start >> 4 if start >> 4 < 15 else self._varint()
            for _ in range(count):
                self._skip(start & 15, depth + 1)
        elif kind == _MAP:
            count = self._varint()
            kinds = self._byte() if count else 0
            for _ in range(count):
                self._skip(kinds >> 4, depth + 1)
                self._skip(kinds & 15, depth + 1)
        else:
            raise ValueError(f"a page header with a field of the unknown type {kind}")

    def _byte(self) -> int:
        value = self._data[self.position]
        self.position += 1
        return value

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            part = self._byte()
            value |= (part & 127) << shift
            if part < 128:
                return value
        raise ValueError("a page header with a number of more than 10 bytes")


def _signed(value: int) -> int:
    """Return the 32-bit integer that a varint encodes, as Thrift reads it."""
    value &= 0xFFFFFFFF
    return (value >> 1) ^ -(value & 1)
