"""Where a source may lie, as prepare replaces data/ as a whole; what of a run is no part of one."""

from __future__ import annotations

import re
from pathlib import Path

from ddpm_core.config import Config
from ddpm_core.config.paths import input_path
from ddpm_core.data.names import is_clutter, one_line
from ddpm_core.errors import UserError
from ddpm_core.storage import MANIFEST
from ddpm_core.storage.manifest import Manifest
from ddpm_core.storage.workspace import DATA, EVALUATION, SAMPLES, SNAPSHOTS, SUPERSEDED, Workspace
from ddpm_core.tracking.client import sqlite_path

_OURS = re.compile(
    r"(holdout_)?(images|labels|captions)(-\d+-of-\d+)?\.npy|contact\.png|rejected\.csv|manifest\.json"
)
OUTPUTS = (DATA, SNAPSHOTS, SAMPLES, EVALUATION, SUPERSEDED)
_OF_SQLITE = ("", "-journal", "-wal", "-shm")


def written_places(config: Config, workspace: Workspace) -> tuple[str, ...]:
    """Where a run writes: its workspace, MLflow's SQLite store and the artifacts beside that."""
    store = sqlite_path(config.tracking.uri)
    if store is None:
        return (workspace.uri,)
    beside = [f"{store}{end}" for end in _OF_SQLITE] + [str(store.parent / "mlartifacts")]
    return (workspace.uri, *beside)


def refuse_own_places(source: str, workspace: Workspace) -> None:
    """Raises UserError where a run would write over its source, or over other files of the user.

    Asked before anything is decoded, which takes long.
    """
    inside = _of_s3 if workspace.uri.startswith("s3://") else _of_disk
    name = inside(source, workspace.uri)
    if name == "":
        raise UserError(
            f"prepare.source: {source!r} is the workspace itself, and what a run writes would lie "
            "among its pictures. Give another workspace with -w: it may lie inside the source."
        )
    if name is not None:
        raise UserError(
            f"prepare.source: {source!r} lies in {workspace.shown(name)}, where a run writes its "
            "own files and deletes older ones. Move the pictures elsewhere, or give another "
            "workspace with -w."
        )
    _refuse_foreign(workspace)


def _refuse_foreign(workspace: Workspace) -> None:
    """By their names: a manifest may be damaged, or missing where a prepare was killed."""
    listed = workspace.read_json(f"{DATA}/{MANIFEST}", Manifest).get("files", {})
    foreign = [
        name
        for name in workspace.storage.names(DATA)
        if name not in listed and not _OURS.fullmatch(name) and not is_clutter(name)
    ]
    if foreign:
        raise UserError(
            f"{workspace.shown(DATA)} holds files that no prepare has written, such as "
            f"{one_line(foreign[0])}, and prepare replaces that folder as a whole. Move them "
            "elsewhere, or give another workspace with -w."
        )


def _of_disk(source: str, workspace: str) -> str | None:
    """The output in which a path lies; empty where it is the workspace itself, None elsewhere."""
    try:
        path, root = input_path(source).resolve(), Path(workspace)
        if path.samefile(root):
            return ""
    except (OSError, RuntimeError, ValueError):
        return None  # a name of no file: another source, or one that is told when it is opened
    return next((name for name in OUTPUTS if _within(path, root / name)), None)


def _within(path: Path, folder: Path) -> bool:
    """By the files themselves, as a disk may not tell upper case from lower case."""
    try:
        return any(one.samefile(folder) for one in (path, *path.parents))
    except OSError:
        return False


def _of_s3(source: str, workspace: str) -> str | None:
    path, root = source.rstrip("/") + "/", workspace.rstrip("/") + "/"
    if path == root:
        return ""
    return next((name for name in OUTPUTS if path.startswith(f"{root}{name}/")), None)
