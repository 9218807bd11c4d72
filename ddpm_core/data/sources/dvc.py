"""A path that DVC tracks in a git repository, dvc:REPO#PATH@REV, fetched by the dvc program."""

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
_TRANSPORT = re.compile(r"[\w+.-]+::")  # git's remote helpers; ext:: runs any command
_TIMEOUT = 30.0  # seconds to look up a revision in a remote repository


class Tracked(NamedTuple):
    """A path in a git repository; `rev` is a tag, branch or commit, or empty for the newest."""

    repo: str
    path: str
    rev: str


def parse(uri: str) -> Tracked:
    """Split dvc:REPO#PATH@REV or dvc:REPO#PATH into its parts. Raises UserError."""
    repo, _, rest = uri.removeprefix("dvc:").partition("#")
    path, at, rev = rest.rpartition("@") if "@" in rest else (rest, "", "")
    path = path.strip("/")
    if not repo or not path or (at and not rev) or "\0" in uri:
        raise UserError(
            f"prepare.source: got {uri!r}; must be dvc:REPO#PATH@REV, as in "
            "dvc:../registry#photos@v2 or dvc:https://host/registry.git#photos."
        )
    if _TRANSPORT.match(repo) or any(part.startswith("-") for part in (repo, path, rev)):
        raise UserError(
            f"prepare.source: got {uri!r}; no part of dvc:REPO#PATH@REV may begin with '-', like "
            "an option, and REPO may not begin with a git transport, such as ext::."
        )
    place = input_path(repo)
    return Tracked(str(place) if place.is_absolute() and place.is_dir() else repo, path, rev)


def fetch(tracked: Tracked, target: Path) -> None:
    """Copy the tracked file or directory to `target`. Raises UserError with the error of dvc."""
    console.say(f"Fetching {tracked.path} from {tracked.repo} with dvc.")
    command = [_program(), "get", f"--out={target}"]
    command += [f"--rev={tracked.rev}"] if tracked.rev else []
    command += ["--", tracked.repo, tracked.path]
    quiet = {**os.environ, "DVC_NO_ANALYTICS": "1", "DVC_DAEMON": "0"}
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=quiet)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        raise UserError(
            f"dvc get failed for {tracked.path} in {tracked.repo}"
            + (f" at {tracked.rev}" if tracked.rev else "")
            + f": {' '.join(lines).removeprefix('ERROR: ') or 'it printed no error'}"
        )


def commit(tracked: Tracked) -> str | None:
    """Return the commit that the revision names now, or None if git cannot find it."""
    if _SHA.fullmatch(tracked.rev):
        return tracked.rev
    wanted = tracked.rev or "HEAD"
    if Path(tracked.repo).is_dir():
        return _git(["-C", tracked.repo, "rev-parse", "--verify", f"{wanted}^{{commit}}"])
    # git lists every name that ends with the pattern: for v2 also zz/v2.
    listed = _git(["ls-remote", "--", tracked.repo, wanted, f"{wanted}^{{}}"]) or ""
    commits = {name: sha for sha, name in (line.split() for line in listed.splitlines())}
    # In the order of git's rules; ^{} is the commit of an annotated tag.
    names = (wanted, f"refs/tags/{wanted}^{{}}", f"refs/tags/{wanted}", f"refs/heads/{wanted}")
    return next((commits[name] for name in names if name in commits), None)


def state(tracked: Tracked) -> dict[str, Any] | None:
    """Return facts that change with the revision, or None if it cannot be found."""
    found = commit(tracked)
    return {"commit": found} if found else None


def _git(arguments: list[str]) -> str | None:
    """Return the output of git, or None if it is empty or git failed or timed out."""
    try:
        done = subprocess.run(
            ["git", *arguments],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            env={**os.environ, "GIT_TERMINAL_PROMPT": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _program() -> str:
    """Return the path of dvc: from this Python's environment, active or not, or from PATH."""
    own = Path(sys.executable).with_name("dvc")
    found = str(own) if own.is_file() else shutil.which("dvc")
    if found is None:
        raise UserError(
            "The program dvc is not installed. It comes with the extra 'dvc': "
            "pip install 'ddpm-core[dvc]'"
        )
    return found
