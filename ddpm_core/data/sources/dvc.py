"""A path that DVC tracks in some repository, fetched by the dvc program: dvc:REPO#PATH@REV."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from ddpm_core import console
from ddpm_core.config.paths import input_path
from ddpm_core.errors import UserError

_SHA = re.compile(r"[0-9a-f]{40}")
_HELPER = re.compile(r"[\w+.-]+::")  # such as ext::, which runs any command
_PATIENCE = 30.0  # seconds that a look at the revision of a remote repository may take


class Tracked(NamedTuple):
    """A path in a git repository with DVC; `rev` is a tag, branch or commit, empty: the newest."""

    repo: str
    path: str
    rev: str


def parse(uri: str) -> Tracked:
    """Of dvc:REPO#PATH@REV, where @REV may be missing. Raises UserError."""
    repo, _, rest = uri.removeprefix("dvc:").partition("#")
    path, at, rev = rest.rpartition("@") if "@" in rest else (rest, "", "")
    path = path.strip("/")
    if not repo or not path or (at and not rev) or "\0" in uri:
        raise UserError(
            f"prepare.source: {uri!r} given; dvc:REPO#PATH@REV is needed, "
            "as in dvc:../registry#photos@v2 or dvc:https://host/registry.git#photos."
        )
    if _HELPER.match(repo) or any(part.startswith("-") for part in (repo, path, rev)):
        raise UserError(
            f"prepare.source: {uri!r} given; no part of dvc:REPO#PATH@REV may begin with '-', as "
            "options do, and REPO not with the name of a transport, such as ext::."
        )
    place = input_path(repo)
    return Tracked(str(place) if place.is_absolute() and place.is_dir() else repo, path, rev)


def fetch(tracked: Tracked, target: Path) -> None:
    """Copy the tracked file or directory to `target`. Raises UserError with what dvc said."""
    console.say(f"Fetching {tracked.path} from {tracked.repo} with dvc.")
    command = [_program(), "get", f"--out={target}"]
    command += [f"--rev={tracked.rev}"] if tracked.rev else []
    command += ["--", tracked.repo, tracked.path]
    quiet = {**os.environ, "DVC_NO_ANALYTICS": "1", "DVC_DAEMON": "0"}
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=quiet)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        raise UserError(
            f"dvc could not get {tracked.path} from {tracked.repo}"
            + (f" at {tracked.rev}" if tracked.rev else "")
            + f": {' '.join(lines).removeprefix('ERROR: ') or 'it gave no reason'}"
        )


def commit(tracked: Tracked) -> str | None:
    """The commit that the revision stands for now; None where that can't be found out."""
    if _SHA.fullmatch(tracked.rev):
        return tracked.rev
    wanted = tracked.rev or "HEAD"
    if Path(tracked.repo).is_dir():
        return _git(["-C", tracked.repo, "rev-parse", "--verify", f"{wanted}^{{commit}}"])
    # git answers with every name that ends so: zz/v2 too where v2 is wanted.
    said = _git(["ls-remote", "--", tracked.repo, wanted, f"{wanted}^{{}}"]) or ""
    commits = {name: sha for sha, name in (line.split() for line in said.splitlines())}
    # In git's order; of an annotated tag ^{} is the commit.
    names = (wanted, f"refs/tags/{wanted}^{{}}", f"refs/tags/{wanted}", f"refs/heads/{wanted}")
    return next((commits[name] for name in names if name in commits), None)


def state(tracked: Tracked) -> dict[str, Any] | None:
    found = commit(tracked)
    return {"commit": found} if found else None


def _git(arguments: list[str]) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments],
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            env={**os.environ, "GIT_TERMINAL_PROMPT": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _program() -> str:
    """The dvc of this Python's environment, which need not be active, or the one on the path."""
    own = Path(sys.executable).with_name("dvc")
    found = str(own) if own.is_file() else shutil.which("dvc")
    if found is None:
        raise UserError(
            "The program dvc is not installed. It comes with the extra 'dvc': "
            "pip install 'ddpm-core[dvc]'"
        )
    return found
