"""A real MLflow server in a process of its own, to be stopped, killed and started again; stores."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}


def wait_until(condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    """Ask again and again until the condition holds."""
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {seconds} s")
        pause.wait(0.05)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


@functools.cache
def _new_store() -> bytes:
    """What MLflow makes of an absent SQLite store, which takes it seconds."""
    from ddpm_core.tracking.client import connect

    with tempfile.TemporaryDirectory(prefix="ddpm-store-") as folder:
        connect(f"sqlite:///{folder}/mlflow.db")
        return Path(folder, "mlflow.db").read_bytes()


def put_store(file: Path) -> str:
    """Put a new SQLite store there, where how it comes to be does not matter; its URI."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(_new_store())
    return f"sqlite:///{file}"


class Server:
    """`mlflow server` on 127.0.0.1 with a SQLite store and proxied artifacts below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        store = self.root / "server.db"
        if not store.exists():
            put_store(store)
        command = [sys.executable, "-m", "mlflow", "server", "--workers", "1"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--serve-artifacts"]
        command += ["--backend-store-uri", f"sqlite:///{store}"]
        command += ["--artifacts-destination", str(self.root / "artifacts")]
        with (self.root / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self.root,
                env={**os.environ, **QUIET},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_until(lambda: answers(f"{self.uri}/health"), "the MLflow server is up", 120)

    def signal(self, number: int) -> None:
        """To the server and its workers."""
        if self._process is not None:
            os.killpg(self._process.pid, number)

    def kill(self) -> None:
        if self._process is not None:
            self.signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def running(self) -> Server:
        """This server, started if it is not."""
        if self._process is None:
            self.start()
        return self


@functools.cache
def shared_server() -> Server:
    """One server for all tests of this process."""
    root = Path(tempfile.mkdtemp(prefix="ddpm-mlflow-"))
    server = Server(root)

    def remove() -> None:
        server.kill()
        shutil.rmtree(root, ignore_errors=True)

    atexit.register(remove)
    return server
