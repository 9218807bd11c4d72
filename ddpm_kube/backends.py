"""The backends: the kinds of jobs that train, behind one interface.

A backend knows how a job is built around the pod of its workers, which objects belong to it, and
what its status says. Everything else (names, options, pods, watching, logs, diagnosis, cleanup) is
the same for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from re import Pattern
from typing import Any, Protocol

from ddpm_core.errors import Problem
from ddpm_kube.options import AUTO, Options
from ddpm_kube.pytorchjob import PyTorchJob
from ddpm_kube.trainjob import TrainJob

Json = dict[str, Any]

ENDED = ("Succeeded", "Failed")  # states in which a job stays


class Backend(Protocol):
    """A kind of job.

    `deployment` and `logs` are commands that show the controller and its log, `install` is the one
    that installs it. `container` is the name of the workers' container, `job_label` the label with
    the job's name that the controller gives to pods, and `pod_name` finds the number of a worker in
    the name of its pod. Objects that belong to a job JOB are named JOB or JOB-`parts`-...;
    `children` are the kinds of those between the job and its pods, of which there are events.
    `advice` says what to do about refusals of the controller's webhook, by words in them.
    """

    name: str
    kind: str
    plural: str
    group: str
    version: str
    controller: str
    deployment: str
    logs: str
    install: str
    container: str
    job_label: str
    pod_name: Pattern[str]
    parts: str
    children: tuple[str, ...]
    advice: dict[str, str]

    def build(self, pod: Json, options: Options, name: str, processes: int) -> Json:
        """Return the job whose workers have this pod template, with `processes` each."""

    def problems(self, options: Options) -> Iterator[Problem]:
        """Yield the options that this kind of job cannot set."""

    def conditions(self, job: Json) -> list[Json]:
        """Return the conditions of a job, with the types Succeeded, Failed and Suspended."""

    def is_suspended(self, job: Json) -> bool:
        """Return whether the job must not run at present; Kueue decides that, or a person."""

    def grace_seconds(self, job: Json) -> float | None:
        """Return the time in which workers must end; None if the job does not set it."""


# In the order in which `auto` looks for them.
BACKENDS: dict[str, Backend] = {one.name: one for one in (PyTorchJob(), TrainJob())}
DEFAULT = next(iter(BACKENDS.values()))  # as long as no cluster is known
CONTAINERS = {backend.container for backend in BACKENDS.values()}


def of_name(name: str) -> Backend:
    return DEFAULT if name == AUTO else BACKENDS[name]


def worker(pod: str) -> str:
    """Return worker-1 of JOB-worker-1 and of JOB-node-0-1-x7k2p, the names of a worker's pod."""
    found = (backend.pod_name.search(pod) for backend in BACKENDS.values())
    match = next(filter(None, found), None)
    return f"worker-{match[1]}" if match else pod


def condition(backend: Backend, job: Json | None) -> tuple[str, str]:
    """Return the state of a job and its message: the newest true condition; empty without one."""
    held = [c for c in backend.conditions(job or {}) if c.get("status") == "True"]
    for kind in ("Failed", "Succeeded", "Suspended"):
        for one in held:
            if one["type"] == kind:
                return kind, one_line(one.get("message"))
    return (held[-1]["type"], one_line(held[-1].get("message"))) if held else ("", "")


def is_finished(backend: Backend, job: Json) -> bool:
    return condition(backend, job)[0] in ENDED


def one_line(text: str | None) -> str:
    return " ".join((text or "no message").split()).rstrip(".")
