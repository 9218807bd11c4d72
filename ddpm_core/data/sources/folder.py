"""Images in a directory of this machine."""

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
from ddpm_core.data.sources.sidecars import FIND, Columns
from ddpm_core.errors import UserError

_BROKEN_LINK = "a symbolic link without a target"


class Directory:
    """All files below a directory, except those at the paths in `excluded`.

    Links are followed even out of the directory, because the caches of DVC and Hugging Face
    consist of links. So every user who can write into a source is trusted: a link there can
    name any file that this process can read.
    """

    def __init__(
        self, root: Path, uri: str, excluded: Sequence[str] = (), columns: Columns = FIND
    ) -> None:
        self._root, self._excluded, self._columns = root.resolve(), excluded, columns
        found = list(_walk(self._root, excluded))
        self.facts: dict[str, Any] = {
            "uri": uri,
            "listing_sha256": _checksum([f"{i.name}\0{i.size}" for i, _ in found if _is_file(i)]),
            **_dvc_checksum(root),
            "state": _state(found),
        }

    def listing(self) -> Listing:
        """Return the content of the directory. Raises UserError."""
        found = (item for item, _ in _walk(self._root, self._excluded))
        return make_listing(found, self._columns)

    def read(self, entries: Sequence[Entry]) -> Iterator[tuple[int, Payload]]:
        """Yield paths, in order. The process that decodes an image opens it."""
        for position, entry in enumerate(entries):
            yield position, self._root / os.fsdecode(names.to_bytes(entry.name))


def directory_state(root: Path, excluded: Sequence[str] = ()) -> dict[str, Any]:
    """Return facts that change when a file is added, removed, renamed or written."""
    return _state(list(_walk(root.resolve(), excluded)))


def _state(found: Sequence[tuple[Item, int]]) -> dict[str, Any]:
    lines = [f"{item.name}\0{item.size}\0{time}" for item, time in found if _is_file(item)]
    return {"files": len(lines), "sha256": _checksum(lines)}


def _is_file(item: Item) -> TypeGuard[Found]:
    return isinstance(item, Found)


def _checksum(lines: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for line in sorted(names.to_bytes(line) for line in lines):
        digest.update(line + b"\0\0")
    return digest.hexdigest()


def _dvc_checksum(root: Path) -> dict[str, str]:
    """Return the checksum that `dvc add` wrote beside the directory, if DVC tracks it."""
    try:
        outs = yaml.safe_load(Path(f"{root.absolute()}.dvc").read_bytes())["outs"]
        return {"dvc_md5": str(outs[0]["md5"])}
    except (OSError, yaml.YAMLError, LookupError, TypeError):
        return {}


def _walk(root: Path, excluded: Sequence[str]) -> Iterator[tuple[Item, int]]:
    """Yield everything below a folder, with its modification time in nanoseconds.

    Links to files and folders are followed.

    Raises:
        UserError: a folder cannot be read. Its images would be missing without a message.
    """
    skipped = {str(Path(path).resolve()) for path in excluded}
    broken = list[str]()
    # A stack instead of recursion, which Python limits to a thousand levels. `roots` are the real
    # folders where the walk of this branch began: `root`, and the target of each link followed.
    waiting: list[tuple[str, str, tuple[Path, ...]]] = [(str(root), "", (root,))]
    while waiting:
        folder, prefix, roots = waiting.pop()
        for child in _children(folder):
            name = prefix + names.from_bytes(os.fsencode(child.name))
            if child.path in skipped:
                continue
            if names.is_clutter(name):
                # Not looked into; make_listing records it as hidden.
                yield Folder(name), 0
                continue
            item, modified = _item(child, name)
            if isinstance(item, Folder):
                if not child.is_symlink():
                    waiting.append((child.path, name + "/", roots))
                elif (target := _target(child)) and not _is_walked(target, roots, skipped):
                    waiting.append((str(target), name + "/", (*roots, target)))
                else:
                    continue
            # Other broken links may have been folders of images: one note reports them all.
            if item == Rejection(name, _BROKEN_LINK) and not _is_named_like_image(name):
                broken.append(name)
            elif item is not None:
                yield item, modified
    if broken:
        more = f" (and {len(broken) - 1:,} more)" if broken[1:] else ""
        yield Note(f"{min(broken)} is {_BROKEN_LINK}{more}. Restore it, or remove the link."), 0


def _children(folder: str) -> list[os.DirEntry[str]]:
    """Return the entries of a folder; none if it was removed. Raises UserError."""
    try:
        with os.scandir(folder) as scan:
            return list(scan)
    except FileNotFoundError:  # removed since its parent was listed
        return []
    except OSError as error:
        raise UserError(
            f"The folder {one_line(folder)} cannot be read: {error.strerror}. Make it readable, or "
            "remove it from the source."
        ) from error


def _item(child: os.DirEntry[str], name: str) -> tuple[Item | None, int]:
    """Return the item for a directory entry, links followed, and its modification time.

    The item is None if the file was removed since its folder was listed, or is neither a regular
    file nor named like an image.
    """
    try:
        facts = child.stat()
    except OSError as error:
        if not os.path.lexists(child.path):
            return None, 0
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return Rejection(name, _BROKEN_LINK), 0
        return Rejection(name, f"cannot be read: {error.strerror}"), 0
    if stat.S_ISREG(facts.st_mode):
        return Found(name, facts.st_size, 0, partial(_head, child.path)), facts.st_mtime_ns
    if stat.S_ISDIR(facts.st_mode):
        return Folder(name), 0
    return (Rejection(name, "not a regular file") if _is_named_like_image(name) else None), 0


def _is_named_like_image(name: str) -> bool:
    return names.suffix(name) in names.IMAGE_SUFFIXES


def _target(link: os.DirEntry[str]) -> Path | None:
    """Return the real path of a link's target, or None if the link was removed."""
    try:
        return Path(os.path.realpath(link.path))
    except OSError:
        return None


def _is_walked(target: Path, roots: Sequence[Path], skipped: set[str]) -> bool:
    """Return whether not to follow a link to `target`.

    True if the walk finds the target itself, if it is excluded, or if it contains the link, which
    would be a loop.
    """
    if str(target) in skipped:
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
