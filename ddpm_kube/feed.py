"""A job, its pods and events as they change: a list, then a watch that goes on where it broke."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from kubernetes.client.exceptions import ApiException

from ddpm_core.console import warn
from ddpm_core.errors import UserError
from ddpm_kube.answers import FAILURES, PATIENCE, Backoff, passing, plain, refused, said
from ddpm_kube.cluster import Cluster
from ddpm_kube.job import GROUP, PLURAL, VERSION

ROUND = 50  # seconds after which a watch that heard nothing begins anew
TIMES = (5, ROUND + 15)
JOB_LABEL = "training.kubeflow.org/job-name"

Plain = dict[str, Any]


class LostSight(UserError):
    """What the job does cannot be seen; it may well be at work."""


@dataclass
class View:
    """What is known; `events` are those of this very job and its pods, gone ones included.

    `last` is how each pod was seen last: the operator deletes those of a job that failed.
    """

    job: Plain | None = None
    pods: dict[str, Plain] = field(default_factory=dict)
    last: dict[str, Plain] = field(default_factory=dict)
    events: list[Plain] = field(default_factory=list)
    events_shown: bool = True  # the launcher may read them
    _uids: set[str] = field(default_factory=set)
    _others: list[Plain] = field(default_factory=list)

    def take(self, kind: str, change: str, thing: Plain) -> None:
        if kind == "events":
            self._others.append(thing)
        elif kind == "jobs":
            self.job = None if change == "DELETED" else thing
        elif change == "DELETED":
            self.pods.pop(thing["metadata"]["name"], None)
        else:
            self.pods[thing["metadata"]["name"]] = self.last[thing["metadata"]["name"]] = thing
        if kind != "events":
            self._uids.add(thing["metadata"]["uid"])
        self._sort_events()

    def forget_absent(self, kind: str, there: set[str]) -> None:
        """A list has come, in which some that were known are missing."""
        if kind == "pods":
            self.pods = {name: pod for name, pod in self.pods.items() if name in there}
        if kind == "jobs" and not there:
            self.job = None

    def _sort_events(self) -> None:
        """An event may come before the pod that it is about."""
        mine = [e for e in self._others if e["involvedObject"].get("uid") in self._uids]
        known = {event["metadata"]["uid"]: at for at, event in enumerate(self.events)}
        for event in mine:
            at = known.get(event["metadata"]["uid"])
            if at is None:
                self.events.append(event)
            else:
                self.events[at] = event
        if mine:
            self._others = [e for e in self._others if e not in mine]


class Feed:
    """Follows one job into a View, by a thread for each kind of thing."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.view = View()
        self._name = name
        self._changes: queue.SimpleQueue[tuple[str, str, Any]] = queue.SimpleQueue()
        self._stopped = threading.Event()
        space = cluster.namespace
        self._sources: dict[str, Callable[..., Any]] = {
            "jobs": partial(
                cluster.jobs.list_namespaced_custom_object,
                *(GROUP, VERSION, space, PLURAL),
                field_selector=f"metadata.name={name}",
            ),
            "pods": partial(
                cluster.core.list_namespaced_pod, space, label_selector=f"{JOB_LABEL}={name}"
            ),
            "events": partial(cluster.core.list_namespaced_event, space),
        }

    def __enter__(self) -> Self:
        for kind in self._sources:
            threading.Thread(target=self._follow, args=(kind,), name=kind, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()

    def wait(self, seconds: float) -> View:
        """The view after the changes that came within a while. Raises UserError."""
        with_limit: dict[str, Any] = {"timeout": seconds}
        try:
            while True:
                kind, change, thing = self._changes.get(**with_limit)
                with_limit = {"block": False}
                if change == "FAILED" and kind == "events" and not isinstance(thing, LostSight):
                    self.view.events_shown = False
                    warn(f"{thing} Without them a refused pod can't be explained.")
                elif change == "FAILED":
                    raise thing
                elif change == "LISTED":
                    self.view.forget_absent(kind, thing)
                else:
                    self.view.take(kind, change, thing)
        except queue.Empty:
            return self.view

    def _follow(self, kind: str) -> None:
        """List and watch to the end; whatever else ends it is told: nothing goes stale unseen."""
        backoff = Backoff(self._stopped.wait)
        try:
            self._look(kind, self._sources[kind], backoff)
        except Exception as error:
            self._changes.put((kind, "FAILED", self._sentence(error, kind, backoff.answered)))

    def _look(self, kind: str, call: Callable[..., Any], backoff: Backoff) -> None:
        """List, watch; list again after an outage, or when what was known is too old (410)."""
        while not self._stopped.is_set():
            try:
                version = self._list(kind, call)
                while not self._stopped.is_set():
                    version = self._watch(kind, call, version, backoff)
            except FAILURES as error:
                too_old = getattr(error, "status", None) == 410
                told = "" if too_old else f"The API server tells of {kind} no more"
                if not backoff.passes(error, told):
                    raise

    def _sentence(self, error: Exception, kind: str, watched: bool) -> Exception:
        """Of what was watched once a refusal says nothing about the job, which is not to go."""
        if not isinstance(error, FAILURES):
            what = f"What the API server tells of {kind} is not understood ({error!r})."
        elif passing(error):
            what = f"The API server did not answer for {PATIENCE:.0f} s ({said(error)})."
        elif watched:
            what = f"The API server has ceased to tell of {kind} ({said(error)})."
        else:
            return refused(error, f"watch {kind}")
        return LostSight(
            f"{what} Whether the job {self._name} goes on is not known; the same command follows "
            "it again."
        )

    def _list(self, kind: str, call: Callable[..., Any]) -> str:
        page = plain(call(_preload_content=False, _request_timeout=TIMES))
        there = set()
        for thing in page["items"]:
            if self._concerns(kind, thing):
                there.add(thing["metadata"]["name"])
                self._changes.put((kind, "ADDED", thing))
        self._changes.put((kind, "LISTED", there))
        return str(page["metadata"]["resourceVersion"])

    def _watch(self, kind: str, call: Callable[..., Any], version: str, backoff: Backoff) -> str:
        """Pass on what happens until the server ends the watch; the version to go on from."""
        response = call(
            watch=True,
            resource_version=version,
            timeout_seconds=ROUND,
            allow_watch_bookmarks=True,
            _preload_content=False,
            _request_timeout=TIMES,
        )
        backoff.over()
        for line in lines(response):
            event = json.loads(line)
            change, thing = event["type"], event["object"]
            if change == "ERROR":
                raise ApiException(status=thing.get("code", 500), reason=thing.get("message"))
            version = thing["metadata"]["resourceVersion"]
            if change != "BOOKMARK" and self._concerns(kind, thing):
                self._changes.put((kind, change, thing))
        return version

    def _concerns(self, kind: str, thing: Plain) -> bool:
        """Events can't be selected by the start of a name: those of the job and of its pods."""
        if kind != "events":
            return True
        about = str(thing["involvedObject"].get("name", ""))
        return about == self._name or about.startswith(f"{self._name}-worker-")


def lines(response: Any) -> Iterator[bytes]:
    """The lines of an answer that goes on and on, each as soon as it is whole."""
    rest = b""
    try:
        for part in response.stream(amt=None, decode_content=False):
            *whole, rest = (rest + part).split(b"\n")
            yield from whole
        if rest:
            yield rest
    finally:
        response.close()
        response.release_conn()
