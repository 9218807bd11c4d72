"""From decoded squares to the files of data/: splits, classes, arrays, contact sheet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpm_core.data import contact, names
from ddpm_core.data.arrays import Scratch, fingerprint, new_digest, write_rows
from ddpm_core.data.captions import encode, is_cut
from ddpm_core.data.dataset import PREFIX
from ddpm_core.data.split import duplicates, hold_out
from ddpm_core.storage.workspace import CONTACT

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pictures:
    """The usable pictures, in the order of their names. `positions` are those in the scratch."""

    positions: Indices
    digests: list[bytes]
    classes: list[str | None]
    held_out: list[bool | None]
    captions: list[str] | None
    gray: bool


def pack(
    folder: Path,
    scratch: Scratch,
    pictures: Pictures,
    fraction: float,
    channels: int,
) -> tuple[dict[str, Any], list[str]]:
    """Write the arrays and the contact sheet; what the manifest says of them, and what to tell."""
    held = hold_out(pictures.digests, pictures.classes, pictures.held_out, fraction)
    classes = class_names(pictures.classes, held)
    notes = []
    untrained = sorted(set(pictures.classes) - {None} - set(classes), key=str)
    for name in untrained:
        notes.append(f"The class {name} has no pictures for training; its others are left out.")
    numbers = {name: number for number, name in enumerate(classes)}
    known = np.array([not classes or name in numbers for name in pictures.classes], dtype=bool)
    labels = np.array([numbers.get(str(name), 0) for name in pictures.classes], dtype=np.int64)
    writer = _Writer(folder, scratch, pictures, labels, classes, channels)
    writer.split("train", np.flatnonzero(~held & known))
    writer.split("holdout", np.flatnonzero(held & known))
    facts = {
        "image_size": scratch.shape[0],
        "channels": channels,
        "classes": classes,
        "duplicates": duplicates(pictures.digests, held),
        **writer.facts,
    }
    return facts, notes + _told(facts, pictures)


def class_names(classes: Sequence[str | None], held: NDArray[np.bool_]) -> list[str]:
    """The classes that training sees, sorted by the bytes of their names."""
    seen = {name for name, out in zip(classes, held, strict=True) if name is not None and not out}
    return sorted(seen, key=names.to_bytes)


class _Writer:
    """Writes one split after the other and gathers what the manifest says of them."""

    def __init__(
        self,
        folder: Path,
        scratch: Scratch,
        pictures: Pictures,
        labels: Indices,
        classes: list[str],
        channels: int,
    ) -> None:
        self.folder, self.scratch, self.pictures = folder, scratch, pictures
        self.labels, self.classes, self.channels = labels, classes, channels
        self.facts: dict[str, Any] = {"arrays": {}}

    def split(self, name: str, chosen: Indices) -> None:
        """Images, labels and captions of the chosen pictures; `chosen` is ascending."""
        prefix, size = PREFIX[name], self.scratch.shape[0]
        shape = (len(chosen), size, size, self.channels)
        digest = new_digest(shape, self.classes)
        blocks = self.scratch.read(self.pictures.positions[chosen])
        # Every picture of a single channel that was kept as three has three equal ones.
        narrowed = (block[..., : self.channels] for block in blocks)
        self._write(prefix + "images", narrowed, shape, digest)
        labels = self.labels[chosen]
        self._write(prefix + "labels", [labels], labels.shape, digest)
        if self.pictures.captions is not None:
            rows = encode([self.pictures.captions[index] for index in chosen])
            self._write(prefix + "captions", [rows], rows.shape, digest)
        counts = Counter(labels.tolist()) if self.classes else Counter[int]()
        self.facts[prefix + "count"] = len(chosen)
        self.facts[prefix + "class_counts"] = [counts[n] for n in range(len(self.classes))]
        self.facts[prefix + "fingerprint"] = fingerprint(digest)
        if name == "train":
            self._contact(chosen)

    def _write(self, stem: str, blocks: Any, shape: tuple[int, ...], digest: Any) -> None:
        self.facts["arrays"][stem] = write_rows(self.folder, stem, blocks, shape, digest)

    def _contact(self, chosen: Indices) -> None:
        labels = self.labels[chosen]
        rows = []
        for members in contact.choose(labels):
            positions = self.pictures.positions[chosen[members]]
            blocks = self.scratch.read(positions)
            tiles = [contact.shrunk(block[..., : self.channels]) for block in blocks]
            count = int((labels == labels[members[0]]).sum())
            title = self.classes[labels[members[0]]] if self.classes else "all"
            rows.append((f"{title} ({count:,})", np.concatenate(tiles)))
        hidden = len(np.unique(labels)) - len(rows)
        more = f"and {hidden:,} more classes" if hidden else ""
        contact.sheet(rows, more).save(self.folder / Path(CONTACT).name)


def _told(facts: dict[str, Any], pictures: Pictures) -> list[str]:
    notes = []
    copies = facts["duplicates"]
    if copies["copies"]:
        notes.append(f"{copies['copies']:,} pictures are exact copies of others; they stay.")
    if copies["in_both_splits"]:
        notes.append(
            f"{copies['in_both_splits']:,} held-out pictures are also among those for training, "
            "as the folders of the source say: evaluation compares with the others alone."
        )
    if not facts["holdout_count"]:
        notes.append("No picture is held out: evaluation has no floor and no memorisation check.")
    cut = sum(is_cut(text) for text in pictures.captions or ())
    if cut:
        notes.append(f"{cut:,} captions are longer than 64 bytes and were cut.")
    return notes
