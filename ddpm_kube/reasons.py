"""Why a worker does not run, or ended: what its pod and the events about it say, in a sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ddpm_kube.job import CONTAINER
from ddpm_kube.logs import short

Plain = dict[str, Any]

IMAGE = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"}
START = {
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
    "StartError",
    "ContainerCannotRun",
}


@dataclass(frozen=True)
class Problem:
    """`at_once`: waiting does not mend it. `reason` is Kubernetes's own word."""

    worker: str
    reason: str
    sentence: str
    at_once: bool = False

    @property
    def key(self) -> tuple[str, str]:
        """The same for what takes turns, such as pulling an image and waiting to do so again."""
        kinds = (("image", IMAGE), ("start", START))
        return self.worker, next((k for k, reasons in kinds if self.reason in reasons), self.reason)


def of_pod(name: str, pod: Plain) -> Iterator[Problem]:
    """What keeps a worker's pod from running."""
    worker, status = short(name), pod["status"]
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition.get("reason") == "Unschedulable":
            yield Problem(
                worker,
                "Unschedulable",
                f"{worker} is Unschedulable: {_line(condition.get('message'))}. Give its pod less "
                "to ask for (cpu, memory, gpu, node_selector, tolerations), or the cluster more.",
            )
    if status.get("phase") == "Failed" and status.get("reason"):
        reason, message = status["reason"], _line(status.get("message"))
        yield Problem(worker, reason, f"{worker} was ended by the node: {reason}: {message}.")
    container = _container(pod)
    yield from _waiting(worker, pod, container.get("state", {}).get("waiting", {}))
    for state in ("state", "lastState"):
        ended = container.get(state, {}).get("terminated", {})
        if ended.get("reason") == "OOMKilled":
            limit = _asked(pod)["resources"]["limits"]["memory"]
            yield Problem(
                worker,
                "OOMKilled",
                f"{worker} was OOMKilled: it needs more than its memory limit, {limit}. Raise "
                "memory, or lower what it needs (train.batch_size, train.microbatches, shm).",
                at_once=True,
            )
            return


def _waiting(worker: str, pod: Plain, waiting: Plain) -> Iterator[Problem]:
    reason, message = waiting.get("reason", ""), _line(waiting.get("message"))
    if reason in IMAGE:
        image = _asked(pod)["image"]
        yield Problem(
            worker,
            reason,
            f"{worker} has no image: {reason} of {image!r}: {message}.",
            at_once=reason in ("InvalidImageName", "ErrImageNeverPull"),
        )
    elif reason in START:
        yield Problem(worker, reason, f"{worker} cannot start: {reason}: {message}.")


def of_event(event: Plain) -> Iterator[Problem]:
    """What the operator was refused when it made a pod or service."""
    if not str(event.get("reason", "")).startswith("FailedCreate"):
        return
    message = _line(event.get("message"))
    named = re.search(r'"[a-z0-9.-]+-(worker-\d+)"', message)
    worker = named[1] if named else "a worker"
    if "exceeded quota" in message:
        yield Problem(
            worker,
            "exceeded quota",
            f"The quota of the namespace does not allow {worker}: {message}. Ask for less (cpu, "
            "memory, gpu, max_replicas), or wait until other pods have ended.",
        )
    elif "violates PodSecurity" in message:
        yield Problem(
            worker,
            "PodSecurity",
            f"The namespace's Pod Security refuses {worker}: {message}.",
        )
    else:
        yield Problem(worker, event["reason"], f"{worker} could not be made: {message}.")


def whose(event: Plain) -> str:
    """The worker that an event is about, or the kind of thing."""
    about = event["involvedObject"]
    return short(about["name"]) if about.get("kind") == "Pod" else str(about.get("kind"))


def said(event: Plain) -> str:
    return _line(event.get("message"))


def ended(pod: Plain) -> str:
    """How a worker stands, in a few words: running, or how its last container ended."""
    status, container = pod["status"], _container(pod)
    words = [status.get("reason") or status.get("phase", "Unknown")]
    for state in ("state", "lastState"):
        terminated = container.get(state, {}).get("terminated")
        if terminated:
            reason, code = terminated.get("reason", "ended"), terminated.get("exitCode")
            words.append(f"{reason} (exit status {code})")
            break
    waiting = container.get("state", {}).get("waiting", {}).get("reason")
    words += [waiting] if waiting else []
    restarts = container.get("restartCount", 0)
    words += [f"{restarts} restarts"] if restarts else []
    return ", ".join(words)


def running(pod: Plain) -> bool:
    """Whether its container runs and the pod is not on its way out."""
    alive = "running" in _container(pod).get("state", {})
    return alive and "deletionTimestamp" not in pod["metadata"]


def condition(job: Plain | None) -> tuple[str, str]:
    """The state of a job, and the message: the newest condition that holds; empty if none does."""
    status = (job or {}).get("status", {})
    held = [c for c in status.get("conditions") or [] if c.get("status") == "True"]
    for kind in ("Failed", "Succeeded", "Suspended"):
        for one in held:
            if one["type"] == kind:
                return kind, _line(one.get("message"))
    return (held[-1]["type"], _line(held[-1].get("message"))) if held else ("", "")


def finished(job: Plain) -> bool:
    return condition(job)[0] in ("Succeeded", "Failed")


def _asked(pod: Plain) -> Plain:
    """Our container as it was asked for; those that a cluster puts beside it may stand before."""
    return next(one for one in pod["spec"]["containers"] if one["name"] == CONTAINER)


def _container(pod: Plain) -> Plain:
    found: list[Plain] = pod["status"].get("containerStatuses", [])
    return next((status for status in found if status["name"] == CONTAINER), {})


def _line(text: str | None) -> str:
    return " ".join((text or "no more is said").split()).rstrip(".")
