"""Where the launcher runs: its cluster and namespace, and its own pod if it runs in one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddpm_core.errors import UserError
from ddpm_kube.cluster import Cluster, connect

Json = dict[str, Any]

_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
# KFP sets the first in its tasks' pods, users set the second with the downward API, and the host
# name of a pod is its name.
_POD_NAMES = ("KFP_POD_NAME", "POD_NAME", "HOSTNAME")


@dataclass(frozen=True)
class Location:
    """The cluster of the launcher, and its own pod.

    `pod` is None on a person's machine, and for jobs in another namespace than the pod's.
    """

    cluster: Cluster
    pod: Json | None

    def using(self, backend: str) -> Location:
        """Return this location for jobs of a backend; see `Cluster.using`."""
        return replace(self, cluster=self.cluster.using(backend))

    @property
    def image(self) -> str:
        """Return the image of the pod's main container; empty without a pod."""
        containers = self.pod["spec"]["containers"] if self.pod else []
        # KFP adds containers to the pods of its tasks and calls ours "main".
        chosen = [c for c in containers if c["name"] in ("main", "launcher")] or containers[:1]
        return str(chosen[0]["image"]) if chosen else ""

    @property
    def owner(self) -> Json | None:
        """Return the owner reference with which a job is deleted together with the pod."""
        if self.pod is None:
            return None
        metadata = self.pod["metadata"]
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": metadata["name"],
            "uid": metadata["uid"],
        }


def locate(
    environment: Mapping[str, str], namespace: str | None = None, patience: float = 0.0
) -> Location:
    """Find the cluster and the launcher's own pod. Raises UserError without a cluster."""
    in_pod = "KUBERNETES_SERVICE_HOST" in environment and _NAMESPACE.exists()
    pod_namespace = _NAMESPACE.read_text().strip() if in_pod else None
    cluster = connect(namespace, pod_namespace, patience)
    if pod_namespace is None or pod_namespace != cluster.namespace:
        return Location(cluster, None)
    name = next((environment[key] for key in _POD_NAMES if environment.get(key)), "")
    pod = cluster.pod(name) if name else None
    if pod is None:
        raise UserError(
            f"The launcher's own pod, {name!r}, is not in the namespace {pod_namespace}. Set "
            "POD_NAME to its name (downward API, metadata.name)."
        )
    return Location(cluster, pod)
