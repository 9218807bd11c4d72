"""The launcher's jobs in a namespace, and the deletion of those that were left behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ddpm_kube.backends import ENDED, condition, is_finished
from ddpm_kube.cluster import Cluster
from ddpm_kube.diagnose import is_running
from ddpm_kube.job import MANAGED, RUN_ID
from ddpm_kube.spec import label_value

Json = dict[str, Any]

_LABELS = ",".join(f"{key}={value}" for key, value in MANAGED.items())


@dataclass(frozen=True)
class ListedJob:
    """A job as `ddpm jobs list` shows it; `workers` is the number of those that run.

    `age` is in seconds; so is `idle`, since the job finished or lost its launcher; None: neither.
    """

    name: str
    run_id: str
    state: str
    workers: int
    age: float
    launcher: str
    idle: float | None
    job: Json
    cluster: Cluster  # for jobs of this kind


def jobs(cluster: Cluster) -> Iterator[ListedJob]:
    """Yield every job that a launcher created, the oldest first."""
    now = datetime.now(UTC)
    for job, of_kind in sorted(_find(cluster, _LABELS), key=lambda one: _created(one[0])):
        metadata = job["metadata"]
        launcher, lost_at = _launcher(cluster, job)
        ends = [end for end in (_finished_at(of_kind, job), lost_at) if end]
        yield ListedJob(
            name=metadata["name"],
            run_id=metadata["labels"].get(RUN_ID, ""),
            state=condition(of_kind.backend, job)[0] or "New",
            workers=sum(map(is_running, of_kind.pods(metadata["name"]))),
            age=_seconds_between(metadata["creationTimestamp"], now),
            launcher=launcher,
            idle=_seconds_between(min(ends), now) if ends else None,
            job=job,
            cluster=of_kind,
        )


def collect(cluster: Cluster, older_than: float, dry_run: bool) -> list[ListedJob]:
    """Delete and return the jobs that finished, or lost their launcher, `older_than` seconds ago.

    A job that was started from a person's machine has no launcher pod, and may finish.
    """
    leftover = [one for one in jobs(cluster) if one.idle is not None and one.idle >= older_than]
    for one in leftover:
        if not dry_run:
            one.cluster.delete(one.job)
    return leftover


def remove_run(cluster: Cluster, run_id: str) -> list[str]:
    """Delete the jobs of a run in any state; return the names of those that are gone then."""
    found = _find(cluster, f"{_LABELS},{RUN_ID}={label_value(run_id)}")
    for job, of_kind in found:
        of_kind.delete(job)
    return [str(job["metadata"]["name"]) for job, of_kind in found if of_kind.wait_until_gone(job)]


def _find(cluster: Cluster, labels: str) -> list[tuple[Json, Cluster]]:
    """Return the jobs of every kind that the cluster has, each with the cluster for its kind."""
    return [(job, of_kind) for of_kind in cluster.installed() for job in of_kind.all_jobs(labels)]


def _created(job: Json) -> str:
    return str(job["metadata"]["creationTimestamp"])


def _finished_at(cluster: Cluster, job: Json) -> str | None:
    if not is_finished(cluster.backend, job):
        return None
    held = [c for c in cluster.backend.conditions(job) if c["type"] in ENDED]
    return str(job["status"].get("completionTime") or held[-1]["lastTransitionTime"])


def _launcher(cluster: Cluster, job: Json) -> tuple[str, str | None]:
    """Return the launcher's pod for people, and when it ended; None while it is running."""
    owners = [o for o in job["metadata"].get("ownerReferences", []) if o["kind"] == "Pod"]
    if not owners:
        return "none", None
    pod = cluster.pod(owners[0]["name"])
    if pod is None or pod["metadata"]["uid"] != owners[0]["uid"]:
        return f"{owners[0]['name']} (gone)", str(job["metadata"]["creationTimestamp"])
    phase = pod["status"].get("phase", "")
    if phase not in ("Succeeded", "Failed"):
        return str(owners[0]["name"]), None
    ends = [
        status.get("state", {}).get("terminated", {}).get("finishedAt")
        for status in pod["status"].get("containerStatuses", [])
    ]
    last = max((str(end) for end in ends if end), default=pod["metadata"]["creationTimestamp"])
    return f"{owners[0]['name']} ({phase})", str(last)


def _seconds_between(moment: str, now: datetime) -> float:
    return (now - datetime.fromisoformat(moment.replace("Z", "+00:00"))).total_seconds()
