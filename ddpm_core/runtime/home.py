"""A home directory and a user name for processes without them, such as pods with a bare UID."""

from __future__ import annotations

import atexit
import getpass
import os
import shutil
import tempfile
from pathlib import Path


def provide_home() -> None:
    """Set HOME and LOGNAME if the user has neither them nor an entry in the password file.

    MLflow cannot be imported without a home directory, and warns without a user name; dvc cannot
    clone a repository without one. Child processes inherit both. The directory is removed at exit.
    """
    try:
        Path.home()
    except RuntimeError:
        home = os.environ["HOME"] = tempfile.mkdtemp(prefix="ddpm-home-")
        atexit.register(shutil.rmtree, home, ignore_errors=True)
    try:
        getpass.getuser()
    except (KeyError, OSError):  # the second from Python 3.13 on
        os.environ["LOGNAME"] = f"uid-{os.getuid()}"
