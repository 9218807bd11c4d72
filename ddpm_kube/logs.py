"""The workers' logs as they are written, each line with its worker's name, each once."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Self

from ddpm_core.console import say
from ddpm_kube.answers import FAILURES, Backoff
from ddpm_kube.cluster import Cluster
from ddpm_kube.feed import lines
from ddpm_kube.job import CONTAINER

# A line's moment, and its number among those of that moment: CRI-O gives one to all lines that it
# read at once.
Place = tuple[str, int]

TAIL = 40  # lines kept of each worker; torchrun's own report takes 20
AGAIN = 1.0  # seconds after which a log that ended is looked at again, if its container runs
OURS = "ddpm train: "  # begins the sentence with which our program ends
SKEW = 300  # seconds that a node's clock may be ahead of the launcher's
# torchrun says so once when processes of its pod have failed, after what they said themselves.
FAILED = "] failed (exitcode: "

_STEPS = re.compile(r"train: (\d+)/\d+ steps")  # our program's progress
_STAMPED = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d) ?(.*)", re.S)


class Logs:
    """Follows every container of every worker, by a thread each.

    Its methods are for one thread, and what they return is nobody else's.
    """

    def __init__(self, cluster: Cluster, tell: Callable[[str], None] = say) -> None:
        self._cluster, self._tell = cluster, tell
        self._followed: dict[str, threading.Thread] = {}
        self._running: set[str] = set()
        self._stopped = threading.Event()
        self._lock = threading.Lock()  # of all below, which the threads change
        self._read_to: dict[str, Place] = defaultdict(lambda: ("", 0))  # the last line, by source
        self._tails: dict[str, deque[str]] = defaultdict(lambda: deque(maxlen=TAIL))
        self._sentences: dict[str, set[str]] = defaultdict(set)  # of processes about to end
        self._ended: list[tuple[Place, str, str]] = []  # of a pod's processes, with a sentence
        self._ends: Counter[tuple[str, str]] = Counter()  # the same, counted
        self._newest: tuple[Place, str] = ("", 0), ""
        self._furthest, self._advanced = 0, ("", 0)  # the highest step, and where that was said

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
                    self._begin(name, pod, before, previous=True)
                if container and container != before:
                    self._begin(name, pod, container, previous=False)
                    if "running" in status["state"]:
                        running.add(container)
        self._running = running

    def finish(self, limit: float) -> None:
        """Wait until everything that was written so far is here."""
        deadline = time.monotonic() + limit
        for thread in self._followed.values():
            thread.join(max(0.0, deadline - time.monotonic()))

    def tail(self, pod: str) -> list[str]:
        """The last lines of a worker."""
        with self._lock:
            return list(self._tails.get(pod, ()))

    def newest_sentence(self) -> str:
        """The last one with which a process of any worker ended; empty if none said one, or if
        training has come further since."""
        with self._lock:
            place, sentence = self._newest
            return sentence if place > self._advanced else ""

    def ends(self) -> dict[tuple[str, str], int]:
        """How often each (pod, sentence) ended the processes of that pod, however many they are,
        since training came further than ever before."""
        with self._lock:
            return dict(self._ends)

    def _begin(self, name: str, pod: dict[str, Any], container: str, previous: bool) -> None:
        if container in self._followed:
            return
        # A thread may run into the log of the next container before it hears that its own has
        # ended. So all of a pod share how far its log is read, but for one that goes back.
        source = str(pod["metadata"]["uid"])
        if previous:
            with self._lock:
                self._read_to[container] = self._read_to[source]
            source = container
        thread = threading.Thread(
            target=self._read, args=(name, container, source, previous), daemon=True
        )
        self._followed[container] = thread
        thread.start()

    def _read(self, pod: str, container: str, source: str, previous: bool) -> None:
        """One container's log to its end; a connection that breaks is taken up where it broke."""
        backoff = Backoff(self._stopped.wait)
        while not self._stopped.is_set():
            try:
                self._stream(pod, source, previous, backoff)
            except FAILURES as error:
                if not backoff.passes(error):
                    return
            else:
                if previous or self._stopped.wait(AGAIN) or container not in self._running:
                    return

    def _stream(self, pod: str, source: str, previous: bool, backoff: Backoff) -> None:
        """Pass on the lines that have not been passed on yet."""
        with self._lock:
            last, _ = self._read_to[source]
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
        backoff.over()
        place: Place = ("", 0)
        for line in lines(response):
            if self._stopped.is_set():  # the last line is the launcher's own
                return
            # What has no time is the kubelet's own, such as that the log is no longer there.
            if stamped := _STAMPED.fullmatch(line.decode(errors="replace")):
                moment = _sortable(stamped)
                place = (moment, place[1] + 1 if moment == place[0] else 1)
                self._add(pod, source, place, stamped[4].rstrip())

    def _add(self, pod: str, source: str, place: Place, text: str) -> None:
        with self._lock:
            if place <= self._read_to[source]:
                return
            self._read_to[source] = place
            self._tails[pod].append(text)
            self._learn(pod, place, text)
        self._tell(f"[{short(pod)}] {text}")

    def _learn(self, pod: str, place: Place, text: str) -> None:
        """What a line says of ends and progress. Logs are read side by side: their times count."""
        if text.startswith(OURS):
            sentence = text.removeprefix(OURS)
            self._newest = max(self._newest, (place, sentence))
            self._sentences[pod].add(sentence)
        elif FAILED in text:
            self._count([(place, pod, sentence) for sentence in self._sentences.pop(pod, ())])
        elif (steps := _STEPS.match(text)) and int(steps[1]) > self._furthest:
            self._furthest, self._advanced = int(steps[1]), max(self._advanced, place)
            known, self._ended = self._ended, []
            self._ends.clear()
            self._count(known)

    def _count(self, ends: list[tuple[Place, str, str]]) -> None:
        """Add ends, but for those from which training went on."""
        ends = [end for end in ends if end[0] > self._advanced]
        self._ended += ends
        self._ends.update((pod, sentence) for _, pod, sentence in ends)


def short(pod: str) -> str:
    """worker-0 of NAME-worker-0."""
    return "-".join(pod.rsplit("-", 2)[1:])


def _sortable(stamped: re.Match[str]) -> str:
    """An RFC 3339 time with all nine digits, so that times of a node compare as texts do."""
    return f"{stamped[1]}.{stamped[2] or '':0<9}{stamped[3]}"


def _seconds_since(moment: str) -> int:
    """More than have passed: what comes twice is passed over, and what does not come is lost."""
    then = datetime.fromisoformat(moment)
    return max(1, int((datetime.now(UTC) - then).total_seconds()) + SKEW)
