"""A text for each image: from a list of captions, from a text file beside it, or its class."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpm_core.config import Prepare
from ddpm_core.data import names
from ddpm_core.data.names import composed
from ddpm_core.data.sources.base import CAPTION_LISTS, CAPTION_SUFFIXES, Listing
from ddpm_core.errors import UserError
from ddpm_core.storage.files import text_of
from ddpm_core.text import counted

CAPTION_BYTES = 64
FILE_NAME = "file_name"  # the key for files in Hugging Face's metadata.jsonl and metadata.csv
OUR_LIST = "captions.jsonl"
OUR_KEYS = ("file", "caption")
SEPARATORS = ",;\t|"


def read_captions(listing: Listing, column: str, notes: list[str]) -> list[str | None]:
    """Return the caption of each image from the files of the source, or None.

    Captions come from a text beside the image; from the column or key `column` of a parquet or
    .json file; from metadata.csv or metadata.jsonl, as in Hugging Face's ImageFolder, with the
    columns "file_name" and `column`; and from captions.jsonl with lines {"file": ..., "caption":
    ...}. If an image has several, the last of these wins. File names in a list are relative to its
    folder. Adds messages for the user to `notes`.

    Raises:
        UserError: a list or text cannot be read, or no list can have the chosen column.
    """
    lists = {name.rpartition("/")[2] for name in listing.texts} & {*CAPTION_LISTS} - {OUR_LIST}
    images = [composed(entry.name) for entry in listing.images]
    pairs = zip(images, listing.images, strict=True)
    stored = {image: entry.caption for image, entry in pairs if entry.caption is not None}
    if column != Prepare().caption_column and not (lists or stored):
        raise UserError(
            f"prepare.caption_column: got {column!r}, but the source has no metadata.csv or "
            "metadata.jsonl with columns to choose from, and no .json file or parquet column with "
            "captions of this name. Remove the setting."
        )
    found = _beside(listing, images) | stored
    # Later lists override earlier ones, and texts beside images.
    for file in CAPTION_LISTS:
        lines = _from_lists(listing, file, column, notes)
        unknown = lines.keys() - set(images)
        if unknown:
            notes.append(
                f"{counted(len(unknown), 'caption')} in {file} ignored: no such image is used."
            )
        found |= lines
    return [found.get(image) for image in images]


def add_class_captions(
    texts: Sequence[str | None], classes: Sequence[str | None], template: str, notes: list[str]
) -> list[str] | None:
    """Return a caption for each image, or None if all would be empty.

    An image without a text gets `template` with {class} replaced by its class, where underscores
    become spaces. An image without text and class gets an empty caption.
    """
    by_class = {name: _class_caption(name, template) for name in set(classes)}
    pairs = zip(texts, classes, strict=True)
    filled = [by_class[name] if text is None else text for text, name in pairs]
    empty = filled.count("")
    if 0 < empty < len(filled):
        notes.append(f"{empty:,} of {len(filled):,} images have no caption.")
    return filled if empty < len(filled) else None


def encode(texts: Sequence[str]) -> NDArray[np.uint8]:
    """Return UTF-8 in uint8 (N, 64), padded with zeros; longer texts are cut between characters."""
    rows = np.zeros((len(texts), CAPTION_BYTES), np.uint8)
    for row, text in zip(rows, texts, strict=True):
        data = text.encode("utf-8", "replace")[:CAPTION_BYTES].decode("utf-8", "ignore").encode()
        row[: len(data)] = np.frombuffer(data, np.uint8)
    return rows


def is_cut(text: str) -> bool:
    """Return whether `encode` cuts a text."""
    return len(text.encode("utf-8", "replace")) > CAPTION_BYTES


def _class_caption(name: str | None, template: str) -> str:
    return "" if name is None else template.replace("{class}", name.replace("_", " "))


def _beside(listing: Listing, images: Sequence[str]) -> dict[str, str]:
    """Return captions from the texts beside images, by image.

    Raises:
        UserError: texts cannot be read; the message has their number and the first reason.
    """
    beside = {
        names.stem(composed(name)): name
        for suffix in reversed(CAPTION_SUFFIXES)
        for name in listing.texts
        if names.suffix(name) == suffix
    }
    found, errors = dict[str, str](), dict[str, UserError]()
    for image in images:
        name = beside.get(names.stem(image))
        if name is None:
            continue
        try:
            found[image] = _one_line(text_of(listing.texts[name], names.one_line(name)))
        except UserError as error:
            errors[name] = error
    if errors:
        count = f"{len(errors):,} captions cannot be read; the first: " if len(errors) > 1 else ""
        raise UserError(f"{count}{errors[min(errors)]}")
    return found


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _from_lists(listing: Listing, file: str, column: str, notes: list[str]) -> dict[str, str]:
    """Return captions by image from the lists of this name in all folders. Raises UserError."""
    found = {}
    for name, data in listing.texts.items():
        folder, slash, last = name.rpartition("/")
        if last == file:
            keys = OUR_KEYS if file == OUR_LIST else (FILE_NAME, column)
            for image, caption in _pairs(names.one_line(name), data, keys, notes):
                found[composed(folder + slash + image)] = caption
    return found


def _pairs(
    name: str, data: bytes, keys: tuple[str, str], notes: list[str]
) -> Iterator[tuple[str, str]]:
    """Yield image and caption of each line or row of a list.

    A metadata file whose first row does not have the keys has another purpose and is ignored,
    unless the user chose the column. Raises UserError.
    """
    rows = _csv_rows(name, data) if name.endswith(".csv") else _json_rows(name, data, keys)
    for count, (where, row) in enumerate(rows):
        # Only the first row decides: a key missing in a later row is a mistake in that row.
        if count == 0 and keys != OUR_KEYS and isinstance(row, dict) and not set(keys) <= {*row}:
            notes.append(_missing_keys(name, keys, list(row)))
            return
        image, caption = [row.get(key) for key in keys] if isinstance(row, dict) else (None, None)
        if not (isinstance(image, str) and isinstance(caption, str)):
            raise UserError(_invalid_row(where, keys, str(row)))
        yield image.removeprefix("./"), _one_line(caption)


def _missing_keys(name: str, keys: tuple[str, str], columns: Sequence[Any]) -> str:
    """Return the note about a metadata file without a key. Raises UserError for a chosen column."""
    missing = " and ".join(key for key in keys if key not in columns)
    shown = names.one_line(", ".join(map(str, columns[:10])))
    if keys[1] != Prepare().caption_column:
        raise UserError(
            f"prepare.caption_column: got {keys[1]!r}, but {name} has no {missing}; its columns "
            f"are {shown}."
        )
    hint = "; to use one for captions, set prepare.caption_column" if FILE_NAME in columns else ""
    return (
        f"{name} has no {missing}, so no captions are read from it. Its columns are {shown}{hint}."
    )


def _json_rows(name: str, data: bytes, keys: Sequence[str]) -> Iterator[tuple[str, Any]]:
    # str.splitlines() would also split at U+2028, which JSON allows inside a string.
    for number, line in enumerate(io.StringIO(text_of(data, name), newline=None), 1):
        where = f"{name}, line {number}"
        try:
            if line.strip():
                yield where, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(_invalid_row(where, keys, line[:80])) from error


def _csv_rows(name: str, data: bytes) -> Iterator[tuple[str, Any]]:
    text, where = _csv_text(name, data), name
    header = text.partition("\n")[0]
    try:
        content = io.StringIO(text, newline="")
        separator = max(SEPARATORS, key=lambda mark: _rank(header, mark))
        reader = csv.DictReader(content, delimiter=separator, skipinitialspace=True, strict=True)
        for row in reader:
            where = f"{name}, line {reader.line_num}"
            yield where, row
    except csv.Error as error:
        raise UserError(f"{where}: invalid CSV: {error}.") from error


def _csv_text(name: str, data: bytes) -> str:
    """Return the text of a CSV file. One that lists no images may have any encoding."""
    try:
        return text_of(data, name)
    except UserError:
        if FILE_NAME in text_of(data.partition(b"\n")[0], name):
            raise
        return data.decode("utf-8", "replace")


def _rank(header: str, separator: str) -> tuple[bool, int]:
    """Rank a separator by whether the header then has a column of files, then by its columns."""
    try:
        columns = next(csv.reader([header], delimiter=separator, skipinitialspace=True), [])
    except csv.Error:
        columns = []
    return FILE_NAME in columns, len(columns)


def _invalid_row(where: str, keys: Sequence[str], found: str) -> str:
    expected = ", ".join(f'"{key}": "..."' for key in keys)
    return f"{where}: got {names.shown(found[:80])!r}; must be {{{expected}}}, both texts."
