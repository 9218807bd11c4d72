"""Training as a PyTorchJob of Kubeflow's Training Operator (v1)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ddpm_core.errors import Problem
from ddpm_kube.manifests import load
from ddpm_kube.options import Options

Json = dict[str, Any]


class PyTorchJob:
    """A PyTorchJob: train.yaml, which is manifests/jobs/20-train.yaml. See `Backend`."""

    name = "pytorchjob"
    kind, plural = "PyTorchJob", "pytorchjobs"
    group, version = "kubeflow.org", "v1"
    controller = "Kubeflow's Training Operator"
    deployment = "kubectl -n kubeflow get deployment training-operator"
    logs = "kubectl -n kubeflow logs deployment/training-operator"
    install = (
        "kubectl apply --server-side -k "
        '"github.com/kubeflow/training-operator.git/manifests/overlays/standalone?ref=v1.9.4"'
    )
    container = "pytorch"
    job_label = "training.kubeflow.org/job-name"
    pod_name = re.compile(r"-worker-(\d+)$")
    parts = "worker"
    children: tuple[str, ...] = ()
    advice: dict[str, str] = {}  # noqa: RUF012

    def build(self, pod: Json, options: Options, name: str, processes: int) -> Json:
        job = load("train.yaml")
        body = job["spec"]
        body["nprocPerNode"] = str(processes)
        body["elasticPolicy"] |= {
            "minReplicas": options.min_replicas,
            "maxReplicas": options.max_replicas,
            "rdzvId": name,
            "rdzvConf": [{"key": "last_call_timeout", "value": str(options.join_seconds)}],
            "maxRestarts": options.max_restarts,
        }
        body["runPolicy"] |= {
            "backoffLimit": options.backoff_limit,
            "activeDeadlineSeconds": options.deadline_seconds,
            "schedulingPolicy": {"minAvailable": options.min_replicas},
        }
        worker = body["pytorchReplicaSpecs"]["Worker"]
        worker |= {"replicas": options.max_replicas, "template": pod}
        return job

    def problems(self, options: Options) -> Iterator[Problem]:
        return iter(())

    def conditions(self, job: Json) -> list[Json]:
        return list(job.get("status", {}).get("conditions") or [])

    def is_suspended(self, job: Json) -> bool:
        return bool(job.get("spec", {}).get("runPolicy", {}).get("suspend"))

    def grace_seconds(self, job: Json) -> float | None:
        pod = job["spec"]["pytorchReplicaSpecs"].get("Worker", {}).get("template", {})
        seconds: float | None = pod.get("spec", {}).get("terminationGracePeriodSeconds")
        return seconds
