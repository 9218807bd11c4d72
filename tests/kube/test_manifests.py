"""Manifests and overlays: valid for the API, restricted, and consistent with each other."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import yaml
from support.documents import (
    JOBS,
    OVERLAYS,
    PLATFORM,
    Document,
    containers,
    executors,
    mistakes,
    named,
    quantity,
    read,
    requested,
    templates,
)

from ddpm_core.config import Config
from ddpm_core.config import load as params
from ddpm_core.sampling.plan import shards

ALL = [*read(PLATFORM), *read(JOBS), *read(OVERLAYS / "components/watch")]
PODS = [(d["metadata"]["name"], t, n) for d in ALL for t, n in templates(d)]
WITHOUT_TORCH = {
    "ddpm-prepare",
    "ddpm-mlflow",
    "ddpm-watch",
}  # what these run is in the light image
RESOURCES = ("cpu", "memory", "ephemeral-storage")


def configmap() -> dict[str, str]:
    data: dict[str, str] = named(ALL, "ConfigMap")["ddpm-params"]["data"]
    return data


def config() -> Config:
    return params.validate(yaml.safe_load(configmap()["params.yaml"]))


def test_every_document_is_valid_for_the_api() -> None:
    assert len(ALL) > 20
    for document in ALL:
        assert mistakes(document) == [], document["metadata"]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["spec", "template", "spec", "containerz"], [], "no such field"),
        (["spec", "backoffLimit"], "3", "must be int"),
        (["spec", "template", "spec", "containers"], None, "must be a list"),
        (["spec", "template", "spec", "volumes", 0, "name"], None, "must be str"),
    ],
)
def test_invalid_documents_are_found(path: list[Any], value: Any, message: str) -> None:
    document = copy.deepcopy(named(ALL, "Job")["ddpm-sample"])
    place: Any = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert any(message in mistake for mistake in mistakes(document))


def test_one_apply_is_enough_for_an_empty_cluster() -> None:
    """kubectl creates documents in the order of the files: the namespace comes first."""
    assert ALL[0]["kind"] == "Namespace"
    place = ALL[0]["metadata"]["name"]
    assert {d["metadata"].get("namespace") for d in ALL[1:]} == {place}
    labels = ALL[0]["metadata"]["labels"]
    modes = ("enforce", "audit", "warn")
    assert {labels[f"pod-security.kubernetes.io/{mode}"] for mode in modes} == {"restricted"}
    for folder in (PLATFORM, JOBS):
        listed = yaml.safe_load((folder / "Kustomization").read_text())["resources"]
        assert listed == sorted(file.name for file in folder.glob("*.yaml"))


def test_every_container_is_restricted_and_has_our_image() -> None:
    images = yaml.safe_load((PLATFORM / "image" / "Kustomization").read_text())["images"]
    assert all(image["name"] == image["newName"] for image in images)
    full, light = (f"{image['name']}:{image['newTag']}" for image in images)
    assert (full, light) == ("ddpm:dev", "ddpm-light:dev")
    for name, template, _ in PODS:
        pod = template["spec"]
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True and security["runAsUser"] == 1000, name
        assert security["fsGroup"] == 1000, name
        # Otherwise each start of a pod sets the owner of every file of a run again.
        assert security["fsGroupChangePolicy"] == "OnRootMismatch", name
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, name
        writable = {v["name"] for v in pod["volumes"] if "configMap" not in v}
        wanted = light if name in WITHOUT_TORCH else full
        for container in containers(template):
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False, name
            assert own["readOnlyRootFilesystem"] is True, name
            assert own["capabilities"] == {"drop": ["ALL"]}, name
            assert container["image"] == wanted, name
            assert container["imagePullPolicy"] == "IfNotPresent", name
            mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
            assert mounts["/tmp"] in writable, name


def test_only_the_launcher_has_a_token_with_few_permissions() -> None:
    accounts = named(ALL, "ServiceAccount")
    with_token = {n for n, a in accounts.items() if a["automountServiceAccountToken"]}
    assert with_token == {"ddpm-launcher"}
    assert all(t["spec"]["automountServiceAccountToken"] is False for _, t, _ in PODS)
    [role] = named(ALL, "Role").values()
    [binding] = named(ALL, "RoleBinding").values()
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert [s["name"] for s in binding["subjects"]] == ["ddpm-launcher"]
    allowed = {name: set(rule["verbs"]) for rule in role["rules"] for name in rule["resources"]}
    assert allowed == {
        "pytorchjobs": {"get", "list", "watch", "create", "patch", "delete"},
        "trainjobs": {"get", "list", "watch", "create", "patch", "delete"},
        "pods": {"get", "list", "watch"},
        "events": {"list", "watch"},
        "pods/log": {"get"},
    }


def test_every_object_that_a_pod_names_exists() -> None:
    there = {kind: set(named(ALL, kind)) for kind in ("ServiceAccount", "ConfigMap", "Service")}
    claims = set(named(ALL, "PersistentVolumeClaim"))
    for name, template, _ in PODS:
        pod = template["spec"]
        assert pod["serviceAccountName"] in there["ServiceAccount"], name
        volumes = {v["name"]: v for v in pod["volumes"]}
        for volume in volumes.values():
            assert volume.get("configMap", {}).get("name", "ddpm-params") in there["ConfigMap"]
            assert volume.get("persistentVolumeClaim", {}).get("claimName", "ddpm-mlflow") in claims
        for container in containers(template):
            assert {m["name"] for m in container["volumeMounts"]} == set(volumes), name
            for variable in container.get("env", []):
                if source := variable.get("valueFrom"):
                    assert source["configMapKeyRef"]["key"] in configmap(), name
            for source in container.get("envFrom", []):
                secret = source["secretRef"]
                assert secret["name"] in ("ddpm-s3", "ddpm-mlflow") and secret["optional"], name
    for service in named(ALL, "Service").values():
        chosen = [t for _, t, _ in PODS if selects(service["spec"]["selector"], t)]
        assert len(chosen) == 1, service["metadata"]
        ports = {p["name"] for c in containers(chosen[0]) for p in c.get("ports", [])}
        assert {p["targetPort"] for p in service["spec"]["ports"]} <= ports


def selects(wanted: dict[str, str], template: Document) -> bool:
    labels = template["metadata"]["labels"]
    return all(labels.get(key) == value for key, value in wanted.items())


def test_policies_deny_all_except_what_a_pod_uses() -> None:
    policies = named(ALL, "NetworkPolicy")
    deny = policies.pop("ddpm-deny-all")["spec"]
    assert deny == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    carried = set(itertools.chain(*(t["metadata"]["labels"].items() for _, t, _ in PODS)))
    carried |= labels_of_tasks()
    for name, policy in policies.items():
        rules = [r for key in ("ingress", "egress") for r in policy["spec"].get(key, [])]
        peers = [p for rule in rules for key in ("from", "to") for p in rule.get(key, [])]
        own = [
            p["podSelector"] for p in peers if "namespaceSelector" not in p and "ipBlock" not in p
        ]
        for selector in [policy["spec"]["podSelector"], *own]:
            assert set(selector.get("matchLabels", {}).items()) <= carried, name
        assert rules and all(
            rule.get("ports") or rule.get("to") or rule.get("from") for rule in rules
        )


def labels_of_tasks() -> set[tuple[str, str]]:
    labels = (task.get("podMetadata", {}).get("labels", {}) for task in executors().values())
    return {label for one in labels for label in one.items()}


def test_only_pods_that_track_may_reach_mlflow() -> None:
    track = {"ddpm-champion", "ddpm-train", "ddpm-evaluate"}
    labelled = {n for n, t, _ in PODS if t["metadata"]["labels"].get("ddpm.io/uses-mlflow")}
    assert labelled == track
    with_password = {
        n
        for n, t, _ in PODS
        if all({"name": "ddpm-mlflow", "optional": True} in secrets(c) for c in containers(t))
    }
    assert with_password == track
    service = named(ALL, "Service")["ddpm-mlflow"]
    port = service["spec"]["ports"][0]["port"]
    assert config().tracking.uri == f"http://{service['metadata']['name']}:{port}"


def test_pods_that_read_external_sources_may_reach_them() -> None:
    """prepare.source and evaluate.inception_weights may be https:// or s3://."""
    labelled = {n for n, t, _ in PODS if t["metadata"]["labels"].get("ddpm.io/uses-s3")}
    assert labelled == {"ddpm-prepare", "ddpm-evaluate"}


def test_a_kfp_task_may_reach_what_its_job_may() -> None:
    for verb in ("prepare", "train", "sample", "evaluate"):
        [ours] = [t["metadata"]["labels"] for n, t, _ in PODS if n == f"ddpm-{verb}"]
        task = executors()[f"exec-{verb}"]["podMetadata"]["labels"]
        assert {label for label in ours if "/uses-" in label} <= set(task), verb


def secrets(container: Document) -> list[Document]:
    return [source["secretRef"] for source in container.get("envFrom", [])]


def test_all_pods_together_fit_two_cores_and_the_quota() -> None:
    total = {
        f"{kind}.{what}": sum(n * requested(t, what, kind) for _, t, n in PODS)
        for kind in ("requests", "limits")
        for what in RESOURCES
    }
    assert total["requests.cpu"] <= 1.0
    assert total["requests.memory"] <= 6 * 2**30
    hard = named(ALL, "ResourceQuota")["ddpm"]["spec"]["hard"]
    for name, taken in total.items():
        # Twice, because replaced jobs are still ending when the new ones start.
        assert 2 * taken <= quantity(hard[name]), name
    assert 2 * sum(n for _, _, n in PODS) <= quantity(hard["pods"])


def test_every_container_fits_a_quota_for_any_resource() -> None:
    """With a quota for a resource, the API server refuses containers without a limit for it."""
    [limits] = named(ALL, "LimitRange")["ddpm"]["spec"]["limits"]
    assert set(limits["default"]) == set(limits["defaultRequest"]) == set(RESOURCES)
    for name, template, _ in PODS:
        for container in containers(template):
            resources = container["resources"]
            for what in RESOURCES:
                request, limit = (
                    quantity(resources[kind][what]) for kind in ("requests", "limits")
                )
                assert 0 < request <= limit, (name, what)


def test_no_pod_can_fill_the_disk_or_memory_of_a_node() -> None:
    """A pod is evicted if its volumes exceed their limit, or the limits of its containers."""
    for name, template, _ in PODS:
        folders = [v["emptyDir"] for v in template["spec"]["volumes"] if "emptyDir" in v]
        assert folders, name
        for kind, resource in ((None, "ephemeral-storage"), ("Memory", "memory")):
            sizes = [quantity(f["sizeLimit"]) for f in folders if f.get("medium") == kind]
            for container in containers(template):
                limit = quantity(container["resources"]["limits"][resource])
                assert sum(sizes) <= limit, (name, resource)


def test_jobs_end_are_removed_and_keep_the_reason() -> None:
    for name, template, _ in PODS:
        policies = {c.get("terminationMessagePolicy") for c in containers(template)}
        assert policies == {"FallbackToLogsOnError"}, name
    jobs = {**named(ALL, "Job"), **named(ALL, "PyTorchJob")}
    assert len(jobs) == 4
    for name, job in jobs.items():
        spec = job["spec"].get("runPolicy", job["spec"])
        assert spec["ttlSecondsAfterFinished"] >= 86400, name
        # Each attempt may wait for two hours.
        attempts = 1 + spec.get("backoffLimit", job["spec"].get("backoffLimitPerIndex", 0))
        assert spec["activeDeadlineSeconds"] > attempts * 7200, name


def test_the_sampling_job_matches_the_params() -> None:
    """Each pod samples one shard, no shard is empty, and all kinds of nodes give the same bytes."""
    sample = config().sample
    job = named(ALL, "Job")["ddpm-sample"]["spec"]
    assert job["completions"] == job["parallelism"] == sample.shards
    assert (
        f"--shard=$(JOB_COMPLETION_INDEX)/{sample.shards}"
        in job["template"]["spec"]["containers"][0]["args"]
    )
    assert all(shard.chunks for shard in shards(sample))
    assert sample.precision != "auto" and sample.checkpoints != "best"


def test_jobs_wait_for_their_inputs_with_a_limit() -> None:
    waits = {"ddpm-train": "prepare", "ddpm-sample": "train", "ddpm-evaluate": "sample"}
    for name, template, _ in PODS:
        first = containers(template)[0]
        if name in waits:
            assert first["args"][:3] == ["wait", waits[name], "--limit"], name
        else:
            assert "wait" not in first["args"], name


def test_training_restarts_and_has_time_to_save() -> None:
    spec = named(ALL, "PyTorchJob")["ddpm-train"]["spec"]
    elastic = spec["elasticPolicy"]
    assert set(spec["pytorchReplicaSpecs"]) == {"Worker"}
    assert elastic["rdzvBackend"] == "c10d" and elastic["rdzvId"] and elastic["maxRestarts"] > 0
    assert spec["runPolicy"]["schedulingPolicy"] == {"minAvailable": elastic["minReplicas"]}
    worker = spec["pytorchReplicaSpecs"]["Worker"]
    assert elastic["minReplicas"] < elastic["maxReplicas"] == worker["replicas"]
    [trainer] = worker["template"]["spec"]["containers"]
    assert trainer["name"] == "pytorch"
    environment = {v["name"]: v.get("value") for v in trainer["env"]}
    shutdown = float(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    assert 30 < shutdown < worker["template"]["spec"]["terminationGracePeriodSeconds"]
    assert environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
