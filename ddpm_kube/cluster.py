"""What is asked of the API server: everything as plain data, and errors as sentences.

An answer that is late, lost or says "try again" is asked for again, for a minute at most.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import urllib3
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from ddpm_core.console import Outage, warn
from ddpm_core.errors import UserError
from ddpm_kube.job import GROUP, PLURAL, VERSION

T = TypeVar("T")

PASSING = (429, 500, 502, 503, 504)
PATIENCE = 60.0  # seconds that the API server may be away
TIMES = (5, 30)  # seconds to connect, and to wait for an answer
INSTALL = (
    "kubectl apply --server-side -k "
    '"github.com/kubeflow/training-operator.git/manifests/overlays/standalone?ref=v1.9.4"'
)


class Exists(Exception):
    """There is a job of this name already."""


@dataclass(frozen=True)
class Cluster:
    """One namespace of a cluster."""

    namespace: str
    jobs: client.CustomObjectsApi
    core: client.CoreV1Api

    def create(self, job: dict[str, Any]) -> dict[str, Any]:
        """Raises Exists, or UserError."""
        call = self.jobs.create_namespaced_custom_object
        return asked(
            lambda: call(*self._kind, body=job, _request_timeout=TIMES), "create the PyTorchJob"
        )

    def job(self, name: str) -> dict[str, Any] | None:
        call = self.jobs.get_namespaced_custom_object
        return _or_none(
            lambda: call(*self._kind, name, _request_timeout=TIMES), "read the PyTorchJob"
        )

    def all_jobs(self, labels: str = "") -> list[dict[str, Any]]:
        """Those with these labels. Raises UserError, with the command that installs the operator
        where the cluster knows no PyTorchJob."""
        call = self.jobs.list_namespaced_custom_object
        found = asked(
            lambda: call(*self._kind, label_selector=labels, _request_timeout=TIMES),
            "list PyTorchJobs",
        )
        return list(found["items"])

    def own(self, name: str, owner: dict[str, Any]) -> None:
        """Make the job go with another pod than the one that made it."""
        call = self.jobs.patch_namespaced_custom_object
        body = {"metadata": {"ownerReferences": [owner]}}
        asked(lambda: call(*self._kind, name, body, _request_timeout=TIMES), "patch the PyTorchJob")

    def delete(self, job: dict[str, Any]) -> None:
        """Delete this very job, its pods first; one that is gone is fine."""
        call = self.jobs.delete_namespaced_custom_object
        name, uid = job["metadata"]["name"], job["metadata"].get("uid")
        body = {"propagationPolicy": "Foreground"}
        if uid:
            body["preconditions"] = {"uid": uid}  # type: ignore[assignment]
        try:
            asked(
                lambda: call(*self._kind, name, body=body, _request_timeout=TIMES),
                "delete the PyTorchJob",
            )
        except (Missing, Exists):  # gone; or there is another one of that name, which is not ours
            return

    def pod(self, name: str) -> dict[str, Any] | None:
        call = self.core.read_namespaced_pod
        return _or_none(
            lambda: plain(
                call(name, self.namespace, _preload_content=False, _request_timeout=TIMES)
            ),
            "read the pod",
        )

    @property
    def _kind(self) -> tuple[str, str, str, str]:
        return GROUP, VERSION, self.namespace, PLURAL


class Missing(UserError):
    """What was asked for is not there."""


def connect(namespace: str | None, own: str | None) -> Cluster:
    """The cluster around this pod (in namespace `own`), or that of the kubeconfig."""
    current = ""
    try:
        if own is not None:
            config.load_incluster_config()
        else:
            config.load_kube_config()
            current = config.list_kube_config_contexts()[1]["context"].get("namespace", "")
    except (config.ConfigException, OSError) as error:
        raise UserError(
            f"No Kubernetes cluster is known here: {str(error).rstrip('.')}. Set KUBECONFIG, or "
            "run in a pod whose ServiceAccount token is mounted."
        ) from error
    settings = client.Configuration.get_default_copy()
    settings.retries = False  # `asked` does that, and tells
    api = client.ApiClient(settings)
    return Cluster(
        namespace or own or current or "default",
        client.CustomObjectsApi(api),
        client.CoreV1Api(api),
    )


def remove(cluster: Cluster, job: dict[str, Any]) -> None:
    """Delete a job, and wait until it and its pods are gone."""
    cluster.delete(job)
    await_end(cluster, job)


def await_end(cluster: Cluster, job: dict[str, Any]) -> None:
    """Wait until a job that is being deleted, and its pods, are gone."""
    name, uid = job["metadata"]["name"], job["metadata"].get("uid")
    pods = job["spec"]["pytorchReplicaSpecs"].get("Worker", {}).get("template", {}).get("spec", {})
    deadline = time.monotonic() + float(pods.get("terminationGracePeriodSeconds", 30)) + 60.0
    while time.monotonic() < deadline:
        left = cluster.job(name)
        if left is None or left["metadata"]["uid"] != uid:
            return
        time.sleep(1.0)
    warn(f"The PyTorchJob {name} is still being deleted; `ddpm jobs gc` looks after it later.")


def plain(response: Any) -> dict[str, Any]:
    """The JSON object of an answer that was not made into a model."""
    found: dict[str, Any] = json.loads(response.data)
    return found


def asked(call: Callable[[], T], doing: str, patience: float = PATIENCE) -> T:
    """The answer. Raises Exists, Missing or UserError with what the API server said."""
    deadline, pause, outage = time.monotonic() + patience, 0.5, Outage()
    while True:
        try:
            answer = call()
        except (ApiException, urllib3.exceptions.HTTPError, OSError) as error:
            if not passing(error) or time.monotonic() + pause > deadline:
                raise refused(error, doing) from error
            outage.begins(f"Cannot {doing} yet: {said(error)}. It is tried again.")
            time.sleep(pause)
            pause = min(pause * 2, 8.0)
        else:
            outage.ends("The API server answers again.")
            return answer


def passing(error: Exception) -> bool:
    """Whether the same question may be answered a moment later."""
    return not isinstance(error, ApiException) or error.status in (0, None, *PASSING)


def said(error: Exception) -> str:
    """What the API server said, in a line."""
    if not isinstance(error, ApiException):
        return " ".join(str(error).split()) or type(error).__name__
    try:
        message = json.loads(error.body or "")["message"]
    except (ValueError, KeyError, TypeError):
        message = f"{error.status} {error.body or error.reason or ''}"
    return " ".join(str(message).split()).rstrip(".")


def refused(error: Exception, doing: str) -> Exception:
    """The sentence of an error that does not pass."""
    status, message = getattr(error, "status", None), said(error)
    if status == 409:
        return Exists(message)
    if status == 404 and ("page not found" in message or "could not find the requested" in message):
        return UserError(
            "The cluster knows no PyTorchJob: Kubeflow's Training Operator is not installed. "
            f"Install it with\n  {INSTALL}"
        )
    if status == 404:
        return Missing(f"Cannot {doing}: {message}.")
    if status == 403 and "exceeded quota" in message:
        return UserError(f"The quota of the namespace is exceeded: {message}.")
    if status in (401, 403):
        return UserError(
            f"Not allowed to {doing}: {message}. The launcher's ServiceAccount needs the Role "
            "ddpm-launcher of manifests/."
        )
    if "failed calling webhook" in message:
        return UserError(
            f"Cannot {doing}: {message}. The Training Operator's pod does not answer; see "
            "`kubectl -n kubeflow get pods`."
        )
    return UserError(f"Cannot {doing}: {message}.")


def _or_none(call: Callable[[], dict[str, Any]], doing: str) -> dict[str, Any] | None:
    try:
        return asked(call, doing)
    except Missing:
        return None
