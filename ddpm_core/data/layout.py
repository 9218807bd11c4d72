"""What the folders of a source mean: which are splits, which are classes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ddpm_core.data import names
from ddpm_core.data.sources.base import CLASS_SUFFIX, Listing, Rejection
from ddpm_core.storage.files import text_of

Parts = tuple[str, ...]
HELD_OUT = {
    **dict.fromkeys(("train", "training"), False),
    **dict.fromkeys(("test", "testing", "val", "valid", "validation"), True),
}


@dataclass(slots=True)
class Place:
    """The meaning of one folder; `held_out` is None where the content is to decide."""

    name: str | None  # of the class
    held_out: bool | None
    split: str  # the top folder that is one, or ""


@dataclass(slots=True)
class Layout:
    """Class name and split of each picture of a listing, and what is to be told about them."""

    meaning: Meaning
    classes: list[str | None] = field(default_factory=list)
    held_out: list[bool | None] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def arrange(listing: Listing) -> Layout:
    """Read classes and splits off the folders.

    Folders around everything are passed over. Top folders with a name of HELD_OUT are splits;
    below, the first folder is the class, and deeper ones belong to it. A source whose pictures for
    training mostly lie outside of folders has no classes; otherwise those that do are rejected.
    """
    notes = list(listing.notes)
    meaning = Meaning(listing, notes)
    layout = Layout(meaning, notes=notes)
    lists, labels = _file_lists(listing), _labels(listing)
    found = [meaning.place(_parent(entry.name)) for entry in listing.pictures]
    for entry, place in zip(listing.pictures, found, strict=True):
        layout.classes.append(labels.get(names.stem(entry.name)) or place.name)
        layout.held_out.append(lists.get(entry.name, place.held_out))
    _drop_classes(layout)
    _leave_out_unlabelled(listing, layout, [place.split for place in found])
    _reject_strays(listing, layout)
    layout.notes += _empty_folders(listing, meaning, layout)
    layout.notes += _differ_by_case(layout)
    return layout


def select(listing: Listing, layout: Layout, rows: Sequence[int]) -> None:
    """Keep some pictures alone, in both."""
    listing.pictures = [listing.pictures[row] for row in rows]
    layout.classes = [layout.classes[row] for row in rows]
    layout.held_out = [layout.held_out[row] for row in rows]


def _drop_classes(layout: Layout) -> None:
    """Where most pictures for training have none."""
    named = zip(layout.classes, layout.held_out, strict=True)
    training = [name for name, held in named if not held] or layout.classes
    if training.count(None) <= len(training) / 2:
        return
    dropped = sorted({name for name in layout.classes if name is not None})
    if dropped:
        layout.notes.append(
            "Most pictures for training lie in no folder of a class, so there are no classes; all "
            f"are used, those in {_several(dropped)} too."
        )
    layout.classes = [None] * len(layout.classes)


def _leave_out_unlabelled(listing: Listing, layout: Layout, splits: Sequence[str]) -> None:
    """A held-out split that has no classes, where others have: the test pictures of a contest."""
    labelled = {split for split, name in zip(splits, layout.classes, strict=True) if name}
    out = {row for row, held in enumerate(layout.held_out) if held and splits[row] not in labelled}
    if not labelled or not out:
        return
    rows = [row for row in range(len(splits)) if row not in out]
    select(listing, layout, rows)
    told = "they are left out"
    if not any(layout.held_out):
        layout.held_out = [None] * len(rows)
        told += ", and others are held out by their content"
    where = _several(sorted({splits[row] for row in out}))
    layout.notes.append(
        f"The {len(out):,} pictures in {where} have no classes, unlike those for training: {told}."
    )


def _several(found: Sequence[str]) -> str:
    return ", ".join(names.shown(name) for name in found[:5]) + (" ..." if len(found) > 5 else "")


def _reject_strays(listing: Listing, layout: Layout) -> None:
    strays = {row for row, name in enumerate(layout.classes) if name is None}
    if strays and len(strays) < len(layout.classes):
        reason = "lies beside the class folders, so it has no class"
        listing.rejected += [
            Rejection(listing.pictures[row].name, reason) for row in sorted(strays)
        ]
        rows = [row for row in range(len(listing.pictures)) if row not in strays]
        select(listing, layout, rows)


class Meaning:
    """The rules for folders, worked out from those that hold pictures, and how many each."""

    def __init__(self, listing: Listing, notes: list[str]) -> None:
        self._archives = {entry.name for entry in listing.archives}
        self._places: dict[str, Place] = {}
        folders: Counter[Parts] = Counter()
        for parent, count in Counter(_parent(e.name) for e in listing.pictures).items():
            folders[self._parts(parent)] += count
        self.outer = _wrappers(folders)
        self.splits = _splits({folder[self.outer :] for folder in folders}, notes)
        inside: Counter[Parts] = Counter()
        for folder, count in folders.items():
            inside[self._without_split(folder[self.outer :])] += count
        self.inner = _wrappers(inside)
        self.prefix = max(folders, key=len)[: self.outer] if folders else ()

    def place(self, folder: str) -> Place:
        if folder not in self._places:
            self._places[folder] = self._placed(self._parts(folder))
        return self._places[folder]

    def class_of(self, name: str) -> str | None:
        """Of any file of the source, by its name."""
        return self.place(_parent(name)).name

    def classes(self, folders: Iterable[str]) -> set[str]:
        """Return the names of the folders that stand where classes stand."""
        found = [self._parts(name) for name in folders]
        return {names.shown(folder[-1]) for folder in found if self._is_class(folder)}

    def _placed(self, folder: Parts) -> Place:
        inside = folder[self.outer :]
        split = inside[0] if inside and inside[0] in self.splits else ""
        held_out = HELD_OUT[split.lower()] if split else None
        # Beside a train or test folder everything else is for training.
        if held_out is None and self.splits:
            held_out = False
        if self.splits and not any(HELD_OUT[split.lower()] for split in self.splits):
            held_out = None
        below = self._without_split(inside)[self.inner :]
        return Place(names.shown(below[0]) if below else None, held_out, split)

    def _is_class(self, folder: Parts) -> bool:
        """Whether a folder stands where classes stand."""
        if folder[: self.outer] != self.prefix:
            return False
        return len(self._without_split(folder[self.outer :])) == self.inner + 1

    def _parts(self, parent: str) -> Parts:
        """Return the folders of a path, without those that are archives; an archive named as a
        split, such as imagenet-val-0003.tar, is the folder of that split."""
        parts, path = list[str](), ""
        for part in parent.split("/") if parent else ():
            path += part
            parts += _split_named(part, parts) if path in self._archives else [part]
            path += "/"
        return tuple(parts)

    def _without_split(self, inside: Parts) -> Parts:
        return inside[1:] if inside and inside[0] in self.splits else inside


def _parent(name: str) -> str:
    return name.rpartition("/")[0]


def _split_named(archive: str, folders: Sequence[str]) -> list[str]:
    """The split that an archive's name has as its only one, unless it lies in a split's folder."""
    found = {*re.split(r"[^a-z]+", archive.lower())} & {*HELD_OUT}
    inside = any(folder.lower() in HELD_OUT for folder in folders)
    return list(found) if len(found) == 1 and not inside else []


def _wrappers(folders: Mapping[Parts, int]) -> int:
    """How many levels hold one folder each, which is no split and has most of its pictures deeper.

    Those on the way are strays, unless all others are of one class, which then has them too.
    """
    depth = 0
    while True:
        inside = {folder: count for folder, count in folders.items() if len(folder) > depth}
        tops = {folder[depth] for folder in inside}
        if len(tops) != 1 or tops.pop().lower() in HELD_OUT:
            return depth
        deeper = sum(count for folder, count in inside.items() if len(folder) > depth + 1)
        if deeper <= sum(inside.values()) / 2:
            return min(depth, max(0, min(map(len, folders)) - 1))
        depth += 1


def _splits(folders: set[Parts], notes: list[str]) -> set[str]:
    """The top folders that are splits. A lone `train` full of pictures beside others is a class."""
    tops = {folder[0] if folder else "" for folder in folders}
    splits = {top for top in tops if top.lower() in HELD_OUT}
    flat = all(len(folder) == 1 for folder in folders if folder and folder[0] in splits)
    # Pictures beside splits with classes are strays.
    others = sorted(tops - splits - (set() if flat else {""}))
    if not splits or not others:
        return splits
    shown = ", ".join(names.shown(name) or "the top folder itself" for name in others[:5])
    if flat and len({HELD_OUT[split.lower()] for split in splits}) == 1:
        notes.append(
            f"The folders {', '.join(sorted(splits))} are taken for classes, as they hold pictures "
            f"beside other folders that do: {shown}."
        )
        return set()
    notes.append(
        f"Beside the splits {', '.join(sorted(splits))} there are more pictures, taken for "
        f"training, in: {shown}."
    )
    return splits


def _file_lists(listing: Listing) -> dict[str, bool]:
    """The first split of the Describable Textures Dataset, by picture, where its lists are there.

    labels/train1.txt, val1.txt and test1.txt hold lines such as banded/banded_0002.jpg, below
    images/. Training and validation train; the test pictures are held out.
    """
    assigned = {}
    for name, text in listing.texts.items():
        folder, _, file = name.rpartition("/")
        if file in ("train1.txt", "val1.txt", "test1.txt") and folder.endswith("labels"):
            images = folder.removesuffix("labels") + "images/"
            for line in names.from_bytes(text).splitlines():
                assigned[images + line.strip()] = file == "test1.txt"
    return assigned


def _empty_folders(listing: Listing, meaning: Meaning, layout: Layout) -> list[str]:
    used = set(layout.classes)
    if used <= {None}:
        return []
    empty = meaning.classes(listing.folders) - used
    return [
        f"There are no pictures in the folder {name}: it is no class." for name in sorted(empty)
    ]


def _labels(listing: Listing) -> dict[str, str]:
    """Return the classes that WebDataset's .cls files give, by the image's name without extension.

    Raises UserError for a file that is not text.
    """
    return {
        names.stem(name): " ".join(text_of(text, names.one_line(name)).split())
        for name, text in listing.texts.items()
        if names.suffix(name) == CLASS_SUFFIX
    }


def _differ_by_case(layout: Layout) -> list[str]:
    by_case: dict[str, set[str]] = {}
    for name in set(layout.classes) - {None}:
        by_case.setdefault(str(name).casefold(), set()).add(str(name))
    return [
        f"The classes {' and '.join(sorted(same))} differ by case alone; they are kept apart."
        for same in sorted(by_case.values(), key=sorted)
        if len(same) > 1
    ]
