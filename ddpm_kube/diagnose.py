"""Why a job fails, or cannot start: what its condition, its pods, events and logs say."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ddpm_core.console import say
from ddpm_kube.job import CONTAINER
from ddpm_kube.logs import Logs, short
from ddpm_kube.spec import JobSpec
from ddpm_kube.watch import View

Json = dict[str, Any]

# A worker that ends this often with the same error, without any progress in between, would fail
# with it again.
SAME_ERROR_LIMIT = 3
MAX_EVENT = 300  # characters of an event's message; the operator quotes entire logs
OPERATOR_TIMEOUT = 45.0  # seconds until the operator must have done something
FRESH = 60.0  # seconds, in addition to the patience, after which a refusal counts as over

# Kubernetes' own words
IMAGE_REASONS = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"}
START_REASONS = {
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
    "StartError",
    "ContainerCannotRun",
}
# Warnings that are not printed, because a Problem or the state of a pod contains the same.
_COVERED = {"FailedScheduling", "Unschedulable", "Failed", "BackOff"}
_COVERED |= {"FailedCreatePod", "FailedCreateService"}
# Causes come before their consequences.
_ORDER = ("OOMKilled", "InvalidImageName", "ErrImageNeverPull", "ErrImagePull", "ImagePullBackOff")


@dataclass(frozen=True)
class Problem:
    """Why a worker does not run. `reason` is Kubernetes' own word.

    `permanent`: waiting cannot solve it.
    """

    worker: str
    reason: str
    message: str
    permanent: bool = False

    @property
    def key(self) -> tuple[str, str]:
        """Return the same key for reasons that alternate, such as those of a failed image pull."""
        groups = (("image", IMAGE_REASONS), ("start", START_REASONS))
        group = next((name for name, reasons in groups if self.reason in reasons), self.reason)
        return self.worker, group


class Diagnosis:
    """Looks at a job again and again, reports what changes, and decides when it has failed.

    A problem that may pass (no room, no quota, no image) ends the job after `patience` seconds, if
    fewer than min_replicas workers are running then: enough workers train without the others.
    """

    def __init__(
        self, spec: JobSpec, patience: float, print_line: Callable[[str], None] = say
    ) -> None:
        self._spec, self._patience, self._print = spec, patience, print_line
        self._since: dict[tuple[str, str], float] = {}  # when each problem was first seen
        self._printed: set[str] = set()
        self._states: dict[str, str] = {}  # of the job and its workers, as last printed
        self._waiting_since: dict[str, float] = {}  # for the operator, by what is missing
        self._suspended = False
        self._event_counts: dict[str, tuple[int, float]] = {}  # by uid, with the time of the change

    def failure(self, view: View, logs: Logs, now: float) -> str:
        """Return why the job must be given up; empty while it may succeed. `now` is in seconds."""
        self._report_changes(view)
        state, message = condition(view.job)
        if state == "Suspended":
            if not self._suspended:
                queue = self._spec.options.queue
                reason = f" (Kueue's queue {queue} has not admitted it)" if queue else ""
                self._print(f"The job is suspended{reason}; waiting until it is resumed.")
            self._suspended = True
            self._since.clear()
            self._waiting_since.clear()
            return ""
        self._suspended = False
        problems = list(find_problems(view, self._fresh_events(view, now)))
        if state == "Failed":
            return _job_failure(view, logs, message, problems)
        return (
            self._operator_is_missing(view, state, now)
            or self._lasting_problem(view, problems, now)
            or self._pods_are_missing(view, now)
            or _repeated_error(logs)
        )

    def _lasting_problem(self, view: View, problems: list[Problem], now: float) -> str:
        self._since = {p.key: self._since.get(p.key, now) for p in problems}
        for problem in problems:
            self._print_once(problem.message)
        permanent = [p for p in problems if p.permanent]
        lasting = [p for p in problems if now - self._since[p.key] >= self._patience]
        cause = _most_causal(permanent) or _most_causal(lasting)
        if cause is None:
            return ""
        running = sum(is_running(pod) for pod in view.pods.values())
        if not cause.permanent and running >= self._spec.options.min_replicas:
            self._print_once(
                f"{running} workers are running, at least min_replicas "
                f"({self._spec.options.min_replicas}): training continues without "
                f"{cause.worker}."
            )
            return ""
        return cause.message

    def _operator_is_missing(self, view: View, state: str, now: float) -> str:
        touched = bool(state or view.pods or view.events)
        untouched = bool(view.job and view.events_readable and not touched)
        if not self._lasts("any action", untouched, now):
            return ""
        return (
            f"No controller picked up the job within {OPERATOR_TIMEOUT:.0f} s. Is the Training "
            "Operator running and watching this namespace? Check "
            "`kubectl -n kubeflow get deployment training-operator`."
        )

    def _pods_are_missing(self, view: View, now: float) -> str:
        """Without events, which would say why, missing pods are all there is to see."""
        too_few = len(view.pods) < self._spec.options.min_replicas
        if not self._lasts("pods", too_few and not view.events_readable, now):
            return ""
        return (
            f"The operator created no pods within {OPERATOR_TIMEOUT:.0f} s. Either it is not "
            "running, or a quota or Pod Security refuses them. This launcher may not read the "
            f"events that say which: run `kubectl -n {self._spec.namespace} describe pytorchjob "
            f"{self._spec.name}`."
        )

    def _lasts(self, name: str, is_missing: bool, now: float) -> bool:
        """Return whether something has been missing at each look for OPERATOR_TIMEOUT seconds."""
        if not is_missing:
            self._waiting_since.pop(name, None)
            return False
        return now - self._waiting_since.setdefault(name, now) >= OPERATOR_TIMEOUT

    def _fresh_events(self, view: View, now: float) -> list[Json]:
        """Return the events that occurred, or occurred again, a short while ago."""
        fresh = []
        for event in view.events:
            uid, count = event["metadata"]["uid"], event.get("count") or 1
            if self._event_counts.get(uid, (0, 0.0))[0] != count:
                self._event_counts[uid] = count, now
            if now - self._event_counts[uid][1] < FRESH + self._patience:
                fresh.append(event)
        return fresh

    def _report_changes(self, view: View) -> None:
        state = condition(view.job)[0] or self._states.get("job", "")  # empty while it is resumed
        states = {short(name): pod_state(pod) for name, pod in view.pods.items()}
        states |= {"job": state} if state else {}
        for name, text in sorted(states.items()):
            if self._states.get(name) != text:
                self._print(f"{name}: {text}")
        for name in sorted(set(self._states) - set(states)):
            self._print(f"{name}: gone")
        self._states = states
        for event in view.events:
            if event.get("type") == "Warning" and event["reason"] not in _COVERED:
                message = event_message(event)[:MAX_EVENT]
                self._print_once(f"{event_object(event)}: {event['reason']}: {message}")

    def _print_once(self, text: str) -> None:
        """Print a message unless it was printed before, with other durations perhaps."""
        if (key := re.sub(r"\d+(\.\d+)?(m?s|m)\b", "", text)) not in self._printed:
            self._printed.add(key)
            self._print(text)


def _job_failure(view: View, logs: Logs, message: str, problems: list[Problem]) -> str:
    """Return the cause of a job's failure, as far as it can be seen."""
    problem = _most_causal([p for p in problems if p.permanent])
    if problem:
        return problem.message
    states = [f"{short(name)}: {pod_state(pod)}" for name, pod in sorted(view.last_seen.items())]
    error = logs.last_error()
    details = f"The workers' last error: {error}" if error else "; ".join(states)
    return f"The job failed: {message}. {details}".rstrip(". ") + "."


def _repeated_error(logs: Logs) -> str:
    """Return an error with which a worker has ended SAME_ERROR_LIMIT times without progress."""
    for (pod, message), count in logs.failure_counts().items():
        if count >= SAME_ERROR_LIMIT:
            return f"{short(pod)} failed {count} times with the same error: {message}"
    return ""


def _most_causal(problems: list[Problem]) -> Problem | None:
    def rank(problem: Problem) -> int:
        return _ORDER.index(problem.reason) if problem.reason in _ORDER else len(_ORDER)

    return min(problems, key=rank, default=None)


# Problems


def find_problems(view: View, fresh_events: list[Json]) -> Iterator[Problem]:
    """Yield the problems of the pods, and of workers whose pods could not be created."""
    for name, pod in view.pods.items():
        yield from pod_problems(name, pod)
    existing = {short(name) for name in view.pods}
    for event in fresh_events:
        yield from (p for p in creation_problems(event) if p.worker not in existing)


def pod_problems(name: str, pod: Json) -> Iterator[Problem]:
    """Yield what keeps a worker's pod from running."""
    worker, status = short(name), pod["status"]
    for one in status.get("conditions", []):
        if one["type"] == "PodScheduled" and one.get("reason") == "Unschedulable":
            yield Problem(
                worker,
                "Unschedulable",
                f"{worker} is Unschedulable: {_one_line(one.get('message'))}. Request less (cpu, "
                "memory, gpu, node_selector, tolerations), or add nodes.",
            )
    if status.get("phase") == "Failed" and status.get("reason"):
        reason, message = status["reason"], _one_line(status.get("message"))
        yield Problem(worker, reason, f"{worker} was ended by its node: {reason}: {message}.")
    container = _container_status(pod)
    waiting = container.get("state", {}).get("waiting", {})
    reason, message = waiting.get("reason", ""), _one_line(waiting.get("message"))
    if reason in IMAGE_REASONS:
        image = _container_spec(pod)["image"]
        yield Problem(
            worker,
            reason,
            f"{worker} cannot get its image: {reason} of {image!r}: {message}.",
            permanent=reason in ("InvalidImageName", "ErrImageNeverPull"),
        )
    elif reason in START_REASONS:
        yield Problem(worker, reason, f"{worker} cannot start: {reason}: {message}.")
    ends = [container.get(state, {}).get("terminated", {}) for state in ("state", "lastState")]
    if any(end.get("reason") == "OOMKilled" for end in ends):
        limit = _container_spec(pod)["resources"]["limits"]["memory"]
        yield Problem(
            worker,
            "OOMKilled",
            f"{worker} was OOMKilled: it used more than its memory limit, {limit}. Raise memory, "
            "or lower train.batch_size, train.microbatches or shm.",
            permanent=True,
        )


def creation_problems(event: Json) -> Iterator[Problem]:
    """Yield why the operator could not create a pod or service."""
    if not str(event.get("reason", "")).startswith("FailedCreate"):
        return
    message = event_message(event)
    named = re.search(r'"[a-z0-9.-]+-(worker-\d+)"', message)
    worker = named[1] if named else "a worker"
    # The API server gives no reason apart from these words.
    if "exceeded quota" in message:
        yield Problem(
            worker,
            "exceeded quota",
            f"The quota of the namespace does not allow {worker}: {message}. Request less (cpu, "
            "memory, gpu, max_replicas), or wait until other pods have ended.",
        )
    elif "violates PodSecurity" in message:
        text = f"The namespace's Pod Security refuses {worker}: {message}."
        yield Problem(worker, "PodSecurity", text)
    else:
        yield Problem(worker, event["reason"], f"{worker} cannot be created: {message}.")


# Reading Kubernetes objects


def condition(job: Json | None) -> tuple[str, str]:
    """Return the state of a job and its message: the newest true condition; empty without one."""
    status = (job or {}).get("status", {})
    held = [c for c in status.get("conditions") or [] if c.get("status") == "True"]
    for kind in ("Failed", "Succeeded", "Suspended"):
        for one in held:
            if one["type"] == kind:
                return kind, _one_line(one.get("message"))
    return (held[-1]["type"], _one_line(held[-1].get("message"))) if held else ("", "")


def is_finished(job: Json) -> bool:
    return condition(job)[0] in ("Succeeded", "Failed")


def is_running(pod: Json) -> bool:
    """Return whether the container is running, and the pod is not being deleted."""
    running = "running" in _container_status(pod).get("state", {})
    return running and "deletionTimestamp" not in pod["metadata"]


def pod_state(pod: Json) -> str:
    """Return the state of a worker in a few words: its phase, and how its last container ended."""
    status, container = pod["status"], _container_status(pod)
    words = [status.get("reason") or status.get("phase", "Unknown")]
    for state in ("state", "lastState"):
        if terminated := container.get(state, {}).get("terminated"):
            reason, code = terminated.get("reason", "ended"), terminated.get("exitCode")
            words.append(f"{reason} (exit status {code})")
            break
    waiting = container.get("state", {}).get("waiting", {}).get("reason")
    words += [waiting] if waiting else []
    restarts = container.get("restartCount", 0)
    words += [f"{restarts} restarts"] if restarts else []
    return ", ".join(words)


def event_object(event: Json) -> str:
    """Return the worker that an event is about, or the kind of any other object."""
    about = event["involvedObject"]
    return short(about["name"]) if about.get("kind") == "Pod" else str(about.get("kind"))


def event_message(event: Json) -> str:
    return _one_line(event.get("message"))


def _container_spec(pod: Json) -> Json:
    """Return the spec of our container; a cluster may add containers before it."""
    return next(one for one in pod["spec"]["containers"] if one["name"] == CONTAINER)


def _container_status(pod: Json) -> Json:
    statuses: list[Json] = pod["status"].get("containerStatuses", [])
    return next((status for status in statuses if status["name"] == CONTAINER), {})


def _one_line(text: str | None) -> str:
    return " ".join((text or "no message").split()).rstrip(".")
