"""Every overlay renders to valid documents that the cluster accepts."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cluster import KubectlFailed, Namespace, applied, has, kubectl
from support.documents import (
    JOBS,
    OVERLAYS,
    PLATFORM,
    Document,
    containers,
    mistakes,
    named,
    templates,
)

from ddpm_kube.backends import BACKENDS

RENDERED = [
    PLATFORM,
    JOBS,
    *sorted(file.parent for file in OVERLAYS.glob("*/Kustomization")),
    *sorted(file.parent for file in OVERLAYS.glob("*/jobs/Kustomization")),
]
# Kinds that a cluster may not have, with their resource and fields
ELSEWHERE = {
    "LocalQueue": ("localqueues.kueue.x-k8s.io", {"clusterQueue"}),
    "TrainingRuntime": ("trainingruntimes.trainer.kubeflow.org", {"mlPolicy", "template"}),
    "TrainJob": (
        "trainjobs.trainer.kubeflow.org",
        {"runtimeRef", "activeDeadlineSeconds", "trainer"},
    ),
}


@pytest.fixture(scope="module")
def empty() -> Iterator[Namespace]:
    made = Namespace(f"ddpm-test-overlays-{secrets.token_hex(3)}")
    made.create(platform=False)
    yield made
    made.delete()


def rendered(folder: Path) -> list[Document]:
    return list(yaml.safe_load_all(kubectl("kustomize", str(folder))))


@pytest.mark.parametrize("folder", RENDERED, ids=lambda f: str(f.relative_to(PLATFORM.parent)))
def test_each_overlay_is_valid_and_accepted(empty: Namespace, folder: Path) -> None:
    documents = rendered(folder)
    assert documents
    for document in documents:
        if document["kind"] in ELSEWHERE:
            assert set(document["spec"]) == ELSEWHERE[document["kind"]][1]
        else:
            assert mistakes(document) == []
    there = {kind for kind, (resource, _) in ELSEWHERE.items() if has(resource)}
    left_out = set(ELSEWHERE) - there | {"Namespace"}
    namespaced = [d for d in documents if d["kind"] not in left_out]
    for document in namespaced:
        document["metadata"]["namespace"] = empty.name
    if "TrainJob" in there and folder == OVERLAYS / "trainjob" / "jobs":
        with_runtime(empty)
    given = yaml.safe_dump_all(namespaced)
    output = applied(given, "--dry-run=server", "--validate=strict")
    assert output.count("(server dry run)") == len(namespaced)


def with_runtime(empty: Namespace) -> None:
    """Create the runtime of the chain; before, the API server refuses the TrainJob."""
    (job,) = yaml.safe_load_all((OVERLAYS / "trainjob/jobs/train.yaml").read_text())
    job["metadata"]["namespace"] = empty.name
    with pytest.raises(KubectlFailed) as caught:
        kubectl("apply", "--dry-run=server", "-f", "-", given=yaml.safe_dump(job))
    assert any(words in str(caught.value) for words in BACKENDS["trainjob"].advice)
    empty.apply(rendered(OVERLAYS / "trainjob" / "chain"))


@pytest.mark.parametrize("folder", [PLATFORM, JOBS], ids=["platform", "jobs"])
def test_plain_files_and_kustomize_give_the_same(folder: Path) -> None:
    """`kubectl apply -f` reads all files in a folder, except for the Kustomization."""
    read = kubectl("apply", "--dry-run=client", "-f", str(folder), "-o", "json")
    plain = json.loads(read)["items"]
    for document in plain:
        document["metadata"].pop("annotations", None)

    def key(document: Document) -> tuple[str, str]:
        return document["kind"], document["metadata"]["name"]

    assert sorted(rendered(folder), key=key) == sorted(plain, key=key)


def combined(folder: Path, base: Path, *components: str, **more: object) -> list[Document]:
    """Render a user's own Kustomization with these components."""
    up = Path("../" * len(folder.resolve().parts[1:]))
    own = {
        "resources": [str(up / str(base)[1:])],
        "components": [str(up / str(OVERLAYS / "components" / name)[1:]) for name in components],
        **more,
    }
    (folder / "Kustomization").write_text(yaml.safe_dump(own))
    return rendered(folder)


def test_the_images_are_set_in_one_place(tmp_path: Path) -> None:
    names = ("ddpm", "ddpm-light")
    images = [{"name": n, "newName": f"registry.example/{n}", "newTag": "1"} for n in names]
    documents = combined(tmp_path, JOBS, "gpu", "kueue", "s3", images=images)
    pods = [t for d in documents for t, _ in templates(d)]
    used = {c["image"] for t in pods for c in containers(t)}
    assert used == {"registry.example/ddpm:1", "registry.example/ddpm-light:1"}
    assert not any("persistentVolumeClaim" in v for t in pods for v in t["spec"]["volumes"])
    assert all("kueue.x-k8s.io/queue-name" in d["metadata"]["labels"] for d in documents)
    gpus = [c["resources"]["limits"].get("nvidia.com/gpu") for t in pods for c in containers(t)]
    assert gpus.count("1") == 5  # the evaluation's three containers use one in turn


def test_a_run_in_s3_keeps_the_claim_that_kfp_mounts(tmp_path: Path) -> None:
    documents = combined(tmp_path, PLATFORM, "s3", "in-kubeflow")
    assert {d["metadata"]["namespace"] for d in documents} == {"kubeflow"}
    assert named(documents, "ConfigMap")["ddpm-params"]["data"]["workspace"].startswith("s3://")
    assert "ddpm-workspace" in named(documents, "PersistentVolumeClaim")


def test_in_kubeflow_policies_select_only_our_pods() -> None:
    documents = rendered(OVERLAYS / "in-kubeflow") + rendered(OVERLAYS / "in-kubeflow/jobs")
    assert {d["metadata"]["namespace"] for d in documents} == {"kubeflow"}
    kinds = {d["kind"] for d in documents}
    assert not kinds & {"Namespace", "ResourceQuota", "LimitRange"}
    assert all(d["metadata"]["name"].startswith("ddpm") for d in documents)
    for name, policy in named(documents, "NetworkPolicy").items():
        chosen = policy["spec"]["podSelector"]["matchLabels"]
        assert chosen["app.kubernetes.io/part-of"] == "ddpm", name
