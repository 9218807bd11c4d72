"""Pictures in a directory of this machine."""

from __future__ import annotations

import errno
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
from ddpm_core.data.sources.base import (
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

_LOST = "a symbolic link without a target"


class Directory:
    """All files below a directory but what lies in `own`: paths, and URIs of other storages.

    Links are followed, wherever they lead: whoever may write into the directory may read the
    files, and DVC's cache and Hugging Face's keep files as links.
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
    """Yield everything below a folder, with the time of its last change in nanoseconds.

    Links to files and folders are followed. Raises UserError for a folder that can't be read:
    nobody knows how many images it holds.
    """
    passed = {str(Path(place).resolve()) for place in own}
    lost = list[str]()
    # No recursion: Python's ends at a thousand levels. `roots` are the real folders that this walk
    # began at: `root`, and the target of each link on the way.
    waiting: list[tuple[str, str, tuple[Path, ...]]] = [(str(root), "", (root,))]
    while waiting:
        folder, prefix, roots = waiting.pop()
        for child in _children(folder):
            name = prefix + names.from_bytes(os.fsencode(child.name))
            if child.path in passed:
                continue
            if names.is_clutter(name):
                yield Folder(name), 0
                continue
            item, changed = _item(child, name)
            if isinstance(item, Folder):
                if not child.is_symlink():
                    waiting.append((child.path, name + "/", roots))
                elif (target := _target(child)) and not _is_walked(target, roots, passed):
                    waiting.append((str(target), name + "/", (*roots, target)))
                else:
                    continue
            if item == Rejection(name, _LOST) and not _is_named_as_image(name):
                lost.append(name)
            elif item is not None:
                yield item, changed
    if lost:
        more = f", and {len(lost) - 1:,} more have none either" if lost[1:] else ""
        yield Note(f"{min(lost)} is {_LOST}{more}: restore it, or remove the link."), 0


def _children(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as scan:
            return list(scan)
    except FileNotFoundError:  # removed since its parent was listed
        return []
    except OSError as error:
        raise UserError(
            f"The folder {one_line(folder)} cannot be read: {error.strerror}. Make it readable, or "
            "take it out of the source."
        ) from error


def _item(child: os.DirEntry[str], name: str) -> tuple[Item | None, int]:
    """Return what a name stands for, links followed, and the time of its last change.

    None is a file that was removed since its folder was listed, or that is neither a regular file
    nor named as an image.
    """
    try:
        facts = child.stat()
    except OSError as error:
        if not os.path.lexists(child.path):
            return None, 0
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return Rejection(name, _LOST), 0
        return Rejection(name, f"cannot be read: {error.strerror}"), 0
    if stat.S_ISREG(facts.st_mode):
        return Found(name, facts.st_size, 0, partial(_head, child.path)), facts.st_mtime_ns
    if stat.S_ISDIR(facts.st_mode):
        return Folder(name), 0
    return (Rejection(name, "not a regular file") if _is_named_as_image(name) else None), 0


def _is_named_as_image(name: str) -> bool:
    return names.suffix(name) in names.PICTURE_SUFFIXES


def _target(link: os.DirEntry[str]) -> Path | None:
    """Return the real path that a link leads to; None where the link was removed."""
    try:
        return Path(os.path.realpath(link.path))
    except OSError:
        return None


def _is_walked(target: Path, roots: Sequence[Path], passed: set[str]) -> bool:
    """Whether the target of a link is listed where it lies, is passed over, or contains the link,
    which would be a loop."""
    if str(target) in passed:
        return True
    for root in roots:
        if root.is_relative_to(target):
            return True
        if target.is_relative_to(root) and not names.is_clutter(str(target.relative_to(root))):
            return True
    return False


def _head(path: str, count: int) -> bytes:
    try:
        with Path(path).open("rb") as file:
            return file.read(count)
    except OSError as error:
        raise Unreadable(error.strerror) from error
