"""The launcher's jobs in a namespace, and the deletion of those that nobody looks after."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ddpm_kube.cluster import Cluster, await_end
from ddpm_kube.job import MANAGER, RUN
from ddpm_kube.names import label_value
from ddpm_kube.reasons import condition, finished

_LABELS = ",".join(f"{key}={value}" for key, value in MANAGER.items())


@dataclass(frozen=True)
class Listed:
    """A job as people see it. `idle`: seconds since it finished or lost its launcher; None: not."""

    name: str
    run_id: str
    state: str
    workers: int
    age: float
    launcher: str
    idle: float | None
    job: dict[str, Any]


def jobs(cluster: Cluster) -> Iterator[Listed]:
    """Every job that a launcher made, the oldest first."""
    now = datetime.now(UTC)
    found = cluster.all_jobs(_LABELS)
    for job in sorted(found, key=lambda one: str(one["metadata"]["creationTimestamp"])):
        metadata = job["metadata"]
        launcher, gone_since = _launcher(cluster, job)
        ends = [end for end in (_finished_at(job), gone_since) if end]
        status = job.get("status", {}).get("replicaStatuses", {}).get("Worker", {})
        yield Listed(
            name=metadata["name"],
            run_id=metadata["labels"].get(RUN, ""),
            state=condition(job)[0] or "New",
            workers=status.get("active", 0),
            age=_seconds(metadata["creationTimestamp"], now),
            launcher=launcher,
            idle=_seconds(min(ends), now) if ends else None,
            job=job,
        )


def collect(cluster: Cluster, older_than: float, dry_run: bool) -> list[Listed]:
    """Delete the jobs that finished, or whose launcher has ended, `older_than` seconds ago.

    One that was started from a person's machine has no launcher's pod, and is left to finish.
    """
    doomed = [one for one in jobs(cluster) if one.idle is not None and one.idle >= older_than]
    for one in doomed:
        if not dry_run:
            cluster.delete(one.job)
    return doomed


def remove_run(cluster: Cluster, run_id: str) -> list[str]:
    """Delete what a run has left, whatever its state; the names of what is gone then."""
    labels = f"{_LABELS},{RUN}={label_value(run_id)}"
    found = cluster.all_jobs(labels)
    for job in found:
        cluster.delete(job)
    return [str(job["metadata"]["name"]) for job in found if await_end(cluster, job)]


def _finished_at(job: dict[str, Any]) -> str | None:
    if not finished(job):
        return None
    status = job["status"]
    held = [c for c in status["conditions"] if c["type"] in ("Succeeded", "Failed")]
    return str(status.get("completionTime") or held[-1]["lastTransitionTime"])


def _launcher(cluster: Cluster, job: dict[str, Any]) -> tuple[str, str | None]:
    """The launcher's pod, in words, and since when it looks after nothing."""
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


def _seconds(moment: str, now: datetime) -> float:
    return (now - datetime.fromisoformat(moment.replace("Z", "+00:00"))).total_seconds()
