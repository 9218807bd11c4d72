"""The launcher's jobs in a namespace, and the deletion of those that were left behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ddpm_kube.cluster import Cluster
from ddpm_kube.diagnose import condition, is_finished
from ddpm_kube.job import MANAGED, RUN_ID
from ddpm_kube.spec import label_value

Json = dict[str, Any]

_LABELS = ",".join(f"{key}={value}" for key, value in MANAGED.items())


@dataclass(frozen=True)
class ListedJob:
    """A job as `ddpm jobs list` shows it.

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


def jobs(cluster: Cluster) -> Iterator[ListedJob]:
    """Yield every job that a launcher created, the oldest first."""
    now = datetime.now(UTC)
    found = cluster.all_jobs(_LABELS)
    for job in sorted(found, key=lambda one: str(one["metadata"]["creationTimestamp"])):
        metadata = job["metadata"]
        launcher, lost_at = _launcher(cluster, job)
        ends = [end for end in (_finished_at(job), lost_at) if end]
        status = job.get("status", {}).get("replicaStatuses", {}).get("Worker", {})
        yield ListedJob(
            name=metadata["name"],
            run_id=metadata["labels"].get(RUN_ID, ""),
            state=condition(job)[0] or "New",
            workers=status.get("active", 0),
            age=_seconds_between(metadata["creationTimestamp"], now),
            launcher=launcher,
            idle=_seconds_between(min(ends), now) if ends else None,
            job=job,
        )


def collect(cluster: Cluster, older_than: float, dry_run: bool) -> list[ListedJob]:
    """Delete and return the jobs that finished, or lost their launcher, `older_than` seconds ago.

    A job that was started from a person's machine has no launcher pod, and may finish.
    """
    leftover = [one for one in jobs(cluster) if one.idle is not None and one.idle >= older_than]
    for one in leftover:
        if not dry_run:
            cluster.delete(one.job)
    return leftover


def remove_run(cluster: Cluster, run_id: str) -> list[str]:
    """Delete the jobs of a run in any state; return the names of those that are gone then."""
    found = cluster.all_jobs(f"{_LABELS},{RUN_ID}={label_value(run_id)}")
    for job in found:
        cluster.delete(job)
    return [str(job["metadata"]["name"]) for job in found if cluster.wait_until_gone(job)]


def _finished_at(job: Json) -> str | None:
    if not is_finished(job):
        return None
    status = job["status"]
    held = [c for c in status["conditions"] if c["type"] in ("Succeeded", "Failed")]
    return str(status.get("completionTime") or held[-1]["lastTransitionTime"])


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
