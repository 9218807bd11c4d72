"""Overlays: what their components change, as read, and as kubectl renders them."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from pathlib import Path
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
    read,
    requested,
    templates,
)

ALL = [*read(PLATFORM), *read(JOBS)]
NAMES = sorted(file.parent.name for file in OVERLAYS.glob("*/Kustomization"))
# Kinds of Kueue and Trainer, checked on a cluster (tests/cluster)
ELSEWHERE = ("LocalQueue", "TrainJob", "TrainingRuntime")


def test_no_overlay_deletes_what_the_pods_of_kfp_mount() -> None:
    """Users combine components; none may delete what another one needs."""
    mounted = {claim["constant"] for task in executors().values() for claim in task["pvcMount"]}
    assert mounted <= set(named(ALL, "PersistentVolumeClaim"))
    for file in OVERLAYS.glob("components/*/Kustomization"):
        for patch in yaml.safe_load(file.read_text(encoding="utf-8")).get("patches", []):
            if "$patch: delete" in patch.get("patch", ""):
                assert patch["target"]["name"] not in mounted, file


def test_shared_namespaces_have_policies_for_our_pods_only() -> None:
    """Names in a Kustomization are patterns of complete names."""
    file = OVERLAYS / "components/shared-namespace/Kustomization"
    patches = yaml.safe_load(file.read_text(encoding="utf-8"))["patches"]
    narrowing = [p["target"] for p in patches if p["target"]["kind"] == "NetworkPolicy"]
    for name in named(ALL, "NetworkPolicy"):
        assert sum(bool(re.fullmatch(t["name"], name)) for t in narrowing) == 1, name
    for template in (t for d in ALL for t, _ in templates(d)):
        assert template["metadata"]["labels"]["app.kubernetes.io/part-of"] == "ddpm"


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


def rendered(*folders: Path) -> list[Document]:
    """Return the documents of Kustomizations, as `kubectl apply -k` gets them."""
    if not shutil.which("kubectl"):
        pytest.skip("kubectl is not installed")
    done = [
        subprocess.run(["kubectl", "kustomize", str(f)], capture_output=True, text=True, check=True)
        for f in folders
    ]
    return [d for one in done for d in yaml.safe_load_all(one.stdout)]


@pytest.mark.parametrize("name", NAMES)
def test_each_overlay_renders_to_valid_documents(name: str) -> None:
    documents = rendered(OVERLAYS / name, OVERLAYS / name / "jobs")
    for document in documents:
        assert document["kind"] in ELSEWHERE or mistakes(document) == [], document["metadata"]
    kinds = {d["kind"] for d in documents}
    trains = {"TrainJob", "TrainingRuntime"} if name == "trainjob" else {"PyTorchJob"}
    assert {"Deployment", "Job"} | trains <= kinds and not kinds & {"PyTorchJob"} - trains
    for template in (t for d in documents for t, _ in templates(d)):
        for volume in template["spec"]["volumes"]:
            assert "emptyDir" not in volume or "sizeLimit" in volume["emptyDir"]
        for container in containers(template):
            for kind in ("requests", "limits"):
                assert {"cpu", "memory", "ephemeral-storage"} <= set(container["resources"][kind])


@pytest.mark.parametrize("name", ["in-kubeflow", "profile"])
def test_shared_namespaces_keep_what_belongs_to_others(name: str) -> None:
    """A quota or a policy would affect other pods; other names could replace other objects."""
    documents = rendered(OVERLAYS / name, OVERLAYS / name / "jobs")
    assert not {d["kind"] for d in documents} & {"Namespace", "ResourceQuota", "LimitRange"}
    assert len({d["metadata"]["namespace"] for d in documents}) == 1
    assert all(re.match("ddpm(-|$)", d["metadata"]["name"]) for d in documents)
    for policy in named(documents, "NetworkPolicy").values():
        chosen = policy["spec"]["podSelector"]["matchLabels"]
        assert chosen["app.kubernetes.io/part-of"] == "ddpm"


def test_a_profile_needs_no_roles_and_no_sidecars() -> None:
    documents = rendered(OVERLAYS / "profile", OVERLAYS / "profile/jobs")
    assert not {d["kind"] for d in documents} & {"ServiceAccount", "Role", "RoleBinding"}
    pods = [t for d in documents for t, _ in templates(d)]
    assert len(pods) == 6
    for pod in pods:
        assert pod["spec"]["serviceAccountName"] == "default-editor"
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert pod["metadata"]["labels"]["sidecar.istio.io/inject"] == "false"


def test_the_digest_overlay_names_every_image_by_digest() -> None:
    documents = rendered(OVERLAYS / "digest", OVERLAYS / "digest/jobs")
    images = {c["image"] for d in documents for t, _ in templates(d) for c in containers(t)}
    places = {image.partition("@sha256:")[0] for image in images}
    assert places == {"registry.example/ddpm", "registry.example/ddpm-light"}
    assert all(re.fullmatch(r"[^:@]+@sha256:[0-9a-f]{64}", image) for image in images)


def test_the_page_of_a_run_is_off_by_default_and_only_reads() -> None:
    """No policy opens its port: the page has no login, and port-forward does not need one."""
    assert "ddpm-watch" not in named(ALL, "Deployment")
    documents = rendered(OVERLAYS / "watch")
    [(template, _)] = templates(named(documents, "Deployment")["ddpm-watch"])
    [container] = containers(template)
    assert container["image"] == "ddpm-light:dev"
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    assert mounts["workspace"]["readOnly"] and "--host" in container["args"]
    for policy in named(documents, "NetworkPolicy").values():
        labels = policy["spec"]["podSelector"].get("matchLabels", {})
        assert labels.get("app.kubernetes.io/name") != "ddpm-watch"


def test_the_page_combines_with_other_overlays(tmp_path: Path) -> None:
    """In S3 it mounts no volume; in a profile it has the account of the others."""
    folder = tmp_path / "overlays/combined"
    shutil.copytree(OVERLAYS, tmp_path / "overlays")
    shutil.copytree(PLATFORM, tmp_path / "manifests")
    folder.mkdir()
    components = [f"../components/{name}" for name in ("watch", "s3", "profile")]
    kustomization = {"resources": ["../../manifests"], "components": components}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    [(template, _)] = templates(named(rendered(folder), "Deployment")["ddpm-watch"])
    assert template["metadata"]["labels"]["ddpm.io/uses-s3"] == "true"
    assert not any("persistentVolumeClaim" in v for v in template["spec"]["volumes"])
    assert template["spec"]["serviceAccountName"] == "default-editor"
