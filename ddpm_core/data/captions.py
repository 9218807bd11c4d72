"""A text for each picture: from a file of captions, from a .txt beside it, or from its class."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpm_core.data import names
from ddpm_core.data.names import composed
from ddpm_core.data.sources import CAPTIONS, Listing
from ddpm_core.errors import UserError

CAPTION_BYTES = 64
HUGGING_FACE = ("file_name", "text")  # the keys of its ImageFolder's metadata.jsonl and .csv
OWN = ("file", "caption")  # those of captions.jsonl


def captions(
    listing: Listing, classes: Sequence[str | None], template: str, notes: list[str]
) -> list[str] | None:
    """A caption for each picture, in this order of preference; None where no picture has one.

    captions.jsonl holds lines {"file": ..., "caption": ...}, the file relative to its own folder,
    metadata.jsonl such with "file_name" and "text", metadata.csv columns of these names, as Hugging
    Face's ImageFolder has them. A class gives `template` with {class} replaced and underscores as
    spaces. What is to be told is added to `notes`.
    """
    pictures = [composed(entry.name) for entry in listing.pictures]
    written = _beside(listing, pictures)
    for file in CAPTIONS:
        lines = _from_lines(listing, file, notes)
        lost = lines.keys() - set(pictures)
        if lost:
            notes.append(f"{len(lost):,} of the captions in {file} name no picture that is used.")
        written |= lines
    of_class = {name: _of_class(name, template) for name in set(classes)}
    texts = [
        written.get(picture, of_class[name])
        for picture, name in zip(pictures, classes, strict=True)
    ]
    empty = texts.count("")
    if 0 < empty < len(texts):
        notes.append(f"{empty:,} of {len(texts):,} pictures have no caption.")
    return texts if empty < len(texts) else None


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


def _beside(listing: Listing, pictures: Sequence[str]) -> dict[str, str]:
    texts = {
        names.stem(composed(name)): text
        for name, text in listing.texts.items()
        if names.suffix(name) == "txt"
    }
    return {
        picture: _one_line(texts[stem])
        for picture in pictures
        if (stem := names.stem(picture)) in texts
    }


def _one_line(text: bytes) -> str:
    return " ".join(text.decode("utf-8-sig", "replace").split())


def _from_lines(listing: Listing, file: str, notes: list[str]) -> dict[str, str]:
    """By picture, what files of this name say in any folder. Raises UserError."""
    found = {}
    for name, text in listing.texts.items():
        folder, slash, last = name.rpartition("/")
        if last == file:
            for picture, caption in _pairs(names.one_line(name), text, notes):
                found[composed(folder + slash + picture)] = caption
    return found


def _pairs(name: str, text: bytes, notes: list[str]) -> Iterator[tuple[str, str]]:
    """Picture and caption of each line or row of a file of captions.

    A metadata file that begins without them is one of something else, and passed over.
    """
    keys = OWN if name.endswith("captions.jsonl") else HUGGING_FACE
    rows = _csv_rows(name, text) if name.endswith(".csv") else _json_rows(name, text, keys)
    for count, (where, row) in enumerate(rows):
        if (
            count == 0
            and keys is HUGGING_FACE
            and isinstance(row, dict)
            and not set(keys) <= {*row}
        ):
            notes.append(f"{name} has no {keys[0]} and {keys[1]}, so no captions are read from it.")
            return
        picture, caption = [row.get(key) for key in keys] if isinstance(row, dict) else (None, None)
        if not (isinstance(picture, str) and isinstance(caption, str)):
            raise UserError(_needed(where, keys, str(row)))
        yield picture.removeprefix("./"), " ".join(caption.split())


def _json_rows(name: str, text: bytes, keys: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{name}, line {number}"
        try:
            if line.strip():
                yield where, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(_needed(where, keys, names.from_bytes(line[:80]))) from error


def _csv_rows(name: str, text: bytes) -> Iterator[tuple[str, Any]]:
    where = name
    # Where the columns are others the file is passed over, whatever its encoding.
    errors = "strict" if b"file_name" in text.partition(b"\n")[0] else "replace"
    try:
        content = io.StringIO(text.decode("utf-8-sig", errors), newline="")
        reader = csv.DictReader(content, strict=True)
        for row in reader:
            where = f"{name}, line {reader.line_num}"
            yield where, row
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{where}: no CSV in UTF-8 from here on: {error}.") from error


def _needed(where: str, keys: Sequence[str], found: str) -> str:
    wanted = ", ".join(f'"{key}": "..."' for key in keys)
    shown = names.shown(found[:80])
    return f"{where}: {{{wanted}}} is needed, both of them texts; {shown!r} was found."
