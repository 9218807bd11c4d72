"""The job of a JobSpec: the pod of train.yaml, patched with options and params, in a backend's job.

train.yaml is manifests/jobs/20-train.yaml, so a job of `ddpm jobs train` and one of `kubectl apply`
are the same except for what this module and the backend set.

The params travel in an annotation of the workers' pods, which the downward API mounts as a file. So
the job needs no other object: nothing else must be created, owned, cleaned up or permitted, nobody
can change the settings of a running job, and the job's hash covers them.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from ddpm_core.runtime import log_records
from ddpm_kube.manifests import load
from ddpm_kube.options import Claim, Options, amount
from ddpm_kube.spec import JobSpec, label_value

SPEC_HASH = "ddpm.io/spec-hash"
RUN_ID = "ddpm.io/run-id"
MANAGED = {"app.kubernetes.io/managed-by": "ddpm-launcher"}
PARAMS = "ddpm.io/params"

_PARAMS_FOLDER = "/etc/ddpm"

Json = dict[str, Any]


def build(spec: JobSpec, owner: Json | None = None) -> Json:
    """Return the job as JSON.

    `owner` is a reference to the launcher's pod; Kubernetes deletes the job together with it.
    """
    options = spec.options
    own_labels = {**options.labels, RUN_ID: label_value(spec.run_id)}
    queue = {"kueue.x-k8s.io/queue-name": options.queue} if options.queue else {}
    pod = load("train.yaml")["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    _patch_pod(pod, spec, own_labels)
    job = spec.backend.build(pod, options, spec.name, spec.processes)

    metadata = job["metadata"]
    metadata |= {
        "name": spec.name,
        "namespace": spec.namespace,
        "labels": {**own_labels, **metadata["labels"], **MANAGED, **queue},
        "annotations": {SPEC_HASH: spec_hash({**job["spec"], "labels": queue})},
    }
    if owner:
        metadata["ownerReferences"] = [owner]
    return job


def spec_hash(body: Json) -> str:
    """Return a hash that tells whether an existing job equals the one that would be created."""
    text = json.dumps(body, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _patch_pod(template: Json, spec: JobSpec, own_labels: dict[str, str]) -> None:
    options = spec.options
    labels = {**own_labels, **template["metadata"]["labels"]}
    # These labels open the network policies: only to what this training uses.
    for label, used in (
        ("ddpm.io/uses-mlflow", spec.tracks_by_http),
        ("ddpm.io/uses-s3", spec.config.workspace.startswith("s3://")),
    ):
        labels.pop(label, None)
        labels |= {label: "true"} if used else {}
    template["metadata"] = {
        "labels": labels,
        "annotations": {**options.annotations, PARAMS: spec.params},
    }

    pod = template["spec"]
    del pod["initContainers"]  # the launcher starts only after `prepare`
    pod["serviceAccountName"] = options.service_account
    pod["terminationGracePeriodSeconds"] = options.grace_seconds
    optional = {
        "imagePullSecrets": [{"name": name} for name in options.image_pull_secrets],
        "runtimeClassName": options.runtime_class,
        "nodeSelector": options.node_selector,
        "tolerations": _tolerations(options),
    }
    pod |= {field: value for field, value in optional.items() if value}
    _patch_container(pod["containers"][0], spec)
    _patch_volumes(pod, options)


def _patch_container(container: Json, spec: JobSpec) -> None:
    options = spec.options
    gpus = {options.gpu_resource: str(options.gpu)} if options.gpu else {}
    disk = container["resources"]["requests"]["ephemeral-storage"]
    container |= {
        "image": spec.image,
        "imagePullPolicy": options.image_pull_policy,
        "args": ["-m", "ddpm_core.cli", "train", "-p", f"{_PARAMS_FOLDER}/params.yaml"],
        "env": _environment(container["env"], spec),
        "resources": {
            "requests": {
                "cpu": options.cpu_request,
                "memory": options.max_memory,
                "ephemeral-storage": min(disk, options.tmp, key=amount),
                **gpus,
            },
            "limits": {
                "cpu": options.max_cpu,
                "memory": options.max_memory,
                "ephemeral-storage": options.tmp,
                **gpus,
            },
        },
    }
    secrets = [(name, False) for name in options.secrets]
    secrets += [(name, True) for name in options.optional_secrets]
    del container["envFrom"]
    if secrets:
        container["envFrom"] = [
            {"secretRef": {"name": name, "optional": optional}} for name, optional in secrets
        ]


def _environment(template: list[Json], spec: JobSpec) -> list[Json]:
    options = spec.options
    # Otherwise each process starts a thread per core of the node, and up to 32 compiler processes.
    threads = str(max(1, int(amount(options.max_cpu) / spec.processes)))
    values = {
        # The workspace is in the params already.
        **{one["name"]: one["value"] for one in template if "value" in one},
        "HOME": "/tmp",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": threads,
        "TORCHINDUCTOR_COMPILE_THREADS": threads,
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(options.shutdown_seconds),
        log_records.VARIABLE: "1",
        **options.env,
    }
    return [{"name": name, "value": value} for name, value in values.items()]


def _patch_volumes(pod: Json, options: Options) -> None:
    """Mount the params from their annotation, and the claims of the options."""
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    field = {"fieldPath": f"metadata.annotations['{PARAMS}']"}
    params = {"items": [{"path": "params.yaml", "fieldRef": field}]}
    volumes["params"] = {"name": "params", "downwardAPI": params}
    volumes["tmp"]["emptyDir"] = {"sizeLimit": options.tmp}
    volumes["shm"]["emptyDir"]["sizeLimit"] = options.max_shm
    del volumes["workspace"]
    container = pod["containers"][0]
    mounts = [mount for mount in container["volumeMounts"] if mount["name"] != "workspace"]
    for claim in options.volumes:
        name = _volume_name(claim)
        volumes[name] = {"name": name, "persistentVolumeClaim": {"claimName": claim.claim}}
        mount: Json = {"name": name, "mountPath": claim.path}
        mount |= {"subPath": claim.sub_path} if claim.sub_path else {}
        mount |= {"readOnly": True} if claim.read_only else {}
        mounts.append(mount)
    pod["volumes"], container["volumeMounts"] = list(volumes.values()), mounts


def _volume_name(claim: Claim) -> str:
    """Return a name for each mount: a TrainJob mounts a volume only once."""
    text = f"{claim.claim}:{claim.path}"
    return "claim-" + hashlib.sha256(text.encode()).hexdigest()[:8]


def _tolerations(options: Options) -> list[Json]:
    """Return the tolerations of the options, and that of GPU nodes if the workers have GPUs.

    Nodes with GPUs are usually tainted with the name of the resource.
    """
    tolerations = [
        {key: value for key, value in toleration.model_dump().items() if value}
        for toleration in options.tolerations
    ]
    gpu_nodes = {"key": options.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}
    missing = options.gpu and gpu_nodes not in tolerations
    return [*tolerations, gpu_nodes] if missing else tolerations
