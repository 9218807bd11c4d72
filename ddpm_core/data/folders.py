"""Pictures in a directory of this machine."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from ddpm_core.data import names
from ddpm_core.data.names import one_line
from ddpm_core.data.sources import (
    CAPTIONS,
    Entry,
    Folder,
    Found,
    Item,
    Listing,
    Note,
    Payload,
    Rejection,
    Unreadable,
    make_listing,
)
from ddpm_core.errors import UserError


class Directory:
    """All files below a directory but what lies in `own`: paths, and URIs of other storages.

    Links that stay inside are followed, others are refused.
    """

    def __init__(self, root: Path, uri: str, own: Sequence[str] = ()) -> None:
        self._root, self._own = root.resolve(), own
        found = list(_walk(self._root, own))
        self.facts: dict[str, Any] = {
            "uri": uri,
            "listing_sha256": _checksum([f"{i.name}\0{i.size}" for i, _ in found if _counts(i)]),
            **_dvc_checksum(root),
            "state": _state(found),
        }

    def listing(self) -> Listing:
        return make_listing(item for item, _ in _walk(self._root, self._own))

    def read(self, entries: Sequence[Entry]) -> Iterator[tuple[int, Payload]]:
        """Paths: whoever decodes a picture opens it."""
        for position, entry in enumerate(entries):
            yield position, self._root / os.fsdecode(names.to_bytes(entry.name))


def directory_state(root: Path, own: Sequence[str] = ()) -> dict[str, Any]:
    """Changes when a file of the directory is added, removed, renamed or written."""
    return _state(list(_walk(root.resolve(), own)))


def _state(found: Sequence[tuple[Item, int]]) -> dict[str, Any]:
    lines = [f"{item.name}\0{item.size}\0{time}" for item, time in found if _counts(item)]
    return {"files": len(lines), "sha256": _checksum(lines)}


def _counts(item: Item) -> TypeGuard[Found]:
    return isinstance(item, Found)


def _checksum(lines: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for line in sorted(names.to_bytes(line) for line in lines):
        digest.update(line + b"\0\0")
    return digest.hexdigest()


def _dvc_checksum(root: Path) -> dict[str, str]:
    """The checksum that `dvc add` wrote beside the directory, where it is tracked."""
    try:
        outs = yaml.safe_load(Path(f"{root.absolute()}.dvc").read_bytes())["outs"]
        return {"dvc_md5": str(outs[0]["md5"])}
    except (OSError, yaml.YAMLError, LookupError, TypeError):
        return {}


def _walk(root: Path, own: Sequence[str]) -> Iterator[tuple[Item, int]]:
    """Everything below a folder, with the time of its last change in nanoseconds.

    Raises UserError for a folder that can't be read: nobody knows how many pictures it holds.
    """
    passed = {str(Path(place).resolve()) for place in own}
    waiting = [(str(root), "")]  # no recursion: Python's ends at a thousand levels
    while waiting:
        folder, prefix = waiting.pop()
        try:
            with os.scandir(folder) as scan:
                children = list(scan)
        except FileNotFoundError:  # it went a moment ago
            continue
        except OSError as error:
            raise UserError(
                f"The folder {one_line(folder)} cannot be read: {error.strerror}. Make it "
                "readable, or take it out of the source."
            ) from error
        for child in children:
            name = prefix + names.from_bytes(os.fsencode(child.name))
            if child.path in passed:
                continue
            if names.is_clutter(name):
                yield Folder(name), 0
            elif child.is_symlink():
                yield from _link(root, child, name, passed)
            elif child.is_dir():
                yield Folder(name), 0
                waiting.append((child.path, name + "/"))
            else:
                yield from _file(child, name)


def _link(
    root: Path, child: os.DirEntry[str], name: str, passed: set[str]
) -> Iterator[tuple[Item, int]]:
    """A link to a folder inside is passed over: what it shows is listed where it lies."""
    try:
        target = Path(child.path).resolve()
        mode = target.stat().st_mode
    except FileNotFoundError:
        mode = 0
    except (OSError, RuntimeError):  # links in a circle, and what may not be looked at
        target, mode = Path(child.path), 0
    inside = target.is_relative_to(root)
    if str(target) in passed or (inside and stat.S_ISDIR(mode)):
        return
    where = "leads nowhere" if inside else "leads out of the directory"
    suffix = names.suffix(name)
    if inside and stat.S_ISREG(mode):
        yield from _file(child, name)
        return
    if stat.S_ISDIR(mode) or suffix in names.PICTURE_SUFFIXES:
        yield Rejection(name, f"a symbolic link that {where}"), 0
    # A whole class may be missing, or all captions.
    if stat.S_ISDIR(mode) or not (mode or suffix) or child.name in CAPTIONS:
        yield Note(f"{name} is a symbolic link that {where}: what it leads to is not used."), 0


def _file(child: os.DirEntry[str], name: str) -> Iterator[tuple[Item, int]]:
    try:
        facts = child.stat()
    except OSError as error:
        yield Rejection(name, f"cannot be read: {error.strerror}"), 0
        return
    if stat.S_ISREG(facts.st_mode):
        yield Found(name, facts.st_size, 0, partial(_head, child.path)), facts.st_mtime_ns
    elif names.suffix(name) in names.PICTURE_SUFFIXES:
        yield Rejection(name, "no regular file"), 0


def _head(path: str, count: int) -> bytes:
    try:
        with Path(path).open("rb") as file:
            return file.read(count)
    except OSError as error:
        raise Unreadable(error.strerror) from error
