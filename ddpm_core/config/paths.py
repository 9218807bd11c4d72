"""Resolve the relative paths of settings, also inside the copies that DVC makes of a repository."""

from __future__ import annotations

import os
from pathlib import Path

_COPIES = (".dvc", "tmp", "exps")  # `dvc exp run --temp` and `--queue` run in copies below it


def project_folder() -> Path:
    """Return the working directory, or inside a DVC copy the folder that it is a copy of.

    The project may be a subfolder of the DVC repository, which may be a subfolder of the copied git
    repository. So the nearest `.dvc` in the copy corresponds to the `.dvc` that contains the copy.
    """
    current = Path.cwd()
    parts = current.parts
    for index in range(len(parts) - len(_COPIES)):
        if parts[index : index + len(_COPIES)] == _COPIES:
            original = Path(*parts[:index])
            inside = len(parts) - index - len(_COPIES)  # folders between the copies and `current`
            for copied in (current, *current.parents)[:inside]:
                if (copied / ".dvc").is_dir():
                    return original / current.relative_to(copied)
            return original
    return current


def input_path(given: str) -> Path:
    """Return the path of an input file or folder that a setting names.

    A DVC copy contains only the files that git and DVC track. Its version of them comes first; all
    other files are in the original folder. Raises RuntimeError for an unknown ~user.
    """
    path = Path(given).expanduser()
    if path.is_absolute() or _exists(path):
        return path
    original = project_folder() / path
    return original if _exists(original) else path


def _exists(path: Path) -> bool:
    try:
        return os.path.lexists(path)
    except ValueError:  # a NUL byte
        return False


def output_path(given: str) -> Path:
    """Return the absolute path of a file that all experiments share, such as MLflow's database.

    Raises RuntimeError for an unknown ~user.
    """
    return project_folder() / Path(given).expanduser()
