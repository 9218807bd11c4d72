"""Training as a TrainJob of Kubeflow Trainer (v2), whose TrainingRuntime is overlays/trainjob.

A TrainJob names a runtime, which contains the pod, and patches it. It cannot set Secrets and the
other options in `_FIXED`: the runtime decides them. Trainer has no elastic policy, so the job sets
PET_NNODES=MIN:MAX, with which torchrun continues while workers come and go. The runtime does not
use Trainer's policy `torch`, which would replace that by one number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ddpm_core.errors import Problem, got
from ddpm_kube.manifests import load
from ddpm_kube.options import Options

Json = dict[str, Any]

RUNTIME = "ddpm"  # the name of the TrainingRuntime
PORT = 29400  # of the rendezvous, which is in worker 0
SECRETS = {"ddpm-s3", "ddpm-mlflow"}  # those of the runtime
MANAGER = "ddpm.io/launcher"  # of our patch of the runtime; Kueue adds its own

# The fields of a pod that a TrainJob may patch (PodSpecPatch), as far as jobs use them.
_PATCHABLE = (
    "serviceAccountName",
    "terminationGracePeriodSeconds",
    "securityContext",
    "imagePullSecrets",
    "nodeSelector",
    "tolerations",
    "volumes",
)
_FIXED = ("secrets", "runtime_class", "image_pull_policy", "backoff_limit")


class TrainJob:
    """A TrainJob: trainjob.yaml, which is overlays/trainjob/jobs/train.yaml. See `Backend`."""

    name = "trainjob"
    kind, plural = "TrainJob", "trainjobs"
    group, version = "trainer.kubeflow.org", "v1alpha1"
    controller = "Kubeflow Trainer"
    deployment = "kubectl -n kubeflow-system get deployments"
    logs = "kubectl -n kubeflow-system logs deployment/kubeflow-trainer-controller-manager"
    install = (
        "kubectl apply --server-side -k "
        '"github.com/kubeflow/trainer.git/manifests/overlays/manager?ref=v2.3.0"'
    )
    container = "node"
    job_label = "jobset.sigs.k8s.io/jobset-name"
    pod_name = re.compile(r"-node-0-(\d+)(?:-[a-z0-9]*)?$")
    parts = "node"
    children: tuple[str, ...] = ("JobSet", "Job")
    # Words of Trainer's webhook, and of Kueue's
    advice: dict[str, str] = dict.fromkeys(
        ("specified trainingRuntime must be created", "denied the request: runtime '"),
        f"Create the TrainingRuntime {RUNTIME} with\n  kubectl apply -k overlays/trainjob",
    )

    def build(self, pod: Json, options: Options, name: str, processes: int) -> Json:
        job = load("trainjob.yaml")
        container = pod["spec"]["containers"][0]
        values = {
            "NNODES": f"{options.min_replicas}:{options.max_replicas}",
            "NPROC_PER_NODE": str(processes),
            "MAX_RESTARTS": str(options.max_restarts),
            "RDZV_BACKEND": "c10d",
            "RDZV_ENDPOINT": f"{name}-node-0-0.{name}:{PORT}",
            "RDZV_ID": name,
            "RDZV_CONF": f"last_call_timeout={options.join_seconds}",
        }
        torchrun = [{"name": f"PET_{key}", "value": value} for key, value in values.items()]
        mounts = {"name": self.container, "volumeMounts": container["volumeMounts"]}
        patch = {
            "metadata": pod["metadata"],
            "spec": {
                **{field: pod["spec"][field] for field in _PATCHABLE if field in pod["spec"]},
                "containers": [mounts],
            },
        }
        workers = {"name": "node", "template": {"spec": {"template": patch}}}
        job["spec"] |= {
            "runtimeRef": {"kind": "TrainingRuntime", "name": RUNTIME},
            "activeDeadlineSeconds": options.deadline_seconds,
            "trainer": {
                **{field: container[field] for field in ("image", "command", "args")},
                "numNodes": options.max_replicas,
                "env": [*container["env"], *torchrun],
                "resourcesPerNode": container["resources"],
            },
            "runtimePatches": [
                {
                    "manager": MANAGER,
                    "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [workers]}}},
                }
            ],
        }
        return job

    def problems(self, options: Options) -> Iterator[Problem]:
        hint = f"set it in the TrainingRuntime {RUNTIME} (overlays/trainjob)"
        for option in _FIXED:
            value = getattr(options, option)
            if value != Options.model_fields[option].get_default():
                yield Problem(option, got(value), "cannot be set by a TrainJob", hint)
        if others := sorted(set(options.optional_secrets) - SECRETS):
            yield Problem("optional_secrets", got(others[0]), "cannot be set by a TrainJob", hint)

    def conditions(self, job: Json) -> list[Json]:
        """Return conditions like those of a PyTorchJob; a TrainJob that runs has none."""
        status = job.get("status", {})
        jobs = status.get("jobsStatus") or []
        state = "Running" if any(one.get("ready") for one in jobs) else "Starting"
        begun = [{"type": state, "status": "True", "message": ""}] if jobs else []
        names = {"Complete": "Succeeded"}
        return begun + [
            {**one, "type": names.get(one["type"], one["type"])}
            for one in status.get("conditions") or []
        ]

    def is_suspended(self, job: Json) -> bool:
        return bool(job.get("spec", {}).get("suspend"))

    def grace_seconds(self, job: Json) -> float | None:
        patches = job["spec"].get("runtimePatches", [])
        ours = [one for one in patches if one["manager"] == MANAGER]
        if not ours:
            return None
        (workers,) = ours[0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        pod = workers["template"]["spec"]["template"]["spec"]
        seconds: float | None = pod.get("terminationGracePeriodSeconds")
        return seconds
