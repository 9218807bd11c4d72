"""The launcher: creates or finds a job, follows it to its end, explains a failure, cleans up.

The launcher runs in a pod that may be restarted or told to stop. So the name of the job follows
from run and stage; a running job with the same spec is followed instead of created; a finished one
is replaced, because `ddpm train` itself knows what is left to do; and SIGTERM deletes the job.
If the workspace shows that nothing is left to do, no job is created.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ddpm_core.chain import CHECKS
from ddpm_core.config import Config
from ddpm_core.console import say, warn
from ddpm_core.errors import Interrupted, UserError
from ddpm_core.storage.workspace import LOG, SNAPSHOTS, Workspace
from ddpm_core.tracking.rows import read_rows
from ddpm_kube.backends import Backend, condition, is_finished, worker
from ddpm_kube.cluster import AlreadyExists, Cluster
from ddpm_kube.diagnose import (
    MAX_EVENT,
    Diagnosis,
    event_message,
    event_object,
    pod_state,
)
from ddpm_kube.job import SPEC_HASH, build
from ddpm_kube.location import Location, locate
from ddpm_kube.logs import Logs
from ddpm_kube.options import AUTO, Options
from ddpm_kube.spec import JobSpec
from ddpm_kube.watch import JobWatch, View, WatchLost

LOOK_INTERVAL = 1.0  # seconds between two looks at a job that does not change

Json = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What a successful job has left. `step` is None if the workspace cannot be read from here.

    `world_sizes` are the numbers of processes that wrote the rows of the log, in order.
    """

    job: str
    seconds: float
    step: int | None = None
    snapshots: tuple[int, ...] = ()
    world_sizes: tuple[int, ...] = ()

    def __str__(self) -> str:
        text = f"The job {self.job} succeeded after {self.seconds:.0f} s"
        if self.step is None:
            return f"{text}."
        return (
            f"{text}, at step {self.step}. "
            f"Processes: {', then '.join(map(str, self.world_sizes))}. "
            f"Snapshots: {', '.join(map(str, self.snapshots))}."
        )


def train(
    config: Config,
    options: Options,
    run_id: str,
    environment: Mapping[str, str],
    namespace: str | None = None,
    keep: bool = False,
) -> Outcome | None:
    """Train in a job, and delete it afterwards unless `keep`; None if nothing is to do.

    Raises:
        UserError: the job failed, with the cause. WatchLost: it may still be running.
        Interrupted: after SIGTERM or Ctrl-C; the job is deleted.
    """
    with interrupted_by_signals():
        location = locate(environment, namespace, options.patience_seconds)
        location = location.using(options.backend)
        spec = make_spec(config, options, run_id, location)
        # Fails without the controller, or without permission.
        earlier = location.cluster.job(spec.name)
        over = earlier is None or is_over(spec.backend, earlier)
        if over and is_trained(config, location):
            say(f"train: up to date; no {spec.backend.kind} is created.")
            if earlier and not keep:
                clean_up(location.cluster, earlier)
            return None
        return run(spec, location, keep)


def run(spec: JobSpec, location: Location, keep: bool) -> Outcome:
    """Create or find the job and follow it to its end; see `train`."""
    cluster, started = location.cluster, time.monotonic()
    job = build(spec, location.owner)
    try:
        job = create_or_find(location, job)
        follow(cluster, spec)
    except Interrupted:
        cancel(replace(cluster, patience=0.0), job)
        raise
    except WatchLost:
        raise
    except UserError:
        if not keep and "uid" in job["metadata"]:
            clean_up(cluster, job)
        raise
    workspace = open_workspace(spec.config, location)
    outcome = read_outcome(spec.name, time.monotonic() - started, workspace)
    say(str(outcome))
    if not keep:
        clean_up(cluster, job)
    return outcome


def preview(
    config: Config,
    options: Options,
    run_id: str,
    environment: Mapping[str, str],
    namespace: str | None = None,
) -> Json:
    """Return the job that `train` would create, without a request to find what the cluster has."""
    location = locate(environment, namespace)
    if options.backend != AUTO:
        location = location.using(options.backend)
    return build(make_spec(config, options, run_id, location), location.owner)


def make_spec(config: Config, options: Options, run_id: str, location: Location) -> JobSpec:
    cluster, image = location.cluster, options.image or location.image
    chosen = options.model_copy(update={"backend": cluster.backend.name})
    return JobSpec(config, chosen, run_id, cluster.namespace, image)


def open_workspace(config: Config, location: Location) -> Workspace | None:
    """Return the workspace if it can be read from here.

    Outside the cluster, the path of a volume may be a different directory.
    """
    if "://" not in config.workspace and location.pod is None:
        return None
    try:
        return Workspace.open(config.workspace)
    except (UserError, OSError):
        return None


def is_trained(config: Config, location: Location) -> bool:
    """Return whether `ddpm train` has nothing to do; False if that cannot be seen from here."""
    workspace = open_workspace(config, location)
    try:
        return workspace is not None and CHECKS["train"]()(config, workspace) is None
    except (UserError, OSError):
        return False


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Raise Interrupted at the first SIGTERM or Ctrl-C, and ignore all further ones."""

    def interrupt(number: int, _: object) -> None:
        for each in previous:
            signal.signal(each, signal.SIG_IGN)
        name = signal.Signals(number).name
        raise Interrupted(f"{name}: deleting the job; saved snapshots stay.", 128 + number)

    previous = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    for number in previous:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def create_or_find(location: Location, job: Json) -> Json:
    """Create the job or find the one that is running, and return it as the API server has it.

    Raises UserError if a job with other settings has its name, or a finished one cannot be removed.
    """
    cluster, name = location.cluster, job["metadata"]["name"]
    kind, resource = cluster.backend.kind, cluster.backend.name
    while True:
        try:
            created = cluster.create(job)
        except AlreadyExists:
            found = cluster.job(name)
        else:
            say(f"Created the {kind} {cluster.namespace}/{name}.")
            return created
        if found is None:
            continue
        if is_over(cluster.backend, found):
            say(f"Removing the {kind} {name} of an earlier attempt first.")
            if not cluster.remove(found):
                raise UserError(
                    f"Cannot remove the {kind} {cluster.namespace}/{name} of an earlier "
                    "attempt. Remove what blocks it (a finalizer, a pod on a node that is down), "
                    "or use another run id."
                )
            continue
        if is_different(found, job):
            raise UserError(
                f"The {kind} {cluster.namespace}/{name} is running with different settings. "
                "Wait for it, use another run id, or delete it: "
                f"kubectl -n {cluster.namespace} delete {resource} {name}"
            )
        if location.owner:
            found = cluster.own(name, location.owner)
            if found is None or "deletionTimestamp" in found["metadata"]:
                continue  # the previous launcher has deleted it in the meantime
        say(f"The {kind} {cluster.namespace}/{name} is already running; following it.")
        return found


def is_over(backend: Backend, job: Json) -> bool:
    """Return whether a job has ended or is being deleted."""
    return "deletionTimestamp" in job["metadata"] or is_finished(backend, job)


def is_different(job: Json, wanted: Json) -> bool:
    """Return whether a job was built from another spec."""
    hashes = {one["metadata"].get("annotations", {}).get(SPEC_HASH) for one in (job, wanted)}
    return len(hashes) > 1


def follow(cluster: Cluster, spec: JobSpec) -> None:
    """Print what the job does until it has succeeded. Raises UserError with the cause if not."""
    diagnosis, seen = Diagnosis(spec), False
    watched, looked_at = 0.0, time.monotonic()
    with JobWatch(cluster, spec.name) as watch, Logs(cluster) as logs:
        while True:
            view = watch.wait(LOOK_INTERVAL)
            seen = seen or view.job is not None
            if seen and (view.job is None or "deletionTimestamp" in view.job["metadata"]):
                raise UserError(f"Another process deleted the {spec.backend.kind} {spec.name}.")
            logs.follow(view.pods)
            # During an outage the view is old, and the problem in it may be over. So the
            # patience with it does not run out then.
            now = time.monotonic()
            watched += now - looked_at if watch.is_current else 0.0
            looked_at = now
            failure = diagnosis.failure(view, logs, watched)
            if failure:
                logs.finish(5.0)
                explain(view, logs)
                say(f"Giving up: {failure}")  # cleaning up may take a while
                raise UserError(failure)
            if condition(spec.backend, view.job)[0] == "Succeeded":
                logs.finish(10.0)
                return


def explain(view: View, logs: Logs) -> None:
    """Print all that is known of a failed job, before it is deleted."""
    for name, pod in sorted(view.last_seen.items()):
        lines = logs.tail(name)
        say(f"--- {worker(name)}: {pod_state(pod)}; {'last lines' if lines else 'no output'}")
        for line in lines:
            say(f"    {line}")
    say("--- events:")
    for event in view.events:
        kind, reason = event.get("type", ""), event.get("reason", "")
        message = event_message(event)[:MAX_EVENT]
        say(f"    {kind} {reason} {event_object(event)}: {message}")


def read_outcome(job: str, seconds: float, workspace: Workspace | None) -> Outcome:
    """Return what a job has left in the workspace, if that can be read from here."""
    try:
        snapshots = workspace.steps(SNAPSHOTS) if workspace else []
        rows = list(read_rows(workspace.path(LOG))) if workspace and snapshots else []
    except (UserError, OSError):
        return Outcome(job, seconds)
    if not snapshots:
        return Outcome(job, seconds)
    sizes: list[int] = []
    for row in rows:
        size = row.get("world_size")
        if isinstance(size, int) and sizes[-1:] != [size]:
            sizes.append(size)
    return Outcome(job, seconds, snapshots[-1], tuple(snapshots), tuple(sizes))


def clean_up(cluster: Cluster, job: Json) -> None:
    """Delete a job that has ended, or warn: its outcome counts, whether that works or not."""
    try:
        cluster.remove(job)
    except UserError as error:
        namespace, name = cluster.namespace, job["metadata"]["name"]
        warn(
            f"{error} The {cluster.backend.kind} {namespace}/{name} is left for `ddpm jobs gc`; "
            f"to delete it now: `kubectl -n {namespace} delete {cluster.backend.name} {name}`."
        )


def cancel(cluster: Cluster, job: Json) -> None:
    """Delete the job without waiting for its end: after SIGTERM there is little time."""
    if "uid" not in job["metadata"]:  # the signal came while it was created, or looked for
        found = cluster.job(job["metadata"]["name"])
        if found is None or is_different(found, job):
            return
        job = found
    cluster.delete(job)
