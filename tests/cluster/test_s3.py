"""The complete pipeline without a volume: a run in S3, and raw data in DVC on S3."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from cluster import ROOT, Document, Namespace, wait_until
from kfp_by_hand import Backend
from support.dvc_registry import Registry
from support.s3_server import NAMES, Bucket

HOW = (
    "needs an S3 server that pods reach too: AWS_ENDPOINT_URL (no address of this machine alone, "
    "such as 127.0.0.1), AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_DEFAULT_REGION"
)
TINY = """
seed: 3
prepare: {image_size: 8, workers: 1}
model: {channels: 8, multipliers: [1, 2], blocks: 1, attention: [4]}
diffusion: {timesteps: 50}
train: {steps: 12, batch_size: 8, precision: fp32, snapshot_every: 6, milestone_every: 12,
        log_every: 2, grid: 4, ema: [0.9], optimizer: {warmup: 2}}
sample: {count: 40, batch_size: 10, steps: 4, shards: 2, precision: fp32}
evaluate: {metrics: [fid]}
tracking: {uri: "http://ddpm-mlflow:5000", experiment: ddpm}
"""
SMALL = {"cpu": "100m", "cpu_limit": "2", "memory": "1Gi", "shm": "64Mi", "join_seconds": 5}
GIT = 9418
SERVE = f"""
git clone --quiet --bare /bundle/registry.bundle /tmp/git/registry
exec git daemon --export-all --base-path=/tmp/git --port={GIT}
"""


@pytest.fixture(scope="module")
def store() -> Bucket:
    if not set(NAMES) <= set(os.environ):
        pytest.skip(HOW)
    return Bucket({name: os.environ[name] for name in NAMES})


@pytest.mark.timeout(1500)
def test_a_pipeline_without_a_volume_registers_a_model(
    namespace: Namespace, store: Bucket, tmp_path: Path
) -> None:
    registry = Registry(tmp_path / "registry", store.uri("dvc"))
    registry.photos("v1", each=20)
    serve(namespace, registry, tmp_path / "registry.bundle")
    namespace.apply(secret(store))
    namespace.kubectl("scale", "deployment/ddpm-champion", "--replicas=0")  # nothing to serve
    namespace.ready("ddpm-mlflow", 900)
    backend = Backend(namespace, ROOT / "pipelines/ddpm.yaml", "ddpm-launcher", claims=False)
    backend.run(
        params=TINY,
        workspace=store.uri("run"),
        source=f"dvc:git://registry:{GIT}/registry#photos@v1",
        job=SMALL,
    )

    (registered,) = backend.ran["register"]
    assert registered.outputs.parameters["Output"] == "models:/ddpm/1"
    revision = registry.git("rev-parse", "v1")
    for task, name in (("prepare", "data"), ("train", "model"), ("register", "registered")):
        (artifact,) = backend.ran[task][0].outputs.artifacts[name]
        assert artifact["metadata"]["revision"] == revision
        assert artifact["metadata"]["workspace"] == store.uri("run")
    manifest = json.loads(store.read("run/data/manifest.json"))
    assert manifest["source"]["revision"] == revision
    assert manifest["count"] + manifest["holdout_count"] == 40
    keys = store.keys("run/")
    for kept in ("snapshots/step-00000012/manifest.json", "evaluation/report.html"):
        assert f"run/{kept}" in keys
    mounts_nothing_and_tells_no_secret(namespace, backend, store)


def mounts_nothing_and_tells_no_secret(
    namespace: Namespace, backend: Backend, store: Bucket
) -> None:
    logs = {ran.pod: ran.log for pods in backend.ran.values() for ran in pods}
    assert len(logs) == 8
    for pod in namespace.list("pods"):
        name = pod["metadata"]["name"]
        if name in logs:
            assert not any("persistentVolumeClaim" in v for v in pod["spec"]["volumes"]), name
    hidden = store.environment["AWS_SECRET_ACCESS_KEY"]
    assert not [name for name, log in logs.items() if hidden in log]


def secret(store: Bucket) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "ddpm-s3"},
        "stringData": store.environment,
    }


def serve(namespace: Namespace, registry: Registry, bundle: Path) -> None:
    """Serve the registry's repository to pods as git://registry, from its bundle in a ConfigMap."""
    registry.git("bundle", "create", "--quiet", str(bundle), "--all")
    content = base64.b64encode(bundle.read_bytes()).decode()
    labels = {"app.kubernetes.io/name": "registry"}
    namespace.apply(
        [
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": "registry"},
                "binaryData": {"registry.bundle": content},
            },
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": "registry"},
                "spec": {"selector": labels, "ports": [{"port": GIT}]},
            },
            *policies(labels),
        ]
    )
    namespace.pod(
        "registry",
        command=["sh", "-ec", SERVE],
        labels=labels,
        config_maps={"registry": "/bundle"},
    )
    asks = ("git", "ls-remote", f"git://localhost:{GIT}/registry")
    wait_until(lambda: namespace.exec("registry", *asks), "the git server answers", 180)


def policies(server: dict[str, str]) -> list[Document]:
    """Return the policies that a user adds: for the ports of this S3 server and of git://."""
    s3 = urlsplit(os.environ["AWS_ENDPOINT_URL"]).port or 80
    uses = {"ddpm.io/uses-s3": "true"}
    return [
        policy("test-uses-s3", uses, "egress", [{"ports": ports(s3, GIT)}]),
        policy("test-registry", server, "ingress", [{"ports": ports(GIT)}]),
    ]


def policy(name: str, of: dict[str, str], direction: str, rules: list[Document]) -> Document:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name},
        "spec": {
            "podSelector": {"matchLabels": of},
            "policyTypes": [direction.capitalize()],
            direction: rules,
        },
    }


def ports(*numbers: int) -> list[Document]:
    return [{"protocol": "TCP", "port": number} for number in numbers]
