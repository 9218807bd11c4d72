"""Whether a job can still succeed: what is told as it goes, and what ends it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from ddpm_core.console import say
from ddpm_kube.feed import View
from ddpm_kube.job import HASH
from ddpm_kube.logs import Logs, short
from ddpm_kube.reasons import (
    Problem,
    condition,
    ended,
    of_event,
    of_pod,
    running,
    said,
    whose,
)
from ddpm_kube.spec import JobSpec

# Times that a worker may end with the same sentence, however many its processes, before training
# has come any further.
SAME = 3

LONGEST = 300  # characters of an event that is passed on; the operator quotes whole logs
NOBODY = 45.0  # seconds that the operator may take until it does anything
FRESH = 60.0  # seconds, beside the patience, after which a refusal counts as over

# Warnings that are sentences of reasons.py, or states of a pod.
_TOLD_ELSEWHERE = {"FailedScheduling", "Unschedulable", "Failed", "BackOff"}
_TOLD_ELSEWHERE |= {"FailedCreatePod", "FailedCreateService"}
# Told in this order, the cause before its consequences.
_ORDER = ("OOMKilled", "InvalidImageName", "ErrImageNeverPull", "ErrImagePull", "ImagePullBackOff")


class Judge:
    """Looks at a job again and again; keeps since when it has which problem.

    A problem that may pass (no room, no quota, an image that can't be had) ends the job when it
    has lasted `patience` seconds and fewer than min_replicas run: with enough workers, training
    goes on without the others.
    """

    def __init__(self, spec: JobSpec, patience: float, tell: Callable[[str], None] = say) -> None:
        self._spec, self._patience, self._tell = spec, patience, tell
        self._since: dict[tuple[str, str], float] = {}
        self._told: set[str] = set()
        self._states: dict[str, str] = {}
        self._waited: dict[str, float] = {}  # since when the operator lets us wait for what
        self._suspended = False
        self._seen: dict[str, tuple[int, float]] = {}

    def verdict(self, view: View, logs: Logs, now: float) -> str:
        """The sentence that ends the job; empty while there is hope. Tells what is new.

        `now` is a clock's reading in seconds.
        """
        self._tell_changes(view)
        state, message = condition(view.job)
        if state == "Suspended":
            if not self._suspended:
                self._tell(f"The job is suspended{self._queue()}; waiting until it is resumed.")
            self._suspended = True
            self._since.clear()
            self._waited.clear()
            return ""
        self._suspended = False
        found = list(problems(view, self._fresh(view, now)))
        if state == "Failed":
            return _why_failed(view, logs, message, found)
        return (
            self._nobody_acts(view, state, now)
            or self._problem(view, found, now)
            or self._not_made(view, now)
            or _same(logs)
        )

    def _problem(self, view: View, found: list[Problem], now: float) -> str:
        self._since = {p.key: self._since.get(p.key, now) for p in found}
        alive = sum(running(pod) for pod in view.pods.values())
        lasting = [p for p in found if p.at_once or now - self._since[p.key] >= self._patience]
        for problem in found:
            self._once(problem.sentence)
        first = _foremost([p for p in lasting if p.at_once]) or _foremost(lasting)
        if first is None:
            return ""
        if not first.at_once and alive >= self._spec.options.min_replicas:
            self._once(
                f"{alive} workers run, and {self._spec.options.min_replicas} are enough: "
                f"training goes on without {first.worker}."
            )
            return ""
        return first.sentence

    def _nobody_acts(self, view: View, state: str, now: float) -> str:
        touched = bool(state or view.pods or view.events)
        if not self._lasts("touch", bool(view.job and view.events_shown and not touched), now):
            return ""
        return (
            f"Nobody has taken up the job for {NOBODY:.0f} s: the Training Operator does not run, "
            "or does not look after this namespace. See "
            "`kubectl -n kubeflow get deployment training-operator`."
        )

    def _not_made(self, view: View, now: float) -> str:
        """For want of events, which say why, that there are no pods has to do."""
        few = len(view.pods) < self._spec.options.min_replicas
        if not self._lasts("pods", few and not view.events_shown, now):
            return ""
        return (
            f"The operator has made no pods for {NOBODY:.0f} s. It does not run, or a quota, Pod "
            "Security or the like refuses them; this launcher may not read the events, which say "
            f"so: kubectl -n {self._spec.namespace} describe pytorchjob {self._spec.name}"
        )

    def _lasts(self, what: str, lacks: bool, now: float) -> bool:
        """Whether that has lacked at each look for NOBODY seconds."""
        if not lacks:
            self._waited.pop(what, None)
            return False
        return now - self._waited.setdefault(what, now) >= NOBODY

    def _fresh(self, view: View, now: float) -> list[dict[str, Any]]:
        """The events that came, or came again, a short while ago."""
        fresh = []
        for event in view.events:
            key, count = event["metadata"]["uid"], event.get("count") or 1
            if self._seen.get(key, (0, 0.0))[0] != count:
                self._seen[key] = count, now
            if now - self._seen[key][1] < FRESH + self._patience:
                fresh.append(event)
        return fresh

    def _tell_changes(self, view: View) -> None:
        state = condition(view.job)[0]
        now = {short(name): ended(pod) for name, pod in view.pods.items()}
        # A job that is resumed has no state for a moment.
        now |= {"job": last} if (last := state or self._states.get("job", "")) else {}
        for name, what in sorted(now.items()):
            if self._states.get(name) != what:
                self._tell(f"{name}: {what}")
        for name in sorted(set(self._states) - set(now)):
            self._tell(f"{name}: gone")
        self._states = now
        for event in view.events:
            if event.get("type") == "Warning" and event["reason"] not in _TOLD_ELSEWHERE:
                self._once(f"{whose(event)}: {event['reason']}: {said(event)[:LONGEST]}")

    def _once(self, sentence: str) -> None:
        """A number in a message may grow while it stays the same message."""
        if (key := re.sub(r"\d+(\.\d+)?(m?s|m)\b", "", sentence)) not in self._told:
            self._told.add(key)
            self._tell(sentence)

    def _queue(self) -> str:
        queue = self._spec.options.queue
        return f" (Kueue's queue {queue} has not admitted it)" if queue else ""


def problems(view: View, fresh: list[dict[str, Any]]) -> Iterable[Problem]:
    """Those of the pods that are there, and of the ones that could not be made."""
    for name, pod in view.pods.items():
        yield from of_pod(name, pod)
    there = {short(name) for name in view.pods}
    for event in fresh:
        yield from (p for p in of_event(event) if p.worker not in there)


def differs(job: dict[str, object], wanted: dict[str, object]) -> bool:
    """Whether a job that is there was made of another spec."""

    def mark(one: dict[str, object]) -> object:
        metadata = one["metadata"]
        assert isinstance(metadata, dict)
        return metadata.get("annotations", {}).get(HASH)

    return mark(job) != mark(wanted)


def _why_failed(view: View, logs: Logs, message: str, found: list[Problem]) -> str:
    """The cause of a job's failure, as near to it as can be seen."""
    first = _foremost([p for p in found if p.at_once])
    if first:
        return first.sentence
    parts = [f"{short(name)}: {ended(pod)}" for name, pod in sorted(view.last.items())]
    own = logs.newest_sentence()
    how = f"The workers last ended with: {own}" if own else "; ".join(parts)
    return f"The job failed: {message}. {how}".rstrip(". ") + "."


def _foremost(found: list[Problem]) -> Problem | None:
    def rank(problem: Problem) -> int:
        return _ORDER.index(problem.reason) if problem.reason in _ORDER else len(_ORDER)

    return min(found, key=rank, default=None)


def _same(logs: Logs) -> str:
    """A sentence of our program that comes again and again: another start would say it too."""
    for (pod, sentence), count in logs.ends().items():
        if count >= SAME:
            return f"{short(pod)} ended {count} times with: {sentence}"
    return ""
