"""Keep the source and the files of a run apart: prepare must not delete images of the user."""

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

_PREPARED = re.compile(
    r"(holdout_)?(images|labels|captions)(-\d+-of-\d+)?\.npy|contact\.png|rejected\.csv|manifest\.json"
)
OUTPUTS = (DATA, SNAPSHOTS, SAMPLES, EVALUATION, SUPERSEDED)
_SQLITE_SUFFIXES = ("", "-journal", "-wal", "-shm")


def run_outputs(config: Config, workspace: Workspace) -> tuple[str, ...]:
    """Return where a run writes: its workspace, and MLflow's SQLite store with its artifacts."""
    store = sqlite_path(config.tracking.uri)
    if store is None:
        return (workspace.uri,)
    files = [f"{store}{suffix}" for suffix in _SQLITE_SUFFIXES]
    return (workspace.uri, *files, str(store.parent / "mlartifacts"))


def refuse_overlap(source: str, workspace: Workspace) -> None:
    """Raise UserError if the run would overwrite its source, or other files of the user.

    prepare calls this before it decodes images, which takes long.
    """
    find_output = _output_in_s3 if workspace.uri.startswith("s3://") else _output_on_disk
    output = find_output(source, workspace.uri)
    if output == "":
        raise UserError(
            f"prepare.source: {source!r} is the workspace itself, so the run would write its files "
            "among the images. Use another workspace (-w), which may be inside the source."
        )
    if output is not None:
        raise UserError(
            f"prepare.source: {source!r} is in {workspace.shown(output)}, where a run writes its "
            "own files and deletes older ones. Move the images, or use another workspace (-w)."
        )
    _refuse_other_files(workspace)


def _refuse_other_files(workspace: Workspace) -> None:
    """Raise UserError if data/ contains files that prepare did not write.

    Recognises its files by their names too, because the manifest may be damaged, or missing after
    prepare was killed.
    """
    manifest = workspace.read_model(f"{DATA}/{MANIFEST}", Manifest)
    listed = manifest.files if manifest else {}
    other = [
        name
        for name in workspace.storage.names(DATA)
        if name not in listed and not _PREPARED.fullmatch(name) and not is_clutter(name)
    ]
    if other:
        raise UserError(
            f"{workspace.shown(DATA)} contains files that prepare did not write, such as "
            f"{one_line(other[0])}, and prepare replaces the whole folder. Move them, or use "
            "another workspace (-w)."
        )


def _output_on_disk(source: str, workspace: str) -> str | None:
    """Return the output that contains the source, "" for the workspace itself, or None."""
    try:
        path, root = input_path(source).resolve(), Path(workspace)
        if path.samefile(root):
            return ""
    except (OSError, RuntimeError, ValueError):
        return None  # not a local path, or an invalid one that open_source reports
    return next((name for name in OUTPUTS if _is_within(path, root / name)), None)


def _is_within(path: Path, folder: Path) -> bool:
    """Return whether a folder contains a path. Compares files, as some disks ignore case."""
    try:
        return any(parent.samefile(folder) for parent in (path, *path.parents))
    except OSError:
        return False


def _output_in_s3(source: str, workspace: str) -> str | None:
    path, root = source.rstrip("/") + "/", workspace.rstrip("/") + "/"
    if path == root:
        return ""
    return next((name for name in OUTPUTS if path.startswith(f"{root}{name}/")), None)
