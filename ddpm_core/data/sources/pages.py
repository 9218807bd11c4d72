"""Where the columns of a parquet file are, and the sizes of their pages, before pyarrow reads any.

pyarrow allocates what a page header claims, up to 2 GiB for a few bytes, and the sizes in the
footer may be false. It also aborts the process when its metadata classes meet some damaged footers.
Footer and page headers are structs in Thrift's compact protocol:
https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md
https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

_HEADER, _LARGEST_HEADER = 2**14, 2**24  # bytes; pyarrow reads at most 16 MiB too
_DEPTH = 16
_STOP, _TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(
    13
)

# The fields to read of a struct, by number: the type, and the fields of the structs in it.
Fields = Mapping[int, tuple[int, Any]]
_ROWS, _COLUMNS, _FACTS = 3, 1, 3
_PACKED_LENGTH, _DATA_START, _DICTIONARY_START = 7, 9, 11
_CHUNK: Fields = {
    _PACKED_LENGTH: (_I64, {}),
    _DATA_START: (_I64, {}),
    _DICTIONARY_START: (_I64, {}),
}
_GROUP: Fields = {_ROWS: (_I64, {}), _COLUMNS: (_LIST, {_FACTS: (_STRUCT, _CHUNK)})}
_GROUPS = 4
_FOOTER: Fields = {_GROUPS: (_LIST, _GROUP)}
_UNPACKED_SIZE, _PACKED_SIZE = 2, 3
_PAGE: Fields = {_UNPACKED_SIZE: (_I32, {}), _PACKED_SIZE: (_I32, {})}


class RowGroup(NamedTuple):
    """The number of rows, and for each column the first byte and the length of its pages."""

    rows: int
    columns: list[tuple[int, int]]


def row_groups(footer: bytes) -> list[RowGroup]:
    """Return the row groups that a footer lists. Raises ValueError if it is damaged."""
    try:
        found = _Compact(footer).struct(_FOOTER).get(_GROUPS, [])
        return [
            RowGroup(_natural(group[_ROWS]), [_place(column) for column in group[_COLUMNS]])
            for group in found
        ]
    except (IndexError, KeyError) as error:
        raise ValueError("its footer is damaged") from error


def _place(column: dict[int, Any]) -> tuple[int, int]:
    facts = column[_FACTS]
    start, dictionary = facts[_DATA_START], facts.get(_DICTIONARY_START, 0)
    start = dictionary if 0 < dictionary < start else start  # as pyarrow does
    return _natural(start), _natural(facts[_PACKED_LENGTH])


def _natural(value: int) -> int:
    if value < 0:
        raise ValueError(f"its footer has the negative number {value:,}")
    return value


def page_sizes(file: BinaryIO, start: int, length: int) -> Iterator[int]:
    """Yield the unpacked size of each page in `length` bytes from `start` on.

    Raises:
        ValueError: a header is damaged.
    """
    position = start
    while position < start + length:
        page, size = _header(file, position)
        unpacked, packed = page.get(_UNPACKED_SIZE, -1), page.get(_PACKED_SIZE, -1)
        if unpacked < 0 or packed < 0:
            raise ValueError(f"the page at byte {position:,} has no valid sizes")
        yield unpacked
        position += size + packed


def _header(file: BinaryIO, position: int) -> tuple[dict[int, Any], int]:
    """Return the sizes in a page header by field, and the size of the header."""
    for most in (_HEADER, _LARGEST_HEADER):
        file.seek(position)
        data = file.read(most)
        reader = _Compact(data)
        try:
            return reader.struct(_PAGE), reader.position
        except IndexError:
            if len(data) < most:
                break
    raise ValueError(f"the page at byte {position:,} has no complete header")


class _Compact:
    """Reads a struct. Raises IndexError at the end of the data, and ValueError."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.position = 0

    def struct(self, fields: Fields, depth: int = 0) -> dict[int, Any]:
        """Return the values of some fields; skip those of other numbers or types, like pyarrow."""
        found: dict[int, Any] = {}
        number = 0
        while (start := self._byte()) & 15 != _STOP:
            kind, step = start & 15, start >> 4
            number = number + step if step else _signed(self._varint(), 32)
            wanted, inner = fields.get(number, (None, {}))
            if kind in (_TRUE, _FALSE):  # their value is in the type
                continue
            value = self._value(kind, inner, depth + 1)
            if kind == wanted:
                found[number] = value
        return found

    def _value(self, kind: int, fields: Fields, depth: int) -> Any:
        """Return an integer, a struct, or a list of structs. Skip all else, and return None."""
        if depth > _DEPTH:
            raise ValueError("metadata that are nested too deeply")
        if kind in (_I16, _I32, _I64):
            return _signed(self._varint(), 64 if kind == _I64 else 32)
        if kind == _STRUCT:
            return self.struct(fields, depth)
        if kind in (_LIST, _SET):
            return self._list(fields, depth)
        if kind in (_TRUE, _FALSE, _BYTE):
            self._byte()
        elif kind == _DOUBLE:
            self.position += 8
        elif kind == _BINARY:
            length = self._varint()  # advances the position, so it must be read before
            self.position += length
        elif kind == _MAP:
            count = self._varint()
            kinds = self._byte() if count else 0
            for _ in range(count):
                self._value(kinds >> 4, {}, depth + 1)
                self._value(kinds & 15, {}, depth + 1)
        else:
            raise ValueError(f"metadata with the unknown type {kind}")
        return None

    def _list(self, fields: Fields, depth: int) -> list[Any]:
        start = self._byte()
        kind, count = start & 15, start >> 4
        count = count if count < 15 else self._varint()
        if fields and kind != _STRUCT and count:
            raise ValueError(f"metadata with a list of type {kind} instead of structs")
        found = []
        for _ in range(count):
            value = self._value(kind, fields, depth + 1)
            if fields:
                found.append(value)
        return found

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
        raise ValueError("metadata with a number of more than 10 bytes")


def _signed(value: int, bits: int) -> int:
    """Return the integer that a varint encodes, with as many bits as Thrift keeps."""
    value &= 2**bits - 1
    return (value >> 1) ^ -(value & 1)
