"""A text for each picture: from captions.jsonl, from a .txt beside it, or from its class."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ddpm_core.data import names
from ddpm_core.data.names import composed
from ddpm_core.data.sources import CAPTIONS, Listing
from ddpm_core.errors import UserError

CAPTION_BYTES = 64


def captions(
    listing: Listing, classes: Sequence[str | None], template: str, notes: list[str]
) -> list[str] | None:
    """A caption for each picture, in this order of preference; None where no picture has one.

    captions.jsonl holds lines {"file": ..., "caption": ...}, the file relative to its own folder.
    A class gives `template` with {class} replaced and underscores as spaces. What is to be told is
    added to `notes`.
    """
    pictures = [composed(entry.name) for entry in listing.pictures]
    lines = _from_lines(listing)
    lost = lines.keys() - set(pictures)
    if lost:
        notes.append(f"{len(lost):,} of the captions in {CAPTIONS} name no picture that is used.")
    written = {**_beside(listing, pictures), **lines}
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


def _from_lines(listing: Listing) -> dict[str, str]:
    found = {}
    for name, text in listing.texts.items():
        folder, slash, file = name.rpartition("/")
        if file == CAPTIONS:
            for number, line in enumerate(text.splitlines(), 1):
                if line.strip():
                    picture, caption = _line(line, f"{names.one_line(name)}, line {number}")
                    found[composed(folder + slash + picture)] = caption
    return found


def _line(line: bytes, where: str) -> tuple[str, str]:
    try:
        value = json.loads(line)
        picture, caption = value["file"], value["caption"]
        if not (isinstance(picture, str) and isinstance(caption, str)):
            raise TypeError
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(
            f'{where}: {{"file": "...", "caption": "..."}} is needed, both of them texts; '
            f"{names.shown(names.from_bytes(line[:80]))!r} was found."
        ) from error
    return picture.removeprefix("./"), " ".join(caption.split())
