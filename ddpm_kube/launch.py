"""The story of a job: made or found, followed to its end, explained if that is bad, cleaned up.

The launcher is a pod that may be started again, or told to go. So the job's name follows from run
and stage; one that is at work with the same spec is followed instead of made; a finished one is
replaced, since `ddpm train` itself knows what is left to do; and SIGTERM deletes the job first.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ddpm_core.config import Config
from ddpm_core.console import say, warn
from ddpm_core.errors import Interrupted, UserError
from ddpm_kube.answers import Exists
from ddpm_kube.cluster import Cluster, remove
from ddpm_kube.feed import Feed, LostSight, View
from ddpm_kube.here import Here, find
from ddpm_kube.job import build
from ddpm_kube.judge import LONGEST, Judge, differs
from ddpm_kube.logs import Logs, short
from ddpm_kube.options import Options
from ddpm_kube.outcome import Outcome, outcome
from ddpm_kube.reasons import condition, ended, finished, said, whose
from ddpm_kube.spec import JobSpec

PATIENCE = 30.0  # seconds that a worker may have no room, no quota or no image
LOOK = 1.0  # seconds between two looks at a job that does not change

Plain = dict[str, Any]


def train(
    config: Config,
    options: Options,
    run_id: str,
    environment: Mapping[str, str],
    namespace: str | None = None,
    patience: float = PATIENCE,
    keep: bool = False,
) -> Outcome:
    """Train in a PyTorchJob, of which nothing is left afterwards unless `keep`.

    Raises UserError with the cause if it fails, and Interrupted after SIGTERM or Ctrl-C, the job
    being deleted.
    """
    with told_to_stop():
        here = find(environment, namespace)
        here.cluster.all_jobs("none=none")  # whether there are PyTorchJobs here, and for us
        spec = specify(config, options, run_id, here)
        began, job = time.monotonic(), build(spec, here.owner)
        try:
            job = make_or_find(here, job)
            follow(here.cluster, spec, patience)
        except Interrupted:
            cancel(here.cluster, job)
            raise
        except LostSight:
            raise
        except UserError:
            if not keep and "uid" in job["metadata"]:
                clean_up(here.cluster, job)
            raise
        told = outcome(spec.name, time.monotonic() - began, config.workspace)
        say(str(told))
        if not keep:
            clean_up(here.cluster, job)
        return told


def preview(
    config: Config,
    options: Options,
    run_id: str,
    environment: Mapping[str, str],
    namespace: str | None = None,
) -> Plain:
    """The job that `train` would make."""
    here = find(environment, namespace)
    return build(specify(config, options, run_id, here), here.owner)


def specify(config: Config, options: Options, run_id: str, here: Here) -> JobSpec:
    image = options.image or here.image
    return JobSpec(config, options, run_id, here.cluster.namespace, image)


@contextmanager
def told_to_stop() -> Iterator[None]:
    """SIGTERM and Ctrl-C raise Interrupted, wherever the launcher is; a second one does nothing."""

    def asked_to(number: int, _: object) -> None:
        for each in previous:
            signal.signal(each, signal.SIG_IGN)
        name = signal.Signals(number).name
        raise Interrupted(f"{name}: the job is deleted; what was saved stays.", 128 + number)

    previous = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    for number in previous:
        signal.signal(number, asked_to)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def make_or_find(here: Here, job: Plain) -> Plain:
    """The job as the cluster has it. Raises UserError if another one keeps its name."""
    cluster, name = here.cluster, job["metadata"]["name"]
    while True:
        try:
            made = cluster.create(job)
        except Exists:
            found = cluster.job(name)
        else:
            say(f"Made the PyTorchJob {cluster.namespace}/{name}.")
            return made
        if found is None:
            continue
        if "deletionTimestamp" in found["metadata"] or finished(found):
            say(f"The PyTorchJob {name} of an earlier attempt is removed first.")
            if not remove(cluster, found):
                raise UserError(
                    f"The PyTorchJob {cluster.namespace}/{name} of an earlier attempt cannot be "
                    "removed. End what keeps it (a finalizer, a pod on a dead node), or give "
                    "another run id."
                )
            continue
        if differs(found, job):
            raise UserError(
                f"The PyTorchJob {cluster.namespace}/{name} is at work with other settings. Wait "
                "for it, give another run id, or end it: "
                f"kubectl -n {cluster.namespace} delete pytorchjob {name}"
            )
        if here.owner:
            found = cluster.own(name, here.owner)
            if found is None or "deletionTimestamp" in found["metadata"]:
                continue  # the launcher before this one has ended it meanwhile
        say(f"The PyTorchJob {cluster.namespace}/{name} is at work already; following it.")
        return found


def follow(cluster: Cluster, spec: JobSpec, patience: float) -> None:
    """Pass on what the job does until it has succeeded. Raises UserError with the cause if not."""
    judge, seen = Judge(spec, patience), False
    with Feed(cluster, spec.name) as feed, Logs(cluster) as logs:
        while True:
            view = feed.wait(LOOK)
            seen = seen or view.job is not None
            if seen and (view.job is None or "deletionTimestamp" in view.job["metadata"]):
                raise UserError(f"The PyTorchJob {spec.name} was deleted by somebody else.")
            logs.follow(view.pods)
            sentence = judge.verdict(view, logs, time.monotonic())
            if sentence:
                logs.finish(5.0)
                explain(view, logs)
                say(f"Giving up: {sentence}")  # cleaning up may take a while
                raise UserError(sentence)
            if condition(view.job)[0] == "Succeeded":
                logs.finish(10.0)
                return


def explain(view: View, logs: Logs) -> None:
    """All that is known of a failed job, before it is gone."""
    for name, pod in sorted(view.last.items()):
        lines = logs.tail(name)
        say(f"--- {short(name)}: {ended(pod)}; {'its last lines' if lines else 'it said nothing'}")
        for line in lines:
            say(f"    {line}")
    say("--- events:")
    for event in view.events:
        kind, reason = event.get("type", ""), event.get("reason", "")
        say(f"    {kind} {reason} {whose(event)}: {said(event)[:LONGEST]}")


def clean_up(cluster: Cluster, job: Plain) -> None:
    """Remove a job that has ended; what became of it counts, whether it can be removed or not."""
    try:
        remove(cluster, job)
    except UserError as error:
        space, name = cluster.namespace, job["metadata"]["name"]
        warn(
            f"{error} The PyTorchJob {space}/{name} is left for `ddpm jobs gc`; at once it goes by "
            f"`kubectl -n {space} delete pytorchjob {name}`."
        )


def cancel(cluster: Cluster, job: Plain) -> None:
    """Delete the job at once, and wait for nothing: little time is left after SIGTERM."""
    if "uid" not in job["metadata"]:  # told to stop while it was made, or looked for
        found = cluster.job(job["metadata"]["name"])
        if found is None or differs(found, job):
            return
        job = found
    cluster.delete(job)
