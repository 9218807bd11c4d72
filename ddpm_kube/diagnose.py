"""Why a job fails, or cannot start: what its condition, its pods, events and logs say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ddpm_core.config.durations import in_words
from ddpm_core.console import say
from ddpm_kube.backends import CONTAINERS, condition, one_line, worker
from ddpm_kube.logs import Logs
from ddpm_kube.spec import JobSpec
from ddpm_kube.watch import WORKLOAD, View, moment

Json = dict[str, Any]

# A worker that ends this often with the same error, without any progress in between, would fail
# with it again.
SAME_ERROR_LIMIT = 3
PREEMPTED = "Preempted"  # the reason of the event with which Kueue says for whom
MAX_EVENT = 300  # characters of an event's message; controllers quote entire logs
REMIND_INTERVAL = 60.0  # seconds between two lines about what a job waits for

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
_COVERED |= {"FailedCreate", "FailedCreatePod", "FailedCreateService", "JobCreationFailed"}
# Kueue's webhook denies a new object whose owner, newer still, it does not know yet.
_OWNER_UNKNOWN = re.compile(r'denied the request: [\w.-]+ "[^"]+" not found')
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

    A problem that may pass (no controller, room, quota or image) ends the job once it has lasted
    for `options.patience` while fewer than min_replicas workers are running: enough workers train
    without the others.
    """

    def __init__(self, spec: JobSpec, print_line: Callable[[str], None] = say) -> None:
        self._spec, self._backend, self._print = spec, spec.backend, print_line
        self._since: dict[tuple[str, str], float] = {}  # when each problem was first seen
        self._suspended_since: float | None = None
        self._remind_at: float | None = None
        self._printed: set[str] = set()
        self._states: dict[str, str] = {}  # of the job and its workers, as last printed

    def failure(self, view: View, logs: Logs, now: float) -> str:
        """Return why the job must be given up; empty while it may succeed.

        `now` is in seconds, of a clock that only runs while `view` is current.
        """
        self._report_changes(view)
        state, message = condition(self._backend, view.job)
        if state == "Failed":
            return _job_failure(view, logs, message)
        if view.job and self._backend.is_suspended(view.job):
            self._wait_for_queue(view, now)
            return ""
        if self._suspended_since is not None:
            self._suspended_since = self._remind_at = None
        return self._lasting_problem(view, state, now) or _repeated_error(logs)

    def _wait_for_queue(self, view: View, now: float) -> None:
        """Report why Kueue has not admitted the job. That takes as long as it takes."""
        self._since.clear()
        queue = self._spec.options.queue
        if self._suspended_since is None:
            self._suspended_since, self._remind_at = now, None
            reason = f" (Kueue's queue {queue} has not admitted it)" if queue else ""
            self._print(f"The job is suspended{reason}; waiting until it is resumed.")
        self._remind(
            f"Suspended for {in_words(now - self._suspended_since)}"
            + (f" in the queue {queue}" if queue else "")
            + f": {queue_reason(view) or self._command('describe workloads')}",
            now,
        )

    def _lasting_problem(self, view: View, state: str, now: float) -> str:
        problems = list(find_problems(view, self._spec.options.max_replicas))
        for problem in problems:
            self._print_once(problem.message)
        if permanent := _most_causal([p for p in problems if p.permanent]):
            return permanent.message
        running = sum(is_running(pod) for pod in view.pods.values())
        if running < self._spec.options.min_replicas:
            return self._impatience(problems or list(self._missing_pods(view, state)), now)
        self._since.clear()
        self._remind_at = None
        if problems:
            self._print_once(
                f"{running} workers are running, at least min_replicas "
                f"({self._spec.options.min_replicas}): training continues without "
                f"{problems[0].worker}."
            )
        return ""

    def _impatience(self, problems: list[Problem], now: float) -> str:
        """Return the cause once a problem has lasted for `patience`; report it once a minute."""
        patience = self._spec.options.patience_seconds
        self._since = {p.key: self._since.get(p.key, now) for p in problems}
        if cause := _most_causal([p for p in problems if now - self._since[p.key] >= patience]):
            return f"{cause.message} This has lasted {in_words(patience)} (patience)."
        if cause := _most_causal(problems):
            waited = in_words(now - self._since[cause.key])
            self._remind(f"Waiting for {waited} of {in_words(patience)}: {cause.message}", now)
        else:
            self._remind_at = None
        return ""

    def _remind(self, text: str, now: float) -> None:
        """Print a line once a minute; the first one a minute after the wait began."""
        if self._remind_at is not None and now >= self._remind_at:
            self._print(text)
        elif self._remind_at is not None:
            return
        self._remind_at = now + REMIND_INTERVAL

    def _missing_pods(self, view: View, state: str) -> Iterator[Problem]:
        """Yield what may be wrong if there are too few pods and no event says why."""
        if view.job is None or len(view.pods) >= self._spec.options.min_replicas:
            return
        backend, controller = self._backend, self._backend.controller
        if not view.events_readable:
            message = (
                f"{controller} has not created the pods. Either it is not running, or a quota or "
                "Pod Security refuses them. This launcher may not read the events that say which: "
                f"{self._command(f'describe {backend.name} {self._spec.name}')}."
            )
        elif state or view.events:
            message = f"{controller} has not created the pods. Check its log: `{backend.logs}`."
        else:
            message = (
                f"No controller has picked up the job. Is {controller} running and watching this "
                f"namespace? Check `{backend.deployment}`."
            )
        yield Problem("", "NoPods", message)

    def _command(self, arguments: str) -> str:
        return f"run `kubectl -n {self._spec.namespace} {arguments}`"

    def _report_changes(self, view: View) -> None:
        # The condition is empty while a job is resumed.
        state = condition(self._backend, view.job)[0] or self._states.get("job", "")
        states = {worker(name): pod_state(pod) for name, pod in newest(view.pods).items()}
        states |= {"job": state} if state else {}
        for name, text in sorted(states.items()):
            if self._states.get(name) != text:
                self._print(f"{name}: {text}")
        for name in sorted(set(self._states) - set(states)):
            self._print(f"{name}: gone")
        self._states = states
        for event in view.events:
            warning = event.get("type") == "Warning" and event["reason"] not in _COVERED
            if warning or event["reason"] == PREEMPTED:
                message = event_message(event)[:MAX_EVENT]
                self._print_once(f"{event_object(event)}: {event['reason']}: {message}")

    def _print_once(self, text: str) -> None:
        """Print a message unless it was printed before, with other durations perhaps."""
        if (key := re.sub(r"\d+(\.\d+)?(m?s|m)\b", "", text)) not in self._printed:
            self._printed.add(key)
            self._print(text)


def _job_failure(view: View, logs: Logs, message: str) -> str:
    """Return the cause of a job's failure, as far as it can be seen."""
    problems = [p for name, pod in newest(view.pods).items() for p in pod_problems(name, pod)]
    problem = _most_causal([p for p in problems if p.permanent])
    if problem:
        return problem.message
    states = [f"{worker(name)}: {pod_state(pod)}" for name, pod in sorted(view.last_seen.items())]
    error = logs.last_error() or next(filter(None, map(_last_message, view.last_seen.values())), "")
    details = f"The workers' last error: {error}" if error else "; ".join(states)
    return f"The job failed: {message}. {details}".rstrip(". ") + "."


def _repeated_error(logs: Logs) -> str:
    """Return an error with which a worker has ended SAME_ERROR_LIMIT times without progress."""
    for (pod, message), count in logs.failure_counts().items():
        if count >= SAME_ERROR_LIMIT:
            return f"{worker(pod)} failed {count} times with the same error: {message}"
    return ""


def _most_causal(problems: list[Problem]) -> Problem | None:
    def rank(problem: Problem) -> int:
        return _ORDER.index(problem.reason) if problem.reason in _ORDER else len(_ORDER)

    return min(problems, key=rank, default=None)


# Problems


def newest(pods: dict[str, Json]) -> dict[str, Json]:
    """Return the newest pod of each worker: the pods of a TrainJob's worker have several names."""
    ages = sorted(pods, key=lambda name: str(pods[name]["metadata"].get("creationTimestamp", "")))
    return {name: pods[name] for name in {worker(name): name for name in ages}.values()}


def find_problems(view: View, replicas: int) -> Iterator[Problem]:
    """Yield the problems of the pods, and of workers whose pods could not be created."""
    for name, pod in newest(view.pods).items():
        yield from pod_problems(name, pod)
    existing = {worker(name) for name in view.pods}
    for event in view.events if len(existing) < replicas else ():
        for problem in creation_problems(event):
            # Once any worker existed, a refusal may be long over; its event is kept for an hour.
            permanent = problem.permanent and not view.last_seen
            if problem.worker not in existing:
                yield replace(problem, permanent=permanent)


def pod_problems(name: str, pod: Json) -> Iterator[Problem]:
    """Yield what keeps a worker's pod from running."""
    who, status = worker(name), pod["status"]
    for one in status.get("conditions", []):
        if one["type"] == "PodScheduled" and one.get("reason") == "Unschedulable":
            yield Problem(
                who,
                "Unschedulable",
                f"{who} is Unschedulable: {one_line(one.get('message'))}. Request less (cpu, "
                "memory, gpu, node_selector, tolerations), or add nodes.",
            )
    if status.get("phase") == "Failed" and status.get("reason"):
        reason, message = status["reason"], one_line(status.get("message"))
        yield Problem(who, reason, f"{who} was ended by its node: {reason}: {message}.")
    container = _container_status(pod)
    waiting = container.get("state", {}).get("waiting", {})
    reason, message = waiting.get("reason", ""), one_line(waiting.get("message"))
    if reason in IMAGE_REASONS:
        image = _container_spec(pod)["image"]
        yield Problem(
            who,
            reason,
            f"{who} cannot get its image: {reason} of {image!r}: {message}.",
            permanent=reason in ("InvalidImageName", "ErrImageNeverPull"),
        )
    elif reason in START_REASONS:
        yield Problem(who, reason, f"{who} cannot start: {reason}: {message}.")
    ends = [container.get(state, {}).get("terminated", {}) for state in ("state", "lastState")]
    if any(end.get("reason") == "OOMKilled" for end in ends):
        limit = _container_spec(pod)["resources"]["limits"]["memory"]
        yield Problem(
            who,
            "OOMKilled",
            f"{who} was OOMKilled: it used more than its memory limit, {limit}. Raise memory, "
            "or lower train.batch_size, train.microbatches or shm.",
            permanent=True,
        )


def creation_problems(event: Json) -> Iterator[Problem]:
    """Yield why a controller could not create a pod or another object of a job."""
    if not re.match("FailedCreate|.*CreationFailed$", str(event.get("reason", ""))):
        return
    message = event_message(event)
    if "already exists" in message:
        return
    named = [worker(name) for name in re.findall(r'pods? "([a-z0-9.-]+)"', message, re.I)]
    who = named[0] if named else "a worker"
    # The API server gives no reason apart from these words. It also forbids the operator itself
    # to create pods for a while after a restart.
    forbidden = "is forbidden" in message and "cannot create resource" not in message
    denied = "denied the request" in message and not _OWNER_UNKNOWN.search(message)
    if "exceeded quota" in message:
        yield Problem(
            who,
            "exceeded quota",
            f"The quota of the namespace does not allow {who}: {message}. Request less (cpu, "
            "memory, gpu, max_replicas), or wait until other pods have ended.",
        )
    elif forbidden or denied or "is invalid" in message:
        text = f"The API server refuses to create {who}: {message}."
        yield Problem(who, "refused", text, permanent=True)
    else:
        yield Problem(who, event["reason"], f"{who} cannot be created: {message}.")


# Reading Kubernetes objects


def queue_reason(view: View) -> str:
    """Return why Kueue has not admitted the job, from its newest event; empty if unknown.

    Events of an earlier job of this name are older than the job.
    """
    created = view.job["metadata"].get("creationTimestamp", "") if view.job else ""
    pending = []
    for event in view.events:
        is_reason = event["involvedObject"].get("kind") == WORKLOAD and event["reason"] == "Pending"
        if is_reason and moment(event) >= created:
            pending.append((moment(event), event_message(event)))
    return max(pending, default=("", ""))[1]


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
    return worker(about["name"]) if about.get("kind") == "Pod" else str(about.get("kind"))


def event_message(event: Json) -> str:
    return one_line(event.get("message"))


def _last_message(pod: Json) -> str:
    """Return the error with which `ddpm` ended in a container, from its termination message."""
    status = _container_status(pod)
    for state in ("state", "lastState"):
        ended = status.get(state, {}).get("terminated", {})
        with suppress(ValueError, KeyError, TypeError):
            return str(json.loads(ended["message"])["error"])
    return ""


def _container_spec(pod: Json) -> Json:
    """Return the spec of our container; a cluster may add containers before it."""
    return next(one for one in pod["spec"]["containers"] if one["name"] in CONTAINERS)


def _container_status(pod: Json) -> Json:
    statuses: list[Json] = pod["status"].get("containerStatuses", [])
    return next((status for status in statuses if status["name"] in CONTAINERS), {})
