"""What is asked of the API server: everything as plain data, and errors as sentences."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import yaml
from kubernetes import client, config

from ddpm_core.console import warn
from ddpm_core.errors import UserError
from ddpm_kube.answers import Exists, Missing, asked, plain
from ddpm_kube.job import GROUP, PLURAL, VERSION

TIMES = (5, 30)  # seconds to connect, and to wait for an answer

Call = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class Cluster:
    """One namespace of a cluster."""

    namespace: str
    jobs: client.CustomObjectsApi
    core: client.CoreV1Api

    def create(self, job: dict[str, Any]) -> dict[str, Any]:
        """Raises Exists, or UserError.

        Whoever is told to stop meanwhile learns first whether the job is made: else it might be a
        moment after it was looked for to be deleted.
        """

        def call(*given: Any, **more: Any) -> Any:
            with ThreadPoolExecutor(1) as alone:  # at its end the answer is there
                made = alone.submit(self.jobs.create_namespaced_custom_object, *given, **more)
                return made.result()

        return self._ask("create the PyTorchJob", call, *self._kind, body=job)

    def job(self, name: str) -> dict[str, Any] | None:
        call = self.jobs.get_namespaced_custom_object
        return self._found("read the PyTorchJob", call, *self._kind, name)

    def all_jobs(self, labels: str = "") -> list[dict[str, Any]]:
        """Those with these labels. Raises UserError, with the command that installs the operator
        where the cluster knows no PyTorchJob."""
        call = self.jobs.list_namespaced_custom_object
        found = self._ask("list PyTorchJobs", call, *self._kind, label_selector=labels)
        return list(found["items"])

    def own(self, name: str, owner: dict[str, Any]) -> dict[str, Any] | None:
        """Make the job go with another pod than the one that made it; None where it is gone."""
        call = self.jobs.patch_namespaced_custom_object
        body = {"metadata": {"ownerReferences": [owner]}}
        return self._found("patch the PyTorchJob", call, *self._kind, name, body)

    def delete(self, job: dict[str, Any]) -> None:
        """Delete this very job, its pods first; one that is gone is fine."""
        call = self.jobs.delete_namespaced_custom_object
        name, uid = job["metadata"]["name"], job["metadata"].get("uid")
        body: dict[str, Any] = {"propagationPolicy": "Foreground"}
        if uid:
            body["preconditions"] = {"uid": uid}
        try:
            self._found("delete the PyTorchJob", call, *self._kind, name, body=body)
        except Exists:  # there is another one of that name, which is not ours
            return

    def pod(self, name: str) -> dict[str, Any] | None:
        def call(*given: Any, **more: Any) -> dict[str, Any]:
            return plain(self.core.read_namespaced_pod(*given, **more, _preload_content=False))

        return self._found("read the pod", call, name, self.namespace)

    def _ask(self, doing: str, call: Call, *given: Any, **more: Any) -> dict[str, Any]:
        return asked(lambda: call(*given, **more, _request_timeout=TIMES), doing)

    def _found(self, doing: str, call: Call, *given: Any, **more: Any) -> dict[str, Any] | None:
        """The answer; None where what is asked for is not there."""
        try:
            return self._ask(doing, call, *given, **more)
        except Missing:
            return None

    @property
    def _kind(self) -> tuple[str, str, str, str]:
        return GROUP, VERSION, self.namespace, PLURAL


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
    except (yaml.YAMLError, ValueError, TypeError) as error:  # of a file that is something else
        raise UserError(
            f"{config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION} is no kubeconfig: "
            f"{' '.join(str(error).split())}. Set KUBECONFIG to one."
        ) from error
    settings = client.Configuration.get_default_copy()
    settings.retries = False  # `asked` does that, and tells
    api = client.ApiClient(settings)
    return Cluster(
        namespace or own or current or "default",
        client.CustomObjectsApi(api),
        client.CoreV1Api(api),
    )


def remove(cluster: Cluster, job: dict[str, Any]) -> bool:
    """Delete a job, and wait until it and its pods are gone; whether they are."""
    cluster.delete(job)
    return await_end(cluster, job)


def await_end(cluster: Cluster, job: dict[str, Any]) -> bool:
    """Wait until a job that is being deleted, and its pods, are gone.

    False, with a warning, a minute after the pods' grace period: a finalizer or a dead node may
    keep them for ever.
    """
    name, uid = job["metadata"]["name"], job["metadata"].get("uid")
    pods = job["spec"]["pytorchReplicaSpecs"].get("Worker", {}).get("template", {}).get("spec", {})
    limit = float(pods.get("terminationGracePeriodSeconds", 30)) + 60.0
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        left = cluster.job(name)
        if left is None or left["metadata"]["uid"] != uid:
            return True
        time.sleep(1.0)
    warn(
        f"The PyTorchJob {name} is still being deleted after {limit:.0f} s. What it waits for: "
        f"kubectl -n {cluster.namespace} get pytorchjob {name} -o jsonpath={{.metadata.finalizers}}"
    )
    return False
