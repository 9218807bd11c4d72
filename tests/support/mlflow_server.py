"""A real MLflow server in a separate process that tests can stop and restart; SQLite stores."""

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
    """Poll until the condition holds. Raises AssertionError after a timeout."""
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
    """Return a new SQLite store; MLflow takes seconds to create one."""
    from ddpm_core.tracking.client import connect

    with tempfile.TemporaryDirectory(prefix="ddpm-store-") as folder:
        connect(f"sqlite:///{folder}/mlflow.db")
        return Path(folder, "mlflow.db").read_bytes()


def put_store(file: Path) -> str:
    """Write a new SQLite store without the cost of MLflow creating it; return its URI."""
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
        """Send a signal to the server and its workers."""
        if self._process is not None:
            os.killpg(self._process.pid, number)

    def kill(self) -> None:
        if self._process is not None:
            self.signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def running(self) -> Server:
        """Return this server after starting it if necessary."""
        if self._process is None:
            self.start()
        return self


@functools.cache
def shared_server() -> Server:
    """Return one server for all tests of this process."""
    root = Path(tempfile.mkdtemp(prefix="ddpm-mlflow-"))
    server = Server(root)

    def remove() -> None:
        server.kill()
        shutil.rmtree(root, ignore_errors=True)

    atexit.register(remove)
    return server
