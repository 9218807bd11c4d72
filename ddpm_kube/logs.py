"""The workers' logs as they are written, each line with its worker's name, each once."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Self

import urllib3
from kubernetes.client.exceptions import ApiException

from ddpm_core.console import say
from ddpm_kube.cluster import PATIENCE, Cluster, passing
from ddpm_kube.feed import lines
from ddpm_kube.job import CONTAINER

TAIL = 40  # lines kept of each worker; torchrun's own report takes 20
OURS = "ddpm train: "  # begins the sentence with which our program ends


class Logs:
    """Follows every container of every worker, by a thread each."""

    def __init__(self, cluster: Cluster, tell: Callable[[str], None] = say) -> None:
        self._cluster, self._tell = cluster, tell
        self._followed: dict[str, threading.Thread] = {}
        self._running: set[str] = set()
        self._stopped = threading.Event()
        self.tails: dict[str, deque[str]] = defaultdict(lambda: deque(maxlen=TAIL))
        self.sentences: dict[str, Counter[str]] = defaultdict(Counter)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()

    def follow(self, pods: dict[str, dict[str, Any]]) -> None:
        """Begin with the containers that have started since the last call."""
        running = set()
        for name, pod in pods.items():
            for status in pod["status"].get("containerStatuses", []):
                container = status.get("containerID")
                before = status.get("lastState", {}).get("terminated", {}).get("containerID")
                if status["name"] != CONTAINER:
                    continue
                if before and before not in self._followed:
                    self._begin(name, before, previous=True)
                if container and container != before:
                    self._begin(name, container, previous=False)
                    if "running" in status["state"]:
                        running.add(container)
        self._running = running

    def finish(self, limit: float) -> None:
        """Wait until everything that was written so far is here."""
        deadline = time.monotonic() + limit
        for thread in self._followed.values():
            thread.join(max(0.0, deadline - time.monotonic()))

    def _begin(self, pod: str, container: str, previous: bool) -> None:
        if container in self._followed:
            return
        thread = threading.Thread(target=self._read, args=(pod, container, previous), daemon=True)
        self._followed[container] = thread
        thread.start()

    def _read(self, pod: str, container: str, previous: bool) -> None:
        """One container's log to its end; a connection that breaks is taken up where it broke."""
        last, failed = "", 0.0
        while not self._stopped.is_set():
            try:
                last = self._stream(pod, previous, last)
                failed = 0.0
            except (ApiException, urllib3.exceptions.HTTPError, OSError) as error:
                failed = failed or time.monotonic()
                if not passing(error) or time.monotonic() - failed > PATIENCE:
                    return
            if previous or container not in self._running:
                return
            self._stopped.wait(1.0)

    def _stream(self, pod: str, previous: bool, last: str) -> str:
        """Pass on the lines after the moment `last`; the moment of the last one."""
        since = {"since_seconds": _seconds_since(last)} if last else {}
        response = self._cluster.core.read_namespaced_pod_log(
            pod,
            self._cluster.namespace,
            container=CONTAINER,
            follow=not previous,
            previous=previous,
            timestamps=True,
            **since,
            _preload_content=False,
            _request_timeout=(5, 300),
        )
        for line in lines(response):
            at, _, text = line.decode(errors="replace").partition(" ")
            moment = _sortable(at)
            if moment > last:
                last = moment
                self._add(pod, text.rstrip())
        return last

    def _add(self, pod: str, text: str) -> None:
        self.tails[pod].append(text)
        if text.startswith(OURS):
            self.sentences[pod][text.removeprefix(OURS)] += 1
        self._tell(f"[{short(pod)}] {text}")


def short(pod: str) -> str:
    """worker-0 of NAME-worker-0."""
    return "-".join(pod.rsplit("-", 2)[1:])


def _sortable(moment: str) -> str:
    """An RFC 3339 time with all nine digits, so that times compare as texts do."""
    whole, _, fraction = moment.rstrip("Z").partition(".")
    return f"{whole}.{fraction:0<9}"


def _seconds_since(moment: str) -> int:
    then = datetime.fromisoformat(moment[:19]).replace(tzinfo=UTC)
    return max(1, int((datetime.now(UTC) - then).total_seconds()) + 2)
