"""Manifests and overlays: valid for the API, restricted, and consistent with each other."""

from __future__ import annotations

import copy
import itertools
import json
import re
import shlex
from typing import Any

import pytest
import yaml
from support.documents import (
    JOBS,
    OVERLAYS,
    PLATFORM,
    ROOT,
    Document,
    containers,
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

ALL = [*read(PLATFORM), *read(JOBS)]
PODS = [(d["metadata"]["name"], t, n) for d in ALL for t, n in templates(d)]


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


def test_every_container_is_restricted_and_has_the_same_image() -> None:
    image = yaml.safe_load((PLATFORM / "image" / "Kustomization").read_text())["images"][0]
    wanted = f"{image['name']}:{image['newTag']}"
    assert image["name"] == image["newName"]
    for name, template, _ in PODS:
        pod = template["spec"]
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True and security["runAsUser"] == 1000, name
        assert security["fsGroup"] == 1000, name
        # Otherwise each start of a pod sets the owner of every file of a run again.
        assert security["fsGroupChangePolicy"] == "OnRootMismatch", name
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, name
        writable = {v["name"] for v in pod["volumes"] if "configMap" not in v}
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
            assert volume.get("persistentVolumeClaim", {}).get("claimName", "mlflow") in claims
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
    carried |= {("training.kubeflow.org/operator-name", "pytorchjob-controller")}  # the operator's
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


def tasks() -> list[Document]:
    """Return the pods of KFP's tasks, such as the one that launches a PyTorchJob."""
    _, platforms = yaml.safe_load_all((ROOT / "pipelines/ddpm.yaml").read_text(encoding="utf-8"))
    return list(platforms["platforms"]["kubernetes"]["deploymentSpec"]["executors"].values())


def labels_of_tasks() -> set[tuple[str, str]]:
    found = (task.get("podMetadata", {}).get("labels", {}).items() for task in tasks())
    return set(itertools.chain(*found))


def test_no_overlay_deletes_what_the_pods_of_kfp_mount() -> None:
    """Users combine components; none may delete what another one needs."""
    mounted = {claim["constant"] for task in tasks() for claim in task["pvcMount"]}
    assert mounted <= set(named(ALL, "PersistentVolumeClaim"))
    for file in OVERLAYS.glob("components/*/Kustomization"):
        for patch in yaml.safe_load(file.read_text(encoding="utf-8")).get("patches", []):
            if "$patch: delete" in patch.get("patch", ""):
                assert patch["target"]["name"] not in mounted, file


def test_in_kubeflow_every_policy_selects_only_our_pods() -> None:
    """Names in a Kustomization are patterns of complete names."""
    file = OVERLAYS / "components/in-kubeflow/Kustomization"
    patches = yaml.safe_load(file.read_text(encoding="utf-8"))["patches"]
    narrowing = [p["target"] for p in patches if p["target"]["kind"] == "NetworkPolicy"]
    for name in named(ALL, "NetworkPolicy"):
        assert sum(bool(re.fullmatch(t["name"], name)) for t in narrowing) == 1, name
    assert all(t["metadata"]["labels"]["app.kubernetes.io/part-of"] == "ddpm" for _, t, _ in PODS)


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
    service = named(ALL, "Service")["mlflow"]
    port = service["spec"]["ports"][0]["port"]
    assert config().tracking.uri == f"http://{service['metadata']['name']}:{port}"


def test_pods_that_read_external_sources_may_reach_them() -> None:
    """prepare.source and evaluate.inception_weights may be https:// or s3://."""
    labelled = {n for n, t, _ in PODS if t["metadata"]["labels"].get("ddpm.io/uses-s3")}
    assert labelled == {"ddpm-prepare", "ddpm-evaluate"}


def test_a_kfp_task_may_reach_what_its_job_may() -> None:
    _, platforms = yaml.safe_load_all((ROOT / "pipelines/ddpm.yaml").read_text(encoding="utf-8"))
    executors = platforms["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    for verb in ("prepare", "train", "sample", "evaluate"):
        [ours] = [t["metadata"]["labels"] for n, t, _ in PODS if n == f"ddpm-{verb}"]
        task = executors[f"exec-{verb}"]["podMetadata"]["labels"]
        assert {label for label in ours if "/uses-" in label} <= set(task), verb


def secrets(container: Document) -> list[Document]:
    return [source["secretRef"] for source in container.get("envFrom", [])]


def test_all_pods_together_fit_two_cores_and_the_quota() -> None:
    total = {
        f"{kind}.{what}": sum(n * requested(t, what, kind) for _, t, n in PODS)
        for kind in ("requests", "limits")
        for what in ("cpu", "memory")
    }
    assert total["requests.cpu"] <= 1.0
    assert total["requests.memory"] <= 6 * 2**30
    hard = named(ALL, "ResourceQuota")["ddpm"]["spec"]["hard"]
    for name, taken in total.items():
        # Twice, because replaced jobs are still ending when the new ones start.
        assert 2 * taken <= quantity(hard[name]), name
    assert 2 * sum(n for _, _, n in PODS) <= quantity(hard["pods"])


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


def test_the_image_finds_the_gpu_driver_where_clouds_mount_it() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line[4:] for line in text.rpartition("FROM ")[2].splitlines() if line[:4] == "ENV "]
    given = dict(word.split("=", 1) for line in lines for word in shlex.split(line))
    folders = given["LD_LIBRARY_PATH"].split(":")
    assert folders == ["/usr/local/nvidia/lib", "/usr/local/nvidia/lib64"]
    assert given["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"
    assert "NVIDIA_VISIBLE_DEVICES" not in given  # the device plugin sets it


def patched(documents: list[Document], component: str) -> list[Document]:
    """Return the documents with the JSON patches of a component applied, like kustomize."""
    folder = OVERLAYS / "components" / component
    done: list[Document] = json.loads(json.dumps(documents))  # copies what YAML anchors share
    for patch in yaml.safe_load((folder / "Kustomization").read_text(encoding="utf-8"))["patches"]:
        text = patch.get("patch") or (folder / patch["path"]).read_text(encoding="utf-8")
        kind, name = patch["target"]["kind"], patch["target"]["name"]
        chosen = named(done, kind)[name]
        for operation in yaml.safe_load(text):
            _apply(chosen, operation)
    return done


def _apply(document: Document, operation: Document) -> None:
    *path, last = operation["path"].lstrip("/").replace("~1", "\0").split("/")
    place: Any = document
    for key in path:
        place = place[int(key) if isinstance(place, list) else key.replace("\0", "/")]
    value = copy.deepcopy(operation["value"])
    if isinstance(place, dict):
        assert operation["op"] == "add" or last in place, operation
        place[last.replace("\0", "/")] = value
    elif last == "-":
        place.append(value)
    else:
        assert operation["op"] == "replace", operation
        place[int(last)] = value


@pytest.fixture(scope="module")
def with_gpus() -> dict[str, Document]:
    """Return the containers of the jobs in the overlay `gpu`, named JOB/CONTAINER."""
    documents = patched(ALL, "gpu")
    assert all(mistakes(document) == [] for document in documents)
    return {
        f"{d['metadata']['name']}/{c['name']}": c
        for d in documents
        if d["kind"] in ("Job", "PyTorchJob")
        for t, _ in templates(d)
        for c in containers(t)
    }


def environment(container: Document) -> dict[str, str | None]:
    return {v["name"]: v.get("value") for v in container["env"]}


def test_the_process_group_ends_a_hung_collective(with_gpus: dict[str, Document]) -> None:
    """The heartbeat timeout is not for collectives, but for a hanging watchdog of NCCL."""
    for name, container in with_gpus.items():
        assert "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC" not in environment(container), name


def test_containers_that_compute_require_a_gpu(with_gpus: dict[str, Document]) -> None:
    """So does the one that waits for samples: their settings depend on the device."""
    having = {"ddpm-train/pytorch", "ddpm-sample/sample"}
    having |= {f"ddpm-evaluate/{name}" for name in ("wait", "evaluate", "register")}
    for name, container in with_gpus.items():
        resources, arguments = container["resources"], container["args"]
        gpus = {resources[kind].get("nvidia.com/gpu", "0") for kind in ("requests", "limits")}
        assert gpus == {"1" if name in having else "0"}, name
        assert (arguments[-2:] == ["-S", "device=cuda"]) == (name in having), name


def test_a_pod_requests_one_gpu_for_all_its_containers() -> None:
    jobs = [t for d in patched(ALL, "gpu") if "Job" in d["kind"] for t, _ in templates(d)]
    gpus = [requested(t, "nvidia.com/gpu") for t in jobs if "tolerations" in t["spec"]]
    assert gpus == [1, 1, 1]


def test_compiler_processes_equal_the_cores_of_a_container(with_gpus: dict[str, Document]) -> None:
    for name in ("ddpm-train/pytorch", "ddpm-sample/sample", "ddpm-evaluate/register"):
        threads = environment(with_gpus[name])["TORCHINDUCTOR_COMPILE_THREADS"]
        assert threads == with_gpus[name]["resources"]["limits"]["cpu"] == "8", name


def test_no_command_of_the_image_build_can_fail_unnoticed() -> None:
    """In the shell of a RUN, commands after `;` or `||` run even if those before have failed."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    commands = [line for line in text.splitlines() if line.startswith("RUN ")]
    assert len(commands) >= 5
    for command in commands:
        words = list(shlex.shlex(command, posix=True, punctuation_chars=True))
        assert not {";", "||", "|", "&"} & set(words), command
