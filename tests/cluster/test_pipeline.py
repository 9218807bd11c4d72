"""The compiled pipeline, component by component in pods, started like KFP does."""

from __future__ import annotations

import pytest
from cluster import ROOT, Namespace
from kfp_by_hand import Backend, Failed

TINY = """
seed: 3
prepare: {source: digits, image_size: 8, workers: 1}
model: {channels: 8, multipliers: [1, 2], blocks: 1, attention: [4]}
diffusion: {timesteps: 50}
train: {steps: 12, batch_size: 8, precision: fp32, snapshot_every: 6, milestone_every: 12,
        log_every: 2, grid: 4, ema: [0.9], optimizer: {warmup: 2}}
sample: {count: 40, batch_size: 10, steps: 4, shards: 2, precision: fp32}
evaluate: {metrics: [fid, prdc]}
tracking: {uri: "http://ddpm-mlflow:5000", experiment: ddpm}
"""
COMPILED = ROOT / "pipelines/ddpm.yaml"
SMALL = {"cpu": "100m", "cpu_limit": "2", "memory": "1Gi", "shm": "64Mi", "join_seconds": 5}
CHAMPION = """
import json, urllib.request
url = "http://127.0.0.1:5000/api/2.0/mlflow/registered-models/alias?name=ddpm&alias=champion"
print(json.load(urllib.request.urlopen(url, timeout=30))["model_version"]["version"])
"""


@pytest.mark.timeout(1500)
def test_the_components_run_in_pods_to_a_registered_model(namespace: Namespace) -> None:
    namespace.kubectl("scale", "deployment/ddpm-champion", "--replicas=0")  # nothing to serve
    namespace.ready("ddpm-mlflow", 900)
    backend = Backend(namespace, COMPILED, account="ddpm-launcher")
    backend.run(params=TINY, job=SMALL)

    wanted = {"evaluate", "finish", "plan", "prepare", "register", "sample", "train"}
    assert set(backend.ran) == wanted
    assert len(backend.ran["sample"]) == 2
    # Training ran in a PyTorchJob, of which nothing is left.
    (trained,) = backend.ran["train"]
    assert "Created the PyTorchJob" in trained.log
    assert f"train-{backend.run_id}" in trained.log
    assert not namespace.list("pytorchjobs")
    assert trained.outputs.parameters["Output"] == 12

    for name, pods in backend.ran.items():
        for ran in pods:
            assert all(0 < size < 2_000_000 for size in ran.sizes.values()), (name, ran.sizes)
            for (artifact,) in ran.outputs.artifacts.values():
                assert artifact["uri"].startswith(backend.root)
                assert artifact["metadata"]["workspace"] == "/workspace/run"
    (registered,) = backend.ran["register"]
    (champion,) = registered.outputs.artifacts["registered"]
    (model,) = trained.outputs.artifacts["model"]
    assert champion["metadata"]["weights"] == model["metadata"]["weights"]
    assert registered.outputs.parameters["Output"] == "models:/ddpm/1"
    mlflow = namespace.kubectl("exec", "deployment/ddpm-mlflow", "--", "python", "-c", CHAMPION)
    assert mlflow.strip() == "1"
    (finished,) = backend.ran["finish"]
    assert "# The run succeeded" in finished.log
    assert finished.log.count("│ up to date │") == 5


@pytest.mark.timeout(600)
def test_a_failed_run_reports_the_cause_at_its_end(namespace: Namespace) -> None:
    backend = Backend(namespace, COMPILED, account="ddpm-launcher")
    with pytest.raises(Failed, match=r"prepare: 1 problem:\n  -S train.stepz: unknown key"):
        backend.run(params=TINY, overrides=["train.stepz=3"], workspace="/workspace/other")
    assert set(backend.ran) == {"finish"}
    (finished,) = backend.ran["finish"]
    assert "# The run failed" in finished.log
    assert "train.stepz: unknown key in train; did you mean steps?" in finished.log
    (summary,) = finished.outputs.artifacts["summary"]
    assert summary["metadata"]["state"] == "failed"
