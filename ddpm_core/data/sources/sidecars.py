"""Classes and captions that a source stores in columns, or in .json files beside its images."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ddpm_core.data import names

LABEL = "label"  # the column or key of the class, unless prepare.label_column names another
SIDECAR_BYTES = 2**20  # of a .json file beside an image; larger ones are ignored
LABEL_LIST = "dataset.json"  # the labels of all images, as EDM and StyleGAN write them
LABEL_LIST_BYTES = 2**26  # Python objects take ten times as many


class Columns(NamedTuple):
    """Where parquet and .json files have image, class and caption. None: find the column."""

    image: str | None = None
    label: str | None = None
    caption: str = "text"


FIND = Columns()


class Facts(NamedTuple):
    """What a .json file says about an image."""

    class_name: str | None = None
    caption: str | None = None


def class_text(value: object) -> str | None:
    """Return the class that a label of an untrusted file names, or None.

    Whole numbers are classes too. Half a surrogate pair, which JSON may contain, is replaced.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return (_text(value) or None) if isinstance(value, str) else None


def caption_text(value: object) -> str | None:
    """Return a caption of an untrusted file on one line, or None if it is no text."""
    return _text(value) if isinstance(value, str) else None


def _text(value: str) -> str:
    return " ".join(value.encode("utf-8", "replace").decode().split())


@dataclass(slots=True)
class Sidecars:
    """The facts in the .json files of a source, by the name of the image without extension."""

    columns: Columns
    used: set[str] = field(default_factory=set)  # names of the files with facts
    unlabelled: bool = False  # a list says that the images have no classes
    _facts: dict[str, Facts] = field(default_factory=dict)

    def read(self, name: str, content: bytes) -> None:
        """Keep the facts in a .json file. One with other content has another purpose."""
        try:
            value = json.loads(content)
        except (ValueError, RecursionError):
            return
        folder, slash, file = name.rpartition("/")
        found = (
            _label_list(value, folder + slash)
            if file == LABEL_LIST
            else {names.stem(name): self._about(value)}
        )
        kept = {image: facts for image, facts in found.items() if facts != Facts()}
        self._facts |= kept
        unlabelled = file == LABEL_LIST and value == {"labels": None}
        self.unlabelled |= unlabelled
        self.used |= {name} if kept or unlabelled else set()

    def of(self, image: str) -> Facts:
        """Return the facts about an image."""
        return self._facts.get(names.stem(image), Facts())

    def _about(self, value: Any) -> Facts:
        if not isinstance(value, dict):
            return Facts()
        label = value.get(self.columns.label or LABEL)
        return Facts(class_text(label), caption_text(value.get(self.columns.caption)))


def limit_of(name: str) -> int:
    """Return the most bytes of a .json file that are read."""
    return LABEL_LIST_BYTES if name.rpartition("/")[2] == LABEL_LIST else SIDECAR_BYTES


def _label_list(value: Any, folder: str) -> dict[str, Facts]:
    """Return the labels in {"labels": [["00000/img00000000.png", 6], ...]}."""
    rows = value.get("labels") if isinstance(value, dict) else None
    return {
        names.stem(folder + row[0]): Facts(class_text(row[1]))
        for row in (rows if isinstance(rows, list) else ())
        if isinstance(row, list) and len(row) == 2 and isinstance(row[0], str)
    }
