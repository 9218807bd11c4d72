"""A home directory and user name for processes without one, such as pods with a bare UID."""

from __future__ import annotations

import atexit
import getpass
import os
import shutil
import tempfile
from pathlib import Path


def provide_home() -> None:
    """Set HOME and LOGNAME if neither the environment nor the password file has them.

    Without a home directory MLflow cannot be imported; without a user name MLflow warns and dvc
    cannot clone a repository. Child processes inherit both. The directory is removed at exit.
    """
    try:
        Path.home()
    except RuntimeError:
        home = os.environ["HOME"] = tempfile.mkdtemp(prefix="ddpm-home-")
        atexit.register(shutil.rmtree, home, ignore_errors=True)
    try:
        getpass.getuser()
    except (KeyError, OSError):  # OSError since Python 3.13
        os.environ["LOGNAME"] = f"uid-{os.getuid()}"
