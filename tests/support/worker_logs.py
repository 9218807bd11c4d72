"""Workers with the logs that a test gives them, as the API server sends logs."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from ddpm_kube.backends import DEFAULT
from ddpm_kube.logs import Logs

POD = "run-worker-0"
MESSAGE = "There are no prepared data."
Read = Callable[..., Iterable[str]]


class Answer:
    """A log as the API server sends it. Its lines may be a generator that waits or breaks off."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = lines

    def stream(self, **_: object) -> Iterator[bytes]:
        for line in self._lines:
            yield f"{line}\n".encode()

    def close(self) -> None:
        """Do nothing."""

    release_conn = close


def followed(read: Read) -> tuple[Logs, list[str]]:
    """Return Logs of an API server that sends the lines of `read`, and the list they print to."""
    printed: list[str] = []

    def answer(*_: object, previous: bool, **__: object) -> Answer:
        return Answer(read(previous))

    core = SimpleNamespace(read_namespaced_pod_log=answer)
    cluster: Any = SimpleNamespace(namespace="ddpm", core=core, patience=0.0, backend=DEFAULT)
    return Logs(cluster, printed.append), printed


def followed_until(written: threading.Event, log: Logs) -> None:
    """Follow one container until `written` is set, and then to its end."""
    log.follow(pods("c1"))
    assert written.wait(30)
    log.follow({})
    log.finish(30)


def pods(container: str, before: str = "", state: str = "running") -> dict[str, Any]:
    status = {"name": "pytorch", "containerID": container, "state": {state: {}}}
    if before:
        status["lastState"] = {"terminated": {"containerID": before}}
    return {POD: {"metadata": {"uid": "u-1"}, "status": {"containerStatuses": [status]}}}


def error(attempt: object, message: str = MESSAGE) -> str:
    """Return the record of a process that ends with an error."""
    return json.dumps({"ddpm": "error", "message": message, "attempt": str(attempt)})


def progress(steps: int, task: str = "train") -> str:
    """Return the record of a training that has reached a number of steps."""
    return json.dumps({"ddpm": "progress", "task": task, "done": steps})


def stamped(texts: Iterable[str], minute: int = 0) -> list[str]:
    """Return lines of a log with times, a second apart."""
    return [f"2026-01-01T00:{minute:02}:{n:02}.5Z {text}" for n, text in enumerate(texts)]
