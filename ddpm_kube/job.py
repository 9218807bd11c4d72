"""The PyTorchJob of a JobSpec, built with the Training SDK's models, as plain data.

How the params reach the workers: as an annotation of their pods, which the downward API shows as a
file. So the job is whole by itself. There is nothing else to create, to own, to clean up or to be
allowed; nobody can change the settings of a job that runs; and the job's hash covers them.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from kubeflow import training as sdk
from kubernetes import client

from ddpm_kube.names import label_value
from ddpm_kube.options import Options, amount
from ddpm_kube.spec import JobSpec

GROUP, VERSION, PLURAL = "kubeflow.org", "v1", "pytorchjobs"
CONTAINER = "pytorch"  # the operator wants this name
HASH = "ddpm.io/spec-hash"
RUN = "ddpm.io/run-id"
MANAGER = {"app.kubernetes.io/managed-by": "ddpm-launcher"}
PARAMS = "ddpm.io/params"
_FOLDER = "/etc/ddpm"


def build(spec: JobSpec, owner: dict[str, Any] | None = None) -> dict[str, Any]:
    """The job; `owner` is the reference to the launcher's pod, with which the job goes."""
    options = spec.options
    queue = {"kueue.x-k8s.io/queue-name": options.queue} if options.queue else {}
    replicas = sdk.KubeflowOrgV1ReplicaSpec(
        replicas=options.max_replicas, restart_policy="OnFailure", template=_pod(spec)
    )
    body = sdk.KubeflowOrgV1PyTorchJobSpec(
        elastic_policy=_elastic(spec),
        # Without a number torchrun may count the cores of the node.
        nproc_per_node=str(spec.processes),
        pytorch_replica_specs={"Worker": replicas},
        run_policy=sdk.KubeflowOrgV1RunPolicy(
            clean_pod_policy="Running",
            backoff_limit=options.backoff_limit,
            active_deadline_seconds=options.deadline_seconds,
            # A scheduler of gangs would else wait until there is room for all replicas.
            scheduling_policy=sdk.KubeflowOrgV1SchedulingPolicy(min_available=options.min_replicas),
        ),
    )
    plain: dict[str, Any] = client.ApiClient().sanitize_for_serialization(body)
    metadata: dict[str, Any] = {
        "name": spec.name,
        "namespace": spec.namespace,
        "labels": {**_labels(spec), **MANAGER, **queue},
        "annotations": {HASH: spec_hash({**plain, "labels": queue})},
    }
    if owner:
        metadata["ownerReferences"] = [owner]
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "PyTorchJob",
        "metadata": metadata,
        "spec": plain,
    }


def spec_hash(plain: dict[str, Any]) -> str:
    """What tells whether a job that is there is the one that would be made."""
    text = json.dumps(plain, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _elastic(spec: JobSpec) -> Any:
    options = spec.options
    return sdk.KubeflowOrgV1ElasticPolicy(
        rdzv_backend="c10d",
        rdzv_id=spec.name,
        rdzv_conf=[
            sdk.KubeflowOrgV1RDZVConf(key="last_call_timeout", value=str(options.join_seconds))
        ],
        min_replicas=options.min_replicas,
        max_replicas=options.max_replicas,
        # Without one torchrun starts nothing again.
        max_restarts=options.max_restarts,
    )


def _labels(spec: JobSpec) -> dict[str, str]:
    return {
        **spec.options.labels,
        "app.kubernetes.io/name": "ddpm-train",
        "app.kubernetes.io/part-of": "ddpm",
        RUN: label_value(spec.run_id),
    }


def _pod(spec: JobSpec) -> Any:
    options = spec.options
    # A sidecar that never ends would keep the pod from ending.
    labels = {**_labels(spec), "sidecar.istio.io/inject": "false"}
    if spec.tracks_by_http:
        labels["ddpm.io/uses-mlflow"] = "true"
    if spec.config.workspace.startswith("s3://"):
        labels["ddpm.io/uses-s3"] = "true"
    pulls = [client.V1LocalObjectReference(name=name) for name in options.image_pull_secrets]
    return client.V1PodTemplateSpec(
        metadata=client.V1ObjectMeta(
            labels=labels, annotations={**options.annotations, PARAMS: spec.params}
        ),
        spec=client.V1PodSpec(
            service_account_name=options.service_account,
            automount_service_account_token=False,
            enable_service_links=False,
            termination_grace_period_seconds=options.grace_seconds,
            security_context=client.V1PodSecurityContext(
                run_as_non_root=True,
                run_as_user=1000,
                run_as_group=1000,
                fs_group=1000,
                fs_group_change_policy="OnRootMismatch",
                seccomp_profile=client.V1SeccompProfile(type="RuntimeDefault"),
            ),
            image_pull_secrets=pulls or None,
            runtime_class_name=options.runtime_class,
            node_selector=options.node_selector or None,
            tolerations=_tolerations(options) or None,
            containers=[_container(spec)],
            volumes=_volumes(spec),
        ),
    )


def _container(spec: JobSpec) -> Any:
    options = spec.options
    gpus = {options.gpu_resource: str(options.gpu)} if options.gpu else {}
    return client.V1Container(
        name=CONTAINER,
        image=spec.image,
        image_pull_policy=options.image_pull_policy,
        command=["python", "-m", "torch.distributed.run"],
        args=["-m", "ddpm_core.cli", "train", "-p", f"{_FOLDER}/params.yaml"],
        env=[client.V1EnvVar(name=k, value=v) for k, v in _environment(spec).items()],
        env_from=_secret_sources(spec) or None,
        resources=client.V1ResourceRequirements(
            requests={"cpu": options.request_of_cpu, "memory": options.limit_of_memory, **gpus},
            limits={"cpu": options.limit_of_cpu, "memory": options.limit_of_memory, **gpus},
        ),
        security_context=client.V1SecurityContext(
            allow_privilege_escalation=False,
            read_only_root_filesystem=True,
            run_as_non_root=True,
            capabilities=client.V1Capabilities(drop=["ALL"]),
        ),
        # The end of the log stays in the pod's status, should the log itself be gone.
        termination_message_policy="FallbackToLogsOnError",
        volume_mounts=_mounts(spec),
    )


def _environment(spec: JobSpec) -> dict[str, str]:
    options = spec.options
    threads = max(1, int(amount(options.limit_of_cpu) / spec.processes))
    return {
        "HOME": "/tmp",
        "PYTHONUNBUFFERED": "1",
        # Else as many as the node has cores, and up to 32 processes that compile, for each of ours.
        "OMP_NUM_THREADS": str(threads),
        "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # docs/elastic.md, Limits
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(options.shutdown_seconds),
        **options.env,
    }


def _secret_sources(spec: JobSpec) -> list[Any]:
    both = [(n, False) for n in spec.options.secrets]
    both += [(n, True) for n in spec.options.optional_secrets]
    return [
        client.V1EnvFromSource(secret_ref=client.V1SecretEnvSource(name=name, optional=optional))
        for name, optional in both
    ]


def _volumes(spec: JobSpec) -> list[Any]:
    shown = client.V1DownwardAPIVolumeFile(
        path="params.yaml",
        field_ref=client.V1ObjectFieldSelector(field_path=f"metadata.annotations['{PARAMS}']"),
    )
    memory = client.V1EmptyDirVolumeSource(medium="Memory", size_limit=spec.options.limit_of_shm)
    disk = client.V1EmptyDirVolumeSource(size_limit=spec.options.tmp)
    claims = sorted({claim.claim for claim in spec.options.volumes})
    return [
        client.V1Volume(
            name="params", downward_api=client.V1DownwardAPIVolumeSource(items=[shown])
        ),
        client.V1Volume(name="tmp", empty_dir=disk),
        client.V1Volume(name="shm", empty_dir=memory),
        *(
            client.V1Volume(
                name=_volume_name(claim),
                persistent_volume_claim=client.V1PersistentVolumeClaimVolumeSource(
                    claim_name=claim
                ),
            )
            for claim in claims
        ),
    ]


def _mounts(spec: JobSpec) -> list[Any]:
    return [
        client.V1VolumeMount(name="params", mount_path=_FOLDER, read_only=True),
        client.V1VolumeMount(name="tmp", mount_path="/tmp"),
        client.V1VolumeMount(name="shm", mount_path="/dev/shm"),
        *(
            client.V1VolumeMount(
                name=_volume_name(claim.claim),
                mount_path=claim.path,
                sub_path=claim.sub_path or None,
                read_only=claim.read_only or None,
            )
            for claim in spec.options.volumes
        ),
    ]


def _volume_name(claim: str) -> str:
    return "claim-" + hashlib.sha256(claim.encode()).hexdigest()[:8]


def _tolerations(options: Options) -> list[Any]:
    """Those given, and that of nodes with GPUs, which are usually tainted with the resource."""
    made = [
        client.V1Toleration(
            key=given.key or None,
            operator=given.operator,
            value=given.value or None,
            effect=given.effect or None,
        )
        for given in options.tolerations
    ]
    own = client.V1Toleration(key=options.gpu_resource, operator="Exists", effect="NoSchedule")
    return [*made, own] if options.gpu and own not in made else made
