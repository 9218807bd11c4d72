"""A text for each image: from a list of captions, from a text beside it, or from its class."""

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
from ddpm_core.data.sources.base import CAPTION_SUFFIXES, CAPTIONS, Listing
from ddpm_core.errors import UserError
from ddpm_core.storage.files import text_of

CAPTION_BYTES = 64
FILE_NAME = "file_name"  # the key of Hugging Face's ImageFolder in metadata.jsonl and .csv
OWN_LIST = "captions.jsonl"
OWN = ("file", "caption")  # its keys
SEPARATORS = ",;\t|"


def written(listing: Listing, column: str, notes: list[str]) -> list[str | None]:
    """Return the caption that files give each image, or None.

    Of several the last counts: a text beside the image; metadata.csv and metadata.jsonl, as Hugging
    Face's ImageFolder has them, with the columns "file_name" and `column`; captions.jsonl with
    lines {"file": ..., "caption": ...}. Files are named relative to the folder of the list.
    Messages for the user go to `notes`. Raises UserError for a list or text that can't be read.
    """
    lists = {name.rpartition("/")[2] for name in listing.texts} & {*CAPTIONS} - {OWN_LIST}
    if column != Prepare().caption_column and not lists:
        raise UserError(
            f"prepare.caption_column: got {column!r}, but the source has no metadata.csv or "
            "metadata.jsonl with columns to choose from. Leave the setting out."
        )
    images = [composed(entry.name) for entry in listing.pictures]
    found = _beside(listing, images)
    for file in CAPTIONS:
        lines = _from_lists(listing, file, column, notes)
        unknown = lines.keys() - set(images)
        if unknown:
            notes.append(f"{len(unknown):,} of the captions in {file} name no image that is used.")
        found |= lines
    return [found.get(image) for image in images]


def captions(
    texts: Sequence[str | None], classes: Sequence[str | None], template: str, notes: list[str]
) -> list[str] | None:
    """Return a caption for each image: the written one, or else `template` with its class in the
    place of {class}, underscores as spaces. Returns None if no image has one."""
    of_class = {name: _of_class(name, template) for name in set(classes)}
    pairs = zip(texts, classes, strict=True)
    filled = [of_class[name] if text is None else text for text, name in pairs]
    empty = filled.count("")
    if 0 < empty < len(filled):
        notes.append(f"{empty:,} of {len(filled):,} images have no caption.")
    return filled if empty < len(filled) else None


def encode(texts: Sequence[str]) -> NDArray[np.uint8]:
    """UTF-8 in (N, 64) bytes padded with zeros, cut between characters where it is longer."""
    rows = np.zeros((len(texts), CAPTION_BYTES), np.uint8)
    for row, text in zip(rows, texts, strict=True):
        data = text.encode("utf-8", "replace")[:CAPTION_BYTES].decode("utf-8", "ignore").encode()
        row[: len(data)] = np.frombuffer(data, np.uint8)
    return rows


def is_cut(text: str) -> bool:
    return len(text.encode("utf-8", "replace")) > CAPTION_BYTES


def _of_class(name: str | None, template: str) -> str:
    return "" if name is None else template.replace("{class}", name.replace("_", " "))


def _beside(listing: Listing, images: Sequence[str]) -> dict[str, str]:
    """Captions from the texts beside images, by image. Raises UserError, which counts the texts
    that can't be read."""
    beside = {
        names.stem(composed(name)): name
        for suffix in reversed(CAPTION_SUFFIXES)
        for name in listing.texts
        if names.suffix(name) == suffix
    }
    found, wrong = dict[str, str](), dict[str, UserError]()
    for image in images:
        name = beside.get(names.stem(image))
        if name is None:
            continue
        try:
            found[image] = _one_line(text_of(listing.texts[name], names.one_line(name)))
        except UserError as error:
            wrong[name] = error
    if wrong:
        many = f"{len(wrong):,} captions cannot be read; the first: " if len(wrong) > 1 else ""
        raise UserError(f"{many}{wrong[min(wrong)]}")
    return found


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _from_lists(listing: Listing, file: str, column: str, notes: list[str]) -> dict[str, str]:
    """Return by image what the lists of this name in all folders say. Raises UserError."""
    found = {}
    for name, data in listing.texts.items():
        folder, slash, last = name.rpartition("/")
        if last == file:
            keys = OWN if file == OWN_LIST else (FILE_NAME, column)
            for image, caption in _pairs(names.one_line(name), data, keys, notes):
                found[composed(folder + slash + image)] = caption
    return found


def _pairs(
    name: str, data: bytes, keys: tuple[str, str], notes: list[str]
) -> Iterator[tuple[str, str]]:
    """Yield image and caption of each line or row of a list.

    A metadata file whose first row lacks the keys describes something else and is passed over,
    unless the user chose the column.
    """
    rows = _csv_rows(name, data) if name.endswith(".csv") else _json_rows(name, data, keys)
    for count, (where, row) in enumerate(rows):
        if count == 0 and keys != OWN and isinstance(row, dict) and not set(keys) <= {*row}:
            notes.append(_without(name, keys, list(row)))
            return
        image, caption = [row.get(key) for key in keys] if isinstance(row, dict) else (None, None)
        if not (isinstance(image, str) and isinstance(caption, str)):
            raise UserError(_needed(where, keys, str(row)))
        yield image.removeprefix("./"), _one_line(caption)


def _without(name: str, keys: tuple[str, str], columns: Sequence[Any]) -> str:
    """Return the note about a metadata file without a key. Raises UserError for a chosen column."""
    missing = " and ".join(key for key in keys if key not in columns)
    shown = names.one_line(", ".join(map(str, columns[:10])))
    if keys[1] != Prepare().caption_column:
        raise UserError(
            f"prepare.caption_column: got {keys[1]!r}, but {name} has no {missing}; its columns "
            f"are {shown}."
        )
    how = "; to use one as captions, set prepare.caption_column" if FILE_NAME in columns else ""
    return (
        f"{name} has no {missing}, so no captions are read from it. Its columns are {shown}{how}."
    )


def _json_rows(name: str, data: bytes, keys: Sequence[str]) -> Iterator[tuple[str, Any]]:
    # splitlines() would also split at U+2028, which may be part of a JSON text.
    for number, line in enumerate(io.StringIO(text_of(data, name), newline=None), 1):
        where = f"{name}, line {number}"
        try:
            if line.strip():
                yield where, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(_needed(where, keys, line[:80])) from error


def _csv_rows(name: str, data: bytes) -> Iterator[tuple[str, Any]]:
    text, where = _csv_text(name, data), name
    header = text.partition("\n")[0]
    try:
        content = io.StringIO(text, newline="")
        separator = max(SEPARATORS, key=lambda mark: _weigh(header, mark))
        reader = csv.DictReader(content, delimiter=separator, skipinitialspace=True, strict=True)
        for row in reader:
            where = f"{name}, line {reader.line_num}"
            yield where, row
    except csv.Error as error:
        raise UserError(f"{where}: not CSV from here on: {error}.") from error


def _csv_text(name: str, data: bytes) -> str:
    """Return the text of a CSV file; of one that lists no images whatever its encoding."""
    try:
        return text_of(data, name)
    except UserError:
        if FILE_NAME in text_of(data.partition(b"\n")[0], name):
            raise
        return data.decode("utf-8", "replace")


def _weigh(header: str, separator: str) -> tuple[bool, int]:
    """Order separators: the one that gives the column of files, then the one of most columns."""
    try:
        columns = next(csv.reader([header], delimiter=separator, skipinitialspace=True), [])
    except csv.Error:
        columns = []
    return FILE_NAME in columns, len(columns)


def _needed(where: str, keys: Sequence[str], found: str) -> str:
    wanted = ", ".join(f'"{key}": "..."' for key in keys)
    shown = names.shown(found[:80])
    return f"{where}: {{{wanted}}} is needed, both of them texts; {shown!r} was found."
