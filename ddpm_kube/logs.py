"""The workers' logs while they are written: each line is printed once, with its worker's name.

Also what the records in them (ddpm_core/runtime/log_records.py) say of errors and progress.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NamedTuple, Self

from ddpm_core.console import say
from ddpm_core.runtime import log_records
from ddpm_core.runtime.log_records import Error, Progress
from ddpm_kube.backends import CONTAINERS, worker
from ddpm_kube.cluster import ERRORS, PAUSES, Cluster, Retry
from ddpm_kube.watch import lines

# The time of a line, and its number among the lines of that time: CRI-O gives the same time to all
# lines that it reads at once.
Place = tuple[str, int]

TAIL = 40  # lines kept of each worker; torchrun's own report takes 20
REOPEN_AFTER = 1.0  # seconds after a log ended while its container is still running
CLOCK_SKEW = 300  # seconds that a node's clock may be ahead of the launcher's

_TIMESTAMPED = re.compile(
    r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d) ?(.*)", re.S
)


class Failure(NamedTuple):
    """A start of a worker's processes that failed, however many of them reported the error."""

    pod: str
    message: str
    attempt: str


class Logs:
    """Follows every container of every worker, with a thread each.

    Only one thread may call the methods.
    """

    def __init__(self, cluster: Cluster, print_line: Callable[[str], None] = say) -> None:
        self._cluster, self._print = cluster, print_line
        self._threads: dict[str, threading.Thread] = {}  # by container
        self._running: set[str] = set()  # containers
        self._stopped = threading.Event()
        self._lock = threading.Lock()  # guards everything below, which the threads change
        self._read_to: dict[str, Place] = defaultdict(lambda: ("", 0))  # the last line, by source
        self._tails: dict[str, deque[str]] = defaultdict(lambda: deque(maxlen=TAIL))
        self._furthest_step, self._advanced_at = 0, ("", 0)  # and the line that reported it
        self._failures: dict[Failure, Place] = {}  # later than that line
        self._counts: Counter[tuple[str, str]] = Counter()  # of these, by pod and message
        self._last: tuple[Place, str] = ("", 0), ""  # the latest of them, with its message

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()

    def follow(self, pods: dict[str, dict[str, Any]]) -> None:
        """Start to follow the containers that have started since the last call."""
        running = set()
        for name, pod in pods.items():
            for status in pod["status"].get("containerStatuses", []):
                container = status.get("containerID")
                previous = status.get("lastState", {}).get("terminated", {}).get("containerID")
                if status["name"] not in CONTAINERS:
                    continue
                if previous and previous not in self._threads:
                    self._start(name, pod, previous, is_previous=True)
                if container and container != previous:
                    self._start(name, pod, container, is_previous=False)
                    if "running" in status["state"]:
                        running.add(container)
        self._running = running

    def finish(self, limit: float) -> None:
        """Wait until all logs are read to their ends, at most `limit` seconds."""
        deadline = time.monotonic() + limit
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))

    def tail(self, pod: str) -> list[str]:
        """Return the last lines of a worker."""
        with self._lock:
            return list(self._tails.get(pod, ()))

    def last_error(self) -> str:
        """Return the message of the last failure; empty if training has advanced since."""
        with self._lock:
            place, message = self._last
            return message if place > self._advanced_at else ""

    def failure_counts(self) -> dict[tuple[str, str], int]:
        """Return how often each (pod, message) ended the processes of that pod.

        Only failures since training last reached a new step count.
        """
        with self._lock:
            return dict(self._counts)

    def _start(self, name: str, pod: dict[str, Any], container: str, is_previous: bool) -> None:
        if container in self._threads:
            return
        # A thread may run into the log of the next container before it learns that its own has
        # ended. So the threads of a pod share how far its log is read, except for one that goes
        # back to the previous container.
        source = str(pod["metadata"]["uid"])
        if is_previous:
            with self._lock:
                self._read_to[container] = self._read_to[source]
            source = container
        arguments = (name, container, source, is_previous)
        thread = threading.Thread(target=self._read, args=arguments, daemon=True)
        self._threads[container] = thread
        thread.start()

    def _read(self, pod: str, container: str, source: str, is_previous: bool) -> None:
        """Read the log of one container to its end; a broken connection is opened again."""
        retry = Retry(stopped=self._stopped, patience=self._cluster.patience)
        while not self._stopped.is_set():
            try:
                response = retry(lambda: self._open(pod, source, is_previous))
            except ERRORS:
                return
            retry.permitted = True
            try:
                self._print_new_lines(pod, source, response)
            except ERRORS:
                self._stopped.wait(PAUSES[0])
                continue
            if is_previous or self._stopped.wait(REOPEN_AFTER) or container not in self._running:
                return

    def _open(self, pod: str, source: str, is_previous: bool) -> Any:
        """Start to read a log, from before the last line that was read."""
        with self._lock:
            last, _ = self._read_to[source]
        since = {"since_seconds": _seconds_since(last)} if last else {}
        return self._cluster.core.read_namespaced_pod_log(
            pod,
            self._cluster.namespace,
            container=self._cluster.backend.container,
            follow=not is_previous,
            previous=is_previous,
            timestamps=True,
            **since,
            _preload_content=False,
            _request_timeout=(5, 300),
        )

    def _print_new_lines(self, pod: str, source: str, response: Any) -> None:
        place: Place = ("", 0)
        for line in lines(response):
            if self._stopped.is_set():  # nothing may follow the launcher's own last line
                return
            # A line without a time is the kubelet's own, such as that the log is gone.
            if match := _TIMESTAMPED.fullmatch(line.decode(errors="replace")):
                moment = _sortable(match)
                place = (moment, place[1] + 1 if moment == place[0] else 1)
                self._add(pod, source, place, match[4].rstrip())

    def _add(self, pod: str, source: str, place: Place, text: str) -> None:
        record = log_records.parse(text)
        with self._lock:
            if place <= self._read_to[source]:
                return
            self._read_to[source] = place
            if record is None:
                self._tails[pod].append(text)
            else:
                self._learn(pod, place, record)
        if record is None:
            self._print(f"[{worker(pod)}] {text}")

    def _learn(self, pod: str, place: Place, record: Error | Progress) -> None:
        """Count a failure, or forget those that training has left behind.

        Logs are read side by side, so the times of lines decide, and not when they are read.
        """
        if isinstance(record, Error):
            failure = Failure(pod, record.message, record.attempt)
            if place > self._advanced_at and failure not in self._failures:
                self._failures[failure] = place
                self._counts[pod, record.message] += 1
            self._last = max(self._last, (place, record.message))
        elif record.task == "train" and record.done > self._furthest_step:
            self._furthest_step = record.done
            self._advanced_at = max(self._advanced_at, place)
            later = {f: at for f, at in self._failures.items() if at > self._advanced_at}
            self._failures = later
            self._counts = Counter((failure.pod, failure.message) for failure in later)


def _sortable(match: re.Match[str]) -> str:
    """Return an RFC 3339 time with all nine digits, so that times of a node compare as text."""
    return f"{match[1]}.{match[2] or '':0<9}{match[3]}"


def _seconds_since(moment: str) -> int:
    """Return more seconds than have passed: repeated lines are skipped, missing ones are lost."""
    then = datetime.fromisoformat(moment)
    return max(1, int((datetime.now(UTC) - then).total_seconds()) + CLOCK_SKEW)
