"""A job, its pods and its events as they change: a list, then watches that continue from it.

This module does not use kubernetes.watch.Watch (30.1): it ignores bookmarks, so a quiet watch
expires, and raises KeyError for an ERROR without the optional `reason`.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from kubernetes.client.exceptions import ApiException

from ddpm_core.config.durations import in_words
from ddpm_core.console import warn
from ddpm_core.errors import Unavailable
from ddpm_kube.cluster import (
    ERRORS,
    EXPIRED,
    PAUSES,
    RETRY_FOR,
    Cluster,
    Retry,
    error_message,
    explained,
    is_transient,
    parse,
)

WATCH_SECONDS = 50  # after which the server ends a watch, and the next one starts
TIMEOUTS = (5, WATCH_SECONDS + 15)  # seconds: to connect, and to read
WORKLOAD = "Workload"  # the object with which Kueue queues a job, named KIND-JOB-HASH

Json = dict[str, Any]


class WatchLost(Unavailable):
    """The job cannot be watched any more; it may well be running."""


@dataclass
class View:
    """What is known of a job. Names of pods are keys.

    `last_seen` keeps each pod's last state: controllers delete the pods of a failed job.
    `events` are those of this job, its pods, deleted pods included, and of the objects of `kinds`,
    which the launcher does not watch.
    """

    job: Json | None = None
    pods: dict[str, Json] = field(default_factory=dict)
    last_seen: dict[str, Json] = field(default_factory=dict)
    events: list[Json] = field(default_factory=list)
    events_readable: bool = True  # whether the launcher may read events
    kinds: tuple[str, ...] = (WORKLOAD,)
    _uids: set[str] = field(default_factory=set)
    _unmatched: list[Json] = field(default_factory=list)  # events of other objects, or not yet

    def update(self, kind: str, change: str, item: Json) -> None:
        """Apply a change (ADDED, MODIFIED, DELETED) of one of "jobs", "pods" or "events"."""
        if kind == "events":
            self._unmatched.append(item)
        elif kind == "jobs":
            self.job = None if change == "DELETED" else item
        elif change == "DELETED":
            self.pods.pop(item["metadata"]["name"], None)
        else:
            name = item["metadata"]["name"]
            self.pods[name] = self.last_seen[name] = item
        if kind != "events":
            self._uids.add(item["metadata"]["uid"])
        self._match_events()

    def keep_only(self, kind: str, names: set[str]) -> None:
        """Drop what a new list does not contain: it was deleted while nothing was watched."""
        if kind == "pods":
            self.pods = {name: pod for name, pod in self.pods.items() if name in names}
        if kind == "jobs" and not names:
            self.job = None

    def _match_events(self) -> None:
        """Move events whose object is known to `events`; an event may arrive before its pod."""
        known = {event["metadata"]["uid"]: at for at, event in enumerate(self.events)}
        unmatched = []
        for event in self._unmatched:
            if not self._is_ours(event):
                unmatched.append(event)
            elif (uid := event["metadata"]["uid"]) in known:
                self.events[known[uid]] = event
            else:
                known[uid] = len(self.events)
                self.events.append(event)
        self._unmatched = unmatched

    def _is_ours(self, event: Json) -> bool:
        """Return whether an event is about this job, not an earlier one of its name."""
        about = event["involvedObject"]
        if about.get("uid") in self._uids:
            return True
        created = self.job["metadata"].get("creationTimestamp", "") if self.job else None
        return about.get("kind") in self.kinds and created is not None and moment(event) >= created


class JobWatch:
    """Watches one job into a View, with a thread each for the job, its pods and its events."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._backend = cluster.backend
        self.view = View(kinds=(WORKLOAD, *self._backend.children))
        self._name = name
        self._changes: queue.SimpleQueue[tuple[str, str, Any]] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._limit = max(RETRY_FOR, cluster.patience)
        namespace, kind = cluster.namespace, self._backend
        self._calls: dict[str, Callable[..., Any]] = {
            "jobs": partial(
                cluster.jobs.list_namespaced_custom_object,
                *(kind.group, kind.version, namespace, kind.plural),
                field_selector=f"metadata.name={name}",
            ),
            "pods": partial(
                cluster.core.list_namespaced_pod,
                namespace,
                label_selector=f"{kind.job_label}={name}",
            ),
            "events": partial(cluster.core.list_namespaced_event, namespace),
        }
        self._retries = {
            kind: Retry(f"watch {kind}", self._stopped, cluster.patience) for kind in self._calls
        }

    def __enter__(self) -> Self:
        for kind in self._calls:
            threading.Thread(target=self._run, args=(kind,), name=kind, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()

    @property
    def is_current(self) -> bool:
        """Return False while requests fail: the view may be out of date."""
        return not any(retry.failing for retry in self._retries.values())

    def wait(self, seconds: float) -> View:
        """Return the view after the next changes, at most `seconds` later.

        Raises UserError if watching the job or its pods failed; see `_explain`.
        """
        limit: dict[str, Any] = {"timeout": seconds}
        try:
            while True:
                kind, change, item = self._changes.get(**limit)
                limit = {"block": False}
                if change == "FAILED" and kind == "events" and not isinstance(item, WatchLost):
                    self.view.events_readable = False
                    warn(f"{item} Without events the launcher cannot explain refused pods.")
                elif change == "FAILED":
                    raise item
                elif change == "LISTED":
                    self.view.keep_only(kind, item)
                else:
                    self.view.update(kind, change, item)
        except queue.Empty:
            return self.view

    def _run(self, kind: str) -> None:
        """List and watch until stopped. An error that lasts is passed on to `wait`."""
        retry = self._retries[kind]
        try:
            while not self._stopped.is_set():
                self._list_and_watch(kind, retry)
        except Exception as error:
            self._changes.put((kind, "FAILED", self._explain(error, kind, retry.permitted)))

    def _list_and_watch(self, kind: str, retry: Retry) -> None:
        """List, then watch until a watch breaks off or its version has expired."""
        version = self._list(kind, retry)
        while not self._stopped.is_set():
            try:
                response = self._open(kind, version, retry)
            except ApiException as error:
                if error.status != EXPIRED:
                    raise
                break
            try:
                version = self._pass_on(kind, version, response)
            except ERRORS:
                break
        self._stopped.wait(PAUSES[0])

    def _list(self, kind: str, retry: Retry) -> str:
        """Pass on all items, and return the version from which a watch continues."""
        call, names = self._calls[kind], set()
        page = retry(lambda: parse(call(_preload_content=False, _request_timeout=TIMEOUTS)))
        for item in page["items"]:
            if self._concerns(kind, item):
                names.add(item["metadata"]["name"])
                self._changes.put((kind, "ADDED", item))
        self._changes.put((kind, "LISTED", names))
        return str(page["metadata"]["resourceVersion"])

    def _open(self, kind: str, version: str, retry: Retry) -> Any:
        """Start a watch, and return its response."""
        call = partial(
            self._calls[kind],
            watch=True,
            resource_version=version,
            timeout_seconds=WATCH_SECONDS,
            allow_watch_bookmarks=True,
            _preload_content=False,
            _request_timeout=TIMEOUTS,
        )
        response = retry(call)
        retry.permitted = True
        return response

    def _pass_on(self, kind: str, version: str, response: Any) -> str:
        """Pass on changes until the server ends the watch; return the version to continue from."""
        for line in lines(response):
            event = json.loads(line)
            change, item = event["type"], event["object"]
            if change == "ERROR":
                raise ApiException(status=item.get("code", 500), reason=item.get("message"))
            version = item["metadata"]["resourceVersion"]
            if change != "BOOKMARK" and self._concerns(kind, item):
                self._changes.put((kind, change, item))
        return version

    def _concerns(self, kind: str, item: Json) -> bool:
        """Return whether an event may be about this job: no selector takes a prefix of a name."""
        if kind != "events":
            return True
        about = str(item["involvedObject"].get("name", ""))
        if item["involvedObject"].get("kind") == WORKLOAD:
            return about.startswith(f"{self._backend.name}-{self._name}-")
        return about == self._name or about.startswith(f"{self._name}-{self._backend.parts}-")

    def _explain(self, error: Exception, kind: str, was_permitted: bool) -> Exception:
        """Return the exception that `wait` raises.

        It is WatchLost, which leaves the job alone, unless the first request was refused: a later
        error of the API server does not mean that the job has failed.
        """
        if not isinstance(error, ERRORS):
            what = f"Cannot read the API server's response about {kind} ({error!r})."
        elif is_transient(error):
            message = error_message(error)
            what = f"The API server did not respond for {in_words(self._limit)} ({message})."
        elif was_permitted:
            what = f"The API server no longer permits to watch {kind} ({error_message(error)})."
        else:
            return explained(error, f"watch {kind}")
        return WatchLost(
            f"{what} The job {self._name} may still be running; run the same command to follow it "
            "again."
        )


def moment(event: Json) -> str:
    """Return the time of an event's last occurrence."""
    return str(event.get("lastTimestamp") or event.get("eventTime") or "")


def lines(response: Any) -> Iterator[bytes]:
    """Yield the lines of a streaming response, each as soon as it is complete."""
    rest = b""
    try:
        for part in response.stream(amt=None, decode_content=False):
            *complete, rest = (rest + part).split(b"\n")
            yield from complete
        if rest:
            yield rest
    finally:
        response.close()
        response.release_conn()
