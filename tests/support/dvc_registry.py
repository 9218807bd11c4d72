"""A data registry like a user's: a git repository whose photos DVC tracks in a remote."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

NAME, MAIL = "tester", "tester@localhost"


class Registry:
    """A repository and its DVC remote: a directory or s3://bucket/prefix."""

    def __init__(self, folder: Path, remote: str) -> None:
        self.folder = folder
        (folder / ".dvc").mkdir(parents=True)
        (folder / ".dvc/.gitignore").write_text("/cache\n/tmp\n")
        (folder / ".dvc/config").write_text(
            f"[core]\nremote = store\n['remote \"store\"']\nurl = {remote}\n"
        )
        self.git("init", "--quiet", "--initial-branch=main")

    def photos(self, tag: str, each: int) -> None:
        """Commit and push two classes of `each` small images in photos/, with this tag."""
        for label, name in enumerate(("disc", "square")):
            (self.folder / "photos" / name).mkdir(parents=True, exist_ok=True)
            for number in range(each):
                pixels = np.full((10, 10), 5 * number + label, np.uint8)
                Image.fromarray(pixels).save(self.folder / f"photos/{name}/{number}.png")
        self._run(str(Path(sys.executable).with_name("dvc")), "add", "--quiet", "photos")
        self._run(str(Path(sys.executable).with_name("dvc")), "push", "--quiet")
        self.commit(tag)

    def commit(self, tag: str) -> None:
        self.git("add", ".")
        self.git("commit", "--quiet", "--message", tag)
        self.git("tag", tag)

    def git(self, *arguments: str) -> str:
        return self._run("git", *arguments).strip()

    def _run(self, *command: str) -> str:
        quiet = {"DVC_NO_ANALYTICS": "1", "GIT_CONFIG_GLOBAL": os.devnull}
        who = {f"GIT_{k}_NAME": NAME for k in ("AUTHOR", "COMMITTER")}
        who |= {f"GIT_{k}_EMAIL": MAIL for k in ("AUTHOR", "COMMITTER")}
        done = subprocess.run(
            command,
            cwd=self.folder,
            env={**os.environ, **quiet, **who},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
        return done.stdout
