"""The complete pipeline with kfp.local, and again: what is skipped, and what is rebuilt."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from components_run import ROOT, Chain
from mlflow import MlflowClient
from support.dvc_registry import Registry
from support.mlflow_server import QUIET

from ddpm_core.storage.workspace import Workspace
from ddpm_kube.record import Run

# A complete run has ten processes that import torch.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TINY = """
seed: 3
device: cpu
prepare: {image_size: 8, workers: 1}
model: {channels: 8, multipliers: [1, 2], blocks: 1, attention: [4]}
diffusion: {timesteps: 50}
train:
  steps: 8
  batch_size: 8
  log_every: 2
  snapshot_every: 4
  milestone_every: 8
  keep: 2
  grid: 4
  optimizer: {warmup: 2}
  ema: [0.9]
sample: {count: 20, batch_size: 8, steps: 4, shards: 2}
evaluate: {metrics: [fid, prdc]}
"""


def pipeline(folder: Path, *arguments: str, status: int = 0) -> str:
    """Return the output of `python pipelines/ddpm.py ARGUMENTS`; check the exit status."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "pipelines/ddpm.py"), *arguments],
        cwd=folder,
        env={**os.environ, **QUIET, "COLUMNS": "200", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout[-5000:]
    return done.stdout


# Running, and running again


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the workspace of a finished run of `local`."""
    folder = tmp_path_factory.mktemp("local")
    (folder / "params.yaml").write_text(TINY)
    output = pipeline(folder, "local", "-p", "params.yaml")
    (folder / "output.txt").write_text(output)
    return folder


def chain(folder: Path, **inputs: Any) -> Chain:
    given = {"workspace": str(folder / "workspace"), "params": TINY}
    given["tracking"] = f"sqlite:///{folder}/mlflow.db"
    return Chain(folder / "artifacts", {**given, **inputs})


def outputs(folder: Path, task: str) -> dict[str, Any]:
    """Return the artifacts of a task of the run by name, and its parameters."""
    (found,) = (folder / "workspace/kfp").glob(f"*/**/{task}/executor_output.json")
    written = json.loads(found.read_text())
    artifacts = {name: a["artifacts"][0] for name, a in written["artifacts"].items()}
    return {**artifacts, **written.get("parameterValues", {})}


def test_local_runs_the_pipeline_to_a_registered_champion(finished: Path) -> None:
    record = json.loads((finished / "workspace/registered.json").read_text())
    assert record["promoted"] is True
    assert outputs(finished, "register")["Output"] == "models:/ddpm/1"
    assert outputs(finished, "evaluate")["Output"] == "pass"
    output = (finished / "output.txt").read_text()
    assert "# The run succeeded" in output
    assert output.count("│ up to date │") == 5


def test_artifacts_are_small_and_refer_to_the_workspace(finished: Path) -> None:
    workspace = str(finished / "workspace")
    manifest = json.loads((finished / "workspace/data/manifest.json").read_text())
    made = {
        (task, name): artifact
        for task in ("prepare", "train", "evaluate", "register")
        for name, artifact in outputs(finished, task).items()
        if isinstance(artifact, dict)
    }
    for (task, name), artifact in made.items():
        assert artifact["metadata"]["workspace"] == workspace, (task, name)
        assert Path(artifact["uri"]).stat().st_size < 2_000_000
    data, model = made["prepare", "data"]["metadata"], made["train", "model"]["metadata"]
    assert data["data_fingerprint"] == model["data_fingerprint"] == manifest["fingerprint"]
    assert model["snapshot"] == f"{workspace}/snapshots/step-00000008"
    champion = made["register", "registered"]["metadata"]
    assert champion["weights"] == model["weights"]
    assert made["train", "metrics"]["metadata"]["loss"] > 0
    scores = made["evaluate", "metrics"]["metadata"]
    assert scores["fd_in_domain_20"] == champion["score"]


def test_pages_contain_images_and_load_nothing(finished: Path) -> None:
    for task, name in (("prepare", "contact"), ("train", "preview"), ("evaluate", "report")):
        page = Path(outputs(finished, task)[name]["uri"]).read_text()
        assert "data:image/png;base64," in page
        assert not re.search(r"(src|href)=[\"']?(https?:|//|\./|/)", page), (task, name)


def test_running_again_skips_what_is_unchanged(
    finished: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = contents(finished)
    again = chain(finished)
    assert again.run() == "models:/ddpm/1"
    assert again.parts == ["8:0/2"]
    assert contents(finished) == before
    printed = capfd.readouterr().err
    assert "Preparing" not in printed
    for sentence in ("data in .* are up to date", "train: up to date", "sample: up to date"):
        assert re.search(sentence, printed)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files that are the same after a run that rebuilds them or has nothing to do."""
    kept = ("data", "snapshots", "samples")
    files = [p for k in kept for p in (folder / "workspace" / k).rglob("*") if p.is_file()]
    return {str(p.relative_to(folder)): p.read_bytes() for p in files if p.suffix == ".npy"} | {
        str(p.relative_to(folder)): p.read_bytes() for p in files if p.name == "model.safetensors"
    }


def test_deleted_files_are_rebuilt_and_equal(finished: Path) -> None:
    before = contents(finished)
    shutil.rmtree(finished / "workspace/snapshots")
    shutil.rmtree(finished / "workspace/samples")
    again = chain(finished)
    assert again.run() == "models:/ddpm/1"
    assert again.parts == ["8:0/2", "8:1/2"]
    after = contents(finished)
    assert {k: v for k, v in after.items() if k in before} == before
    (finished / "workspace/samples/step-00000008/shard-001-of-002.npy").unlink()
    again.score()
    assert again.parts == ["8:1/2"]
    assert contents(finished) == after


def test_the_gate_does_not_register_a_bad_checkpoint(finished: Path) -> None:
    strict = chain(finished)
    strict.worst = 1e-6
    strict.prepare()
    strict.train()
    assert re.search(r"step 8, has fd_in_domain_20 .*; must be at most 1e-06", strict.score())
    assert "register" not in strict.made
    # KFP may not have ended a run with a task that it skipped.
    summary = strict.finish("RUNNING")
    assert summary.startswith("# The run succeeded\n\nNothing was registered. The best checkpoint")


def test_the_summary_follows_the_records_of_the_steps(finished: Path) -> None:
    """KFP says FAILED after a retry too, and RUNNING for a run that was terminated."""
    one = chain(finished)
    run = Run(Workspace.open(str(finished / "workspace")), "here")
    one.run()
    for state in ("COMPLETE", "FAILED", "RUNNING"):
        summary = one.finish(state)
        assert summary.startswith("# The run succeeded\n\nRegistered **models:/ddpm/1**, step 8.")
        assert summary.count("│ up to date │") == 5

    run.begin("sample 8:0/2")
    summary = one.finish("RUNNING")
    assert summary.startswith("# The run stopped\n\n**sample 8:0/2** was stopped while it ran")
    assert "it skips what is up to date" in summary
    run.fail("sample 8:0/2", "No space left on device: /workspace.")
    summary = one.finish("FAILED")
    assert summary.startswith(
        "# The run failed\n\n**sample 8:0/2** failed: No space left on device: /workspace.\n"
    )
    assert "KFP's Retry does not write this page again." in summary

    one.draw()  # the retry
    assert one.finish("FAILED").startswith("# The run succeeded")


def test_an_unknown_setting_ends_a_component_with_a_message(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        chain(tmp_path, overrides=["train.stepz=3"]).prepare()
    assert ended.value.code == 1
    printed = capfd.readouterr().err
    assert printed.startswith("prepare: 1 problem:\n  -S train.stepz: unknown key in train")


# A data set that DVC tracks


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    """Photos at v1, more of them at v2, and another file at v3."""
    root = tmp_path_factory.mktemp("registry")
    made = Registry(root / "repo", str(root / "store"))
    made.photos("v1", each=6)
    made.photos("v2", each=8)
    (made.folder / "notes.txt").write_text("of no photo")
    made.commit("v3")
    return made


def test_a_new_data_revision_reruns_only_what_depends_on_it(
    registry: Registry, finished: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mlflow = f"sqlite:///{finished}/mlflow.db"  # a new one takes seconds to make
    made = {}
    commits = {tag: registry.git("rev-parse", tag) for tag in ("v1", "v2", "v3")}
    for tag in commits:
        source = f"dvc:{registry.folder}#photos@{tag}"
        one = chain(tmp_path, source=source, tracking=mlflow, overrides=["sample.shards=1"])
        one.prepare()
        one.train()
        one.draw()
        assert one.made["prepare"]["data"].metadata["revision"] == commits[tag]
        manifest = json.loads((tmp_path / "workspace/data/manifest.json").read_text())
        assert manifest["source"]["revision"] == commits[tag]
        trained_on = one.made["train"]["model"].metadata["revision"]
        made[tag] = (trained_on, contents(tmp_path), capfd.readouterr().err)
    for tag in ("v1", "v2"):
        assert made[tag][0] == commits[tag]
        assert "Preparing" in made[tag][2] and "up to date" not in made[tag][2]
    # v3 has the photos of v2: they are fetched, and all that was made of them stands.
    assert "Preparing" in made["v3"][2]
    assert "train: up to date" in made["v3"][2] and "sample: up to date" in made["v3"][2]
    assert made["v3"][:2] == made["v2"][:2] != made["v1"][:2]
    run = json.loads((tmp_path / "workspace/run.json").read_text())["mlflow"]
    tags = MlflowClient(mlflow).get_run(run["run_id"]).data.tags
    assert tags["source.revision"] == commits["v2"]
