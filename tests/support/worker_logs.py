"""Logs of workers as an API server sends them, for the tests of the launcher."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from ddpm_kube.logs import Logs

POD = "run-worker-0"
SENTENCE = "There are no prepared data."
Read = Callable[..., Iterable[str]]


class Answer:
    """A response of the API server with the lines of a log. `lines` may raise or block."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = lines

    def stream(self, **_: object) -> Iterator[bytes]:
        for line in self._lines:
            yield f"{line}\n".encode()

    def close(self) -> None:
        """Do nothing."""

    release_conn = close


def followed(read: Read) -> tuple[Logs, list[str]]:
    """Return Logs of a server that sends the lines of `read`, and the list they print to."""
    told: list[str] = []

    def answer(*_: object, previous: bool, **__: object) -> Answer:
        return Answer(read(previous))

    core = SimpleNamespace(read_namespaced_pod_log=answer)
    cluster: Any = SimpleNamespace(namespace="ddpm", core=core)
    return Logs(cluster, told.append), told


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


def stamped(texts: Iterable[str], minute: int = 0) -> list[str]:
    """Return texts as log lines with timestamps, one second apart."""
    return [f"2026-01-01T00:{minute:02}:{n:02}.5Z {text}" for n, text in enumerate(texts)]
