"""Run commands in Linux namespaces, without privileges: as another user, on a small disk."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest


def _unshare(*options: str) -> list[str]:
    command = ["unshare", "--user", *options]
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("user namespaces are not available")
    return command


def as_nameless(command: list[str], **environment: str) -> list[str]:
    """Return a command that runs as a user without a password entry and without HOME."""
    given = [f"{name}={value}" for name, value in environment.items()]
    options = ("--map-user=54321", "--map-group=54321")
    return [*_unshare(*options), "env", "-i", *given, *command]


def on_small_disk(folder: Path, size: str, command: list[str]) -> list[str]:
    """Return a command for which a new folder is a disk of this size, such as 300k."""
    folder.mkdir()
    mount = f"mount -t tmpfs -o size={size} tmpfs {shlex.quote(str(folder))}"
    script = f"{mount} && exec {shlex.join(command)}"
    return [*_unshare("--mount", "--map-root-user"), "sh", "-c", script]
