"""Where the launcher runs: its namespace, and its own pod, if it is one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpm_core.errors import UserError
from ddpm_kube.cluster import Cluster, connect

_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
# KFP names a task's pod in the first; ours by the downward API in the second; a pod's host name
# is its own name too.
_NAMES = ("KFP_POD_NAME", "POD_NAME", "HOSTNAME")


@dataclass(frozen=True)
class Here:
    """`pod` is the launcher's own; none on a person's machine, or for a job of other namespaces."""

    cluster: Cluster
    pod: dict[str, Any] | None

    @property
    def image(self) -> str:
        """That of the pod: of its only container, or of the one that KFP calls main."""
        containers = self.pod["spec"]["containers"] if self.pod else []
        chosen = [c for c in containers if c["name"] in ("main", "launcher")] or containers[:1]
        return str(chosen[0]["image"]) if chosen else ""

    @property
    def owner(self) -> dict[str, Any] | None:
        """The reference with which a job goes when the pod is deleted."""
        if self.pod is None:
            return None
        metadata = self.pod["metadata"]
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": metadata["name"],
            "uid": metadata["uid"],
        }


def find(environment: Mapping[str, str], namespace: str | None = None) -> Here:
    """The cluster and the place in it. Raises UserError where there is no cluster."""
    inside = "KUBERNETES_SERVICE_HOST" in environment and _NAMESPACE.exists()
    own = _NAMESPACE.read_text().strip() if inside else None
    cluster = connect(namespace, own)
    if own is None or own != cluster.namespace:
        return Here(cluster, None)
    name = next((environment[key] for key in _NAMES if environment.get(key)), "")
    pod = cluster.pod(name) if name else None
    if pod is None:
        raise UserError(
            f"The launcher's own pod {name!r} is not in the namespace {own}. Give its name in "
            "POD_NAME (downward API, metadata.name)."
        )
    return Here(cluster, pod)
