"""Images in the rows of a parquet file, as Hugging Face stores data sets.

A stranger's file may unpack to terabytes. The header of every page is checked before pyarrow reads
it, and rows are read in batches that fit in memory even if each is as large as the largest page.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ddpm_core.data.names import one_line
from ddpm_core.data.sources.base import Entry, Listing, Payload, Rejection, size_problem
from ddpm_core.data.sources.limits import entries_limit, file_facts, unpacked_limit, user_errors
from ddpm_core.data.sources.pages import RowGroup, page_sizes, row_groups
from ddpm_core.data.sources.sidecars import FIND, LABEL, Columns, caption_text, class_text
from ddpm_core.data.sources.unpacking import Excess
from ddpm_core.errors import UserError, require

_MARK = b"PAR1"
# Objects made from the footer take up to 200 times its size.
FOOTER_SHARE, FOOTER_FLOOR = 8, 2**21  # at most 1 / FOOTER_SHARE of the file + FOOTER_FLOOR bytes
FOOTER_BYTES = 2**25  # and at most so many
_BUFFER = 2**20  # bytes read at once
_BATCH_BYTES, _BATCH_ROWS = 2**26, 256
_SHOWN = 20  # columns in a message
_CONTENT = {"image": "encoded images", "label": "numbers or text", "caption": "text"}


class _Chosen(NamedTuple):
    """The columns that are read. `image` is the path of the bytes, such as img.bytes."""

    image: str
    label: str | None
    names: list[Any] | None  # of the classes, by label
    caption: str | None


class _Opened(NamedTuple):
    """A file that pyarrow has opened, and its row groups."""

    reader: Any
    groups: list[RowGroup]


class Parquet:
    """The images of a parquet file."""

    def __init__(self, path: Path, uri: str, columns: Columns = FIND) -> None:
        self.facts = file_facts(path, uri)
        self._uri, self._path, self._columns = uri, path, columns

    def listing(self) -> Listing:
        """Return the rows as images, with their class and caption. Raises UserError."""
        with self._user_errors(), self._opened() as file:
            schema = file.reader.schema_arrow
            chosen, notes = self._choose(schema)
            count = sum(group.rows for group in file.groups)
            if count > entries_limit(self._path):
                raise Excess(f"has {count:,} rows")
            unpacked, _ = self._page_sizes(file, [chosen.image])
            size = unpacked // max(1, count)
            facts = zip(range(count), self._facts(file, chosen), strict=False)
            return Listing(
                images=[Entry(f"{row:08d}", size, row, *found) for row, found in facts],
                notes=notes,
                columns=set(schema.names),
            )

    def read(self, entries: Sequence[Entry]) -> Iterator[tuple[int, Payload]]:
        """Yield encoded images in the order of the file."""
        positions = {entry.ref: position for position, entry in enumerate(entries)}
        with self._user_errors(), self._opened() as file:
            image = self._choose(file.reader.schema_arrow)[0].image
            for start, columns in self._batches(file, [image], lambda row: row in positions):
                (column,) = columns.values()
                for row, value in enumerate(column, start):
                    position = positions.get(row)
                    if position is not None:
                        yield position, _payload(entries[position].name, value)

    def _facts(self, file: _Opened, chosen: _Chosen) -> Iterator[tuple[str | None, str | None]]:
        """Yield class and caption of each row."""
        paths = [path for path in (chosen.label, chosen.caption) if path]
        if not paths:
            while True:
                yield None, None
        for start, columns in self._batches(file, paths, lambda row: True):
            # pyarrow returns columns in the order of the file.
            rows = zip(*(columns[path].to_pylist() for path in paths), strict=True)
            for row, values in enumerate(rows, start):
                label = _class(values[0], chosen.names, row) if chosen.label else None
                yield label, caption_text(values[-1]) if chosen.caption else None

    def _batches(
        self, file: _Opened, paths: Sequence[str], wanted: Callable[[int], bool]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the number of the first row, and the columns by name, of batches of rows.

        Row groups without a wanted row are skipped.
        """
        largest = self._page_sizes(file, paths)[1]
        # No value is larger than its page, but a page may repeat one of its dictionary.
        rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(1, largest)))
        start, unpacked = 0, 0
        for number, group in enumerate(file.groups):
            end = start + group.rows
            if any(map(wanted, range(start, end))):
                found = file.reader.iter_batches(rows, [number], list(paths), use_threads=False)
                for batch in found:
                    leaves = map(_leaf, batch.columns)
                    columns = dict(zip(batch.schema.names, leaves, strict=True))
                    unpacked += sum(column.nbytes for column in columns.values())
                    self._check_unpacked(unpacked)
                    yield start, columns
                    start += batch.num_rows
                if start != end:
                    raise ValueError(f"row group {number} ends at row {start:,} instead of {end:,}")
            start = end

    def _page_sizes(self, file: _Opened, paths: Sequence[str]) -> tuple[int, int]:
        """Return the unpacked bytes of all pages of some columns, and of the largest."""
        total = largest = 0
        schema = file.reader.schema
        leaves = [n for n in range(len(schema)) if schema.column(n).path in paths]
        with self._path.open("rb") as raw:
            for group in file.groups:
                if len(group.columns) != len(schema):
                    raise ValueError(f"a row group has {len(group.columns):,} columns")
                for leaf in leaves:
                    for size in page_sizes(raw, *group.columns[leaf]):
                        total, largest = total + size, max(largest, size)
                        self._check_unpacked(total)
        return total, largest

    def _check_unpacked(self, count: int) -> None:
        limit = unpacked_limit(self._path)
        if count > limit:
            raise Excess(f"unpacks to more than {limit:,} bytes")

    def _choose(self, schema: Any) -> tuple[_Chosen, list[str]]:
        """Return the columns to read, and messages for the user. Raises UserError."""
        features = _features(schema)
        image = self._image(schema, features)
        label, notes = self._label(schema, features)
        caption = self._named(schema, "caption", _is_text)
        read = [f"images from {_shown(image)}"]
        read += [f"classes from {_shown(label)}"] if label else []
        read += [f"captions from {_shown(caption)}"] if caption else []
        others = [_shown(name) for name in schema.names if name not in (image, label, caption)]
        unread = f"; not read: {', '.join(others[:_SHOWN])}" if others else ""
        notes.insert(0, f"Columns of the parquet file: {', '.join(read)}{unread}.")
        binary = _is_binary(schema.field(image).type)
        class_names = features.get(label, {}).get("names") if label else None
        if not isinstance(class_names, list):
            class_names = None
        return _Chosen(image if binary else f"{image}.bytes", label, class_names, caption), notes

    def _image(self, schema: Any, features: dict[str, Any]) -> str:
        """Return the column with the images. Raises UserError."""
        if named := self._named(schema, "image", _is_image):
            return named
        usable = [field.name for field in schema if _is_image(field.type)]
        declared = [name for name in usable if features.get(name, {}).get("_type") == "Image"]
        found: list[str] = declared or usable
        if len(found) == 1:
            return found[0]
        if found:
            raise UserError(
                f"{self._uri} has several columns with images: {', '.join(map(_shown, found))}. "
                "Set prepare.image_column to one of them."
            )
        raise UserError(
            f"{self._uri} has no column with images; its columns are {_columns_text(schema)}. "
            "Images must be encoded, such as JPEG or PNG, in a binary column or a struct of bytes "
            "and path, as Hugging Face's datasets writes them. Use a file with such a column."
        )

    def _label(self, schema: Any, features: dict[str, Any]) -> tuple[str | None, list[str]]:
        """Return the column with the classes, if any, and messages for the user."""
        if named := self._named(schema, "label", _is_label):
            return named, []
        usable = [field.name for field in schema if _is_label(field.type)]
        found = [name for name in usable if features.get(name, {}).get("_type") == "ClassLabel"]
        if LABEL in usable or len(found) == 1:
            return (LABEL if LABEL in usable else found[0]), []
        if found:
            return None, [
                f"Several columns have classes: {', '.join(map(_shown, found[:_SHOWN]))}. None is "
                "used; to use one, set prepare.label_column."
            ]
        return None, []

    def _named(self, schema: Any, kind: str, fits: Callable[[Any], bool]) -> str | None:
        """Return the column that a setting names, or None if it names none.

        A column that only the default names may be missing. Raises UserError.
        """
        name = getattr(self._columns, kind)
        usable = [field.name for field in schema if fits(field.type)]
        if name in usable or name == getattr(FIND, kind):
            return name if name in usable else None
        raise UserError(
            f"prepare.{kind}_column: got {name!r}; must be a column of {self._uri} with "
            f"{_CONTENT[kind]}. Its columns are {_columns_text(schema)}."
        )

    @contextmanager
    def _opened(self) -> Iterator[_Opened]:
        """Open the file with pyarrow, unless its footer is too large."""
        groups = self._groups()
        # Without pre_buffer, and with a buffer, pages are read one by one, not by column.
        with require("pyarrow.parquet", "parquet").ParquetFile(
            self._path, buffer_size=_BUFFER, pre_buffer=False, page_checksum_verification=True
        ) as reader:
            yield _Opened(reader, groups)

    def _groups(self) -> list[RowGroup]:
        """Return the row groups of the file. Raises Excess if its footer is too large."""
        size = self._path.stat().st_size
        limit = min(FOOTER_BYTES, size // FOOTER_SHARE + FOOTER_FLOOR)
        with self._path.open("rb") as raw:
            raw.seek(max(0, size - 8))
            end = raw.read(8)
            footer = int.from_bytes(end[:4], "little")
            if not end.endswith(_MARK) or footer > size - 12:
                raise ValueError("it has no footer, so it is incomplete or encrypted")
            if footer > limit:
                raise Excess(f"has a footer of {footer:,} bytes; at most {limit:,} are read")
            raw.seek(size - 8 - footer)
            groups = row_groups(raw.read(footer))
        # Columns that share bytes could unpack them without end.
        if sum(length for group in groups for _, length in group.columns) > size:
            raise ValueError("its columns are larger than the file")
        return groups

    def _user_errors(self) -> AbstractContextManager[None]:
        return user_errors(self._uri, "parquet file", "use image files in a directory")


def is_parquet(path: Path) -> bool:
    """Return whether a file begins like a parquet file."""
    with path.open("rb") as file:
        return file.read(len(_MARK)) == _MARK


def _payload(name: str, value: Any) -> Payload:
    content = value.as_py()
    if content is None:
        return Rejection(name, "no bytes; images are read from the file itself, not from paths")
    problem = size_problem(len(content))
    return Rejection(name, problem) if problem else bytes(content)


def _leaf(column: Any) -> Any:
    """Return a column, or the only field of a struct, as plain values.

    A dictionary's values are repeated for each row, because `nbytes` would count them only once.
    """
    values = column.flatten()[0] if _types().is_struct(column.type) else column
    return values.dictionary_decode() if _types().is_dictionary(values.type) else values


def _class(value: Any, class_names: list[Any] | None, row: int) -> str | None:
    """Return the class of a label. -1 means none, as in test sets of Hugging Face."""
    if class_names is None or not isinstance(value, int):
        return class_text(value)
    if not -1 <= value < len(class_names):
        raise ValueError(f"label {value} in row {row:,}; it names {len(class_names):,} classes")
    return None if value == -1 else class_text(class_names[value]) or str(value)


def _features(schema: Any) -> dict[str, dict[str, Any]]:
    """Return the features of each column that Hugging Face's datasets wrote into the schema."""
    try:
        found = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {name: value for name, value in found.items() if isinstance(value, dict)}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}


def _types() -> Any:
    return require("pyarrow", "parquet").types


def _plain(kind: Any) -> Any:
    """Return the type of the values of a dictionary, which pandas writes for categories."""
    return kind.value_type if _types().is_dictionary(kind) else kind


def _is_binary(kind: Any) -> bool:
    plain = _plain(kind)
    return bool(_types().is_binary(plain) or _types().is_large_binary(plain))


def _is_image(kind: Any) -> bool:
    if not _types().is_struct(kind):
        return _is_binary(kind)
    return any(field.name == "bytes" and _is_binary(field.type) for field in kind)


def _is_text(kind: Any) -> bool:
    plain = _plain(kind)
    return bool(_types().is_string(plain) or _types().is_large_string(plain))


def _is_label(kind: Any) -> bool:
    return bool(_is_text(kind) or _types().is_integer(_plain(kind)))


def _columns_text(schema: Any) -> str:
    shown = [f"{_shown(field.name)} ({field.type!s:.60})" for field in schema][:_SHOWN]
    return ", ".join(shown) + (" ..." if len(schema) > _SHOWN else "")


def _shown(name: str) -> str:
    return one_line(name[:80])
