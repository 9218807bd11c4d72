"""Find splits and classes in the folder names of a source."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ddpm_core.data import names
from ddpm_core.data.sources.base import CLASS_SUFFIX, Listing, Rejection
from ddpm_core.storage.files import text_of

Parts = tuple[str, ...]
# Folder names of splits, and whether their images are held out.
HELD_OUT = {
    **dict.fromkeys(("train", "training"), False),
    **dict.fromkeys(("test", "testing", "val", "valid", "validation"), True),
}


@dataclass(slots=True)
class FolderMeaning:
    """The class and the split of all images in a folder."""

    class_name: str | None
    held_out: bool | None  # None: decided by the content of each image
    split: str  # the top folder that is a split, or ""


@dataclass(slots=True)
class Layout:
    """Class and split of each image of a listing, and messages for the user."""

    rules: FolderRules
    classes: list[str | None] = field(default_factory=list)
    held_out: list[bool | None] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def find_layout(listing: Listing) -> Layout:
    """Return the class and split of each image, from the names of its folders.

    Folders that contain everything have no meaning. Below them, folders named as in HELD_OUT are
    splits, the next folder is the class, and deeper folders belong to the class. If most training
    images are in no class folder, the source has no classes. Otherwise such images are rejected:
    they are removed from `listing.images`.
    """
    notes = list(listing.notes)
    rules = FolderRules(listing, notes)
    layout = Layout(rules, notes=notes)
    lists, labels = _file_lists(listing), _labels(listing)
    found = [rules.meaning(_parent(entry.name)) for entry in listing.images]
    for entry, meaning in zip(listing.images, found, strict=True):
        label = labels.get(names.stem(entry.name)) or entry.class_name
        folder = None if listing.unlabelled else meaning.class_name
        layout.classes.append(names.shown(label) if label else folder)
        layout.held_out.append(lists.get(entry.name, meaning.held_out))
    _drop_rare_classes(layout)
    _omit_unlabelled_splits(listing, layout, [meaning.split for meaning in found])
    _reject_strays(listing, layout)
    layout.notes += _empty_class_notes(listing, layout)
    layout.notes += _case_notes(layout)
    return layout


def select(listing: Listing, layout: Layout, rows: Sequence[int]) -> None:
    """Keep only the images at these positions, in both the listing and its layout."""
    listing.images = [listing.images[row] for row in rows]
    layout.classes = [layout.classes[row] for row in rows]
    layout.held_out = [layout.held_out[row] for row in rows]


def _drop_rare_classes(layout: Layout) -> None:
    """Drop all classes if most training images have none."""
    named = zip(layout.classes, layout.held_out, strict=True)
    training = [name for name, held in named if not held] or layout.classes
    if training.count(None) <= len(training) / 2:
        return
    dropped = sorted({name for name in layout.classes if name is not None})
    if dropped:
        layout.notes.append(
            "Most training images have no label and are in no class folder, so the data have no "
            f"classes. All images are used, also those in {_first_names(dropped)}."
        )
    layout.classes = [None] * len(layout.classes)


def _omit_unlabelled_splits(listing: Listing, layout: Layout, splits: Sequence[str]) -> None:
    """Omit a held-out split without classes if others have them: the test set of a contest."""
    # A contest publishes the test images without their classes, often flat beside class folders.
    labelled = {split for split, name in zip(splits, layout.classes, strict=True) if name}
    out = {row for row, held in enumerate(layout.held_out) if held and splits[row] not in labelled}
    if not labelled or not out:
        return
    rows = [row for row in range(len(splits)) if row not in out]
    select(listing, layout, rows)
    effect = "They are left out"
    if not any(layout.held_out):
        # That was the only held-out split: decide by content instead.
        layout.held_out = [None] * len(rows)
        effect += ", and some training images are held out instead"
    where = _first_names(sorted({splits[row] for row in out}))
    layout.notes.append(
        f"The {len(out):,} images in {where} have no classes, unlike the training images. {effect}."
    )


def _first_names(found: Sequence[str]) -> str:
    return ", ".join(names.shown(name) for name in found[:5]) + (" ..." if len(found) > 5 else "")


def _reject_strays(listing: Listing, layout: Layout) -> None:
    """Reject images without a class if others have one."""
    strays = {row for row, name in enumerate(layout.classes) if name is None}
    if strays and len(strays) < len(layout.classes):
        reason = "has no class: it has no label and is not in a class folder"
        listing.rejected += [Rejection(listing.images[row].name, reason) for row in sorted(strays)]
        rows = [row for row in range(len(listing.images)) if row not in strays]
        select(listing, layout, rows)


class FolderRules:
    """Which folders of a source are splits and classes, given the number of images in each."""

    def __init__(self, listing: Listing, notes: list[str]) -> None:
        self._shards = {entry.name for entry in listing.shards}
        self._meanings: dict[str, FolderMeaning] = {}
        # A path consists of wrappers, a split, more wrappers, a class, and folders in the class.
        # All of them are optional. `outer` and `inner` are the numbers of wrappers.
        folders: Counter[Parts] = Counter()
        for parent, count in Counter(_parent(e.name) for e in listing.images).items():
            folders[self._parts(parent)] += count
        self.outer = _wrappers(folders)
        self.splits = _splits({folder[self.outer :] for folder in folders}, notes)
        inside: Counter[Parts] = Counter()
        for folder, count in folders.items():
            inside[self._without_split(folder[self.outer :])] += count
        self.inner = _wrappers(inside)
        self.prefix = max(folders, key=len)[: self.outer] if folders else ()

    def meaning(self, folder: str) -> FolderMeaning:
        """Return the class and the split of the images in a folder."""
        if folder not in self._meanings:
            self._meanings[folder] = self._find_meaning(self._parts(folder))
        return self._meanings[folder]

    def class_of(self, name: str) -> str | None:
        """Return the class of any file of the source."""
        return self.meaning(_parent(name)).class_name

    def classes(self, folders: Iterable[str]) -> set[str]:
        """Return the names of those folders that are at the level of classes."""
        found = [self._parts(name) for name in folders]
        return {names.shown(folder[-1]) for folder in found if self._is_class(folder)}

    def _find_meaning(self, folder: Parts) -> FolderMeaning:
        inside = folder[self.outer :]
        split = inside[0] if inside and inside[0] in self.splits else ""
        held_out = HELD_OUT[split.lower()] if split else None
        # If there is a train or test folder, all other images are for training.
        if held_out is None and self.splits:
            held_out = False
        # A train folder without a test folder defines no split: hold out images by their content.
        if self.splits and not any(HELD_OUT[split.lower()] for split in self.splits):
            held_out = None
        below = self._without_split(inside)[self.inner :]
        return FolderMeaning(names.shown(below[0]) if below else None, held_out, split)

    def _is_class(self, folder: Parts) -> bool:
        """Return whether a folder is at the level of classes."""
        if folder[: self.outer] != self.prefix:
            return False
        return len(self._without_split(folder[self.outer :])) == self.inner + 1

    def _parts(self, parent: str) -> Parts:
        """Return the folders on a path.

        A file with many images counts as a folder only if its name contains that of a split, as in
        imagenet-val-0003.tar.
        """
        parts, path = list[str](), ""
        for part in parent.split("/") if parent else ():
            path += part
            parts += _split_of_shard(part, parts) if path in self._shards else [part]
            path += "/"
        return tuple(parts)

    def _without_split(self, inside: Parts) -> Parts:
        return inside[1:] if inside and inside[0] in self.splits else inside


def _parent(name: str) -> str:
    return name.rpartition("/")[0]


def _split_of_shard(shard: str, folders: Sequence[str]) -> list[str]:
    """Return the split in the name of a file with many images, as a list of at most one.

    The list is empty if the name contains several, or if a folder on its path is a split.
    """
    found = {*re.split(r"[^a-z]+", shard.lower())} & {*HELD_OUT}
    inside = any(folder.lower() in HELD_OUT for folder in folders)
    return list(found) if len(found) == 1 and not inside else []


def _wrappers(folders: Mapping[Parts, int]) -> int:
    """Return the number of levels with a single folder that contains everything.

    Such a folder is not a split, and most of its images are in deeper folders. Images directly in
    it are strays, unless all images are of one class, which then includes them.
    """
    depth = 0
    while True:
        inside = {folder: count for folder, count in folders.items() if len(folder) > depth}
        tops = {folder[depth] for folder in inside}
        if len(tops) != 1 or tops.pop().lower() in HELD_OUT:
            return depth
        # If most images are directly in the single folder, it is a class and not a wrapper.
        deeper = sum(count for folder, count in inside.items() if len(folder) > depth + 1)
        if deeper <= sum(inside.values()) / 2:
            # Images in the folders around this class belong to it: move its level up to them.
            return min(depth, max(0, min(map(len, folders)) - 1))
        depth += 1


def _splits(folders: set[Parts], notes: list[str]) -> set[str]:
    """Return the top folders that are splits.

    A folder such as `train` with images directly in it, beside folders that are not splits, is a
    class.
    """
    tops = {folder[0] if folder else "" for folder in folders}
    splits = {top for top in tops if top.lower() in HELD_OUT}
    flat = all(len(folder) == 1 for folder in folders if folder and folder[0] in splits)
    # Images beside splits with classes are strays.
    others = sorted(tops - splits - (set() if flat else {""}))
    if not splits or not others:
        return splits
    shown = ", ".join(names.shown(name) or "the top folder itself" for name in others[:5])
    if flat and len({HELD_OUT[split.lower()] for split in splits}) == 1:
        notes.append(
            f"The folders {', '.join(sorted(splits))} are used as classes, not as splits, because "
            f"these folders beside them contain images too: {shown}."
        )
        return set()
    notes.append(
        f"Images outside the splits {', '.join(sorted(splits))} are used for training; they are "
        f"in: {shown}."
    )
    return splits


def _file_lists(listing: Listing) -> dict[str, bool]:
    """Return whether an image is held out, by image, from the lists of the first split of DTD.

    In the Describable Textures Dataset, labels/train1.txt, val1.txt and test1.txt contain lines
    such as banded/banded_0002.jpg, relative to images/. Only the test images are held out.
    """
    assigned = {}
    for name, text in listing.texts.items():
        folder, _, file = name.rpartition("/")
        if file in ("train1.txt", "val1.txt", "test1.txt") and folder.endswith("labels"):
            images = folder.removesuffix("labels") + "images/"
            for line in names.from_bytes(text).splitlines():
                assigned[images + line.strip()] = file == "test1.txt"
    return assigned


def _empty_class_notes(listing: Listing, layout: Layout) -> list[str]:
    used = set(layout.classes)
    if used <= {None}:
        return []
    empty = layout.rules.classes(listing.folders) - used
    return [
        f"The folder {name} contains no images, so it is not a class." for name in sorted(empty)
    ]


def _labels(listing: Listing) -> dict[str, str]:
    """Return the class in each .cls file of WebDataset, by its name without extension.

    Raises UserError if a file is not text.
    """
    return {
        names.stem(name): " ".join(text_of(text, names.one_line(name)).split())
        for name, text in listing.texts.items()
        if names.suffix(name) == CLASS_SUFFIX
    }


def _case_notes(layout: Layout) -> list[str]:
    by_case: dict[str, set[str]] = {}
    for name in set(layout.classes) - {None}:
        by_case.setdefault(str(name).casefold(), set()).add(str(name))
    return [
        f"The classes {' and '.join(sorted(same))} differ only by case. They are not merged."
        for same in sorted(by_case.values(), key=sorted)
        if len(same) > 1
    ]
