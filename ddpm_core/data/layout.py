"""What the folders of a source mean: which are splits, which are classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ddpm_core.data import names
from ddpm_core.data.sources import Listing, Rejection

Parts = tuple[str, ...]
HELD_OUT = {"train": False, "training": False, "test": True, "val": True, "valid": True}


@dataclass(slots=True)
class Place:
    """The meaning of one folder; `held_out` is None where the content is to decide."""

    name: str | None  # of the class
    held_out: bool | None


@dataclass(slots=True)
class Layout:
    """Class name and split of each picture of a listing, and what is to be told about them."""

    classes: list[str | None] = field(default_factory=list)
    held_out: list[bool | None] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def arrange(listing: Listing) -> Layout:
    """Read classes and splits off the folders.

    Folders around everything are passed over. Top folders named train, test, val or valid are
    splits; below, the first folder is the class, and deeper ones belong to it. A source whose
    pictures mostly lie outside of folders has no classes; otherwise those that do are rejected.
    """
    layout = Layout()
    parents = Counter(_parent(entry.name) for entry in listing.pictures)
    meaning = Meaning({_parts(parent): count for parent, count in parents.items()}, layout.notes)
    places = {parent: meaning.place(_parts(parent)) for parent in parents}
    lists = _file_lists(listing)
    for entry in listing.pictures:
        place = places[_parent(entry.name)]
        layout.classes.append(place.name)
        layout.held_out.append(lists.get(entry.name, place.held_out))
    if layout.classes.count(None) > len(layout.classes) / 2:
        layout.classes = [None] * len(layout.classes)
    _reject_strays(listing, layout)
    layout.notes += _empty_folders(listing, meaning, layout)
    layout.notes += _differ_by_case(layout)
    return layout


def select(listing: Listing, layout: Layout, rows: Sequence[int]) -> None:
    """Keep some pictures alone, in both."""
    listing.pictures = [listing.pictures[row] for row in rows]
    layout.classes = [layout.classes[row] for row in rows]
    layout.held_out = [layout.held_out[row] for row in rows]


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

    def __init__(self, folders: Mapping[Parts, int], notes: list[str]) -> None:
        self.outer = _wrappers(folders)
        self.splits = _splits({folder[self.outer :] for folder in folders}, notes)
        inside: Counter[Parts] = Counter()
        for folder, count in folders.items():
            inside[self._without_split(folder[self.outer :])] += count
        self.inner = _wrappers(inside)
        self.prefix = max(folders, key=len)[: self.outer] if folders else ()

    def place(self, folder: Parts) -> Place:
        inside = folder[self.outer :]
        held_out = HELD_OUT[inside[0].lower()] if inside and inside[0] in self.splits else None
        # Beside a train or test folder everything else is for training.
        if held_out is None and self.splits:
            held_out = False
        if self.splits and not any(HELD_OUT[split.lower()] for split in self.splits):
            held_out = None
        below = self._without_split(inside)[self.inner :]
        return Place(names.shown(below[0]) if below else None, held_out)

    def is_class(self, folder: Parts) -> bool:
        """Whether a folder stands where classes stand."""
        if folder[: self.outer] != self.prefix:
            return False
        return len(self._without_split(folder[self.outer :])) == self.inner + 1

    def _without_split(self, inside: Parts) -> Parts:
        return inside[1:] if inside and inside[0] in self.splits else inside


def _parent(name: str) -> str:
    return name.rpartition("/")[0]


def _parts(parent: str) -> Parts:
    return tuple(parent.split("/")) if parent else ()


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
    others = sorted(tops - splits)
    if not splits or not others:
        return splits
    shown = ", ".join(names.shown(name) or "the top folder itself" for name in others[:5])
    if all(len(folder) == 1 for folder in folders if folder and folder[0] in splits):
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
    folders = [tuple(name.split("/")) for name in listing.folders]
    empty = {names.shown(f[-1]) for f in folders if meaning.is_class(f)} - used
    return [
        f"There are no pictures in the folder {name}: it is no class." for name in sorted(empty)
    ]


def _differ_by_case(layout: Layout) -> list[str]:
    by_case: dict[str, set[str]] = {}
    for name in set(layout.classes) - {None}:
        by_case.setdefault(str(name).casefold(), set()).add(str(name))
    return [
        f"The classes {' and '.join(sorted(same))} differ by case alone; they are kept apart."
        for same in sorted(by_case.values(), key=sorted)
        if len(same) > 1
    ]
