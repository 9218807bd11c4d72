"""Elastic training on a cluster: lost and new workers, or a lost MLflow, give the same result."""

from __future__ import annotations

import base64
import io
import json
import sys
import tarfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cluster import Namespace, has, wait_until
from launching import EITHER, Launching, own_namespace

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import runs
from support.program import ddpm, start, write_params

from ddpm_kube.backends import BACKENDS
from ddpm_kube.spec import job_name

pytestmark = pytest.mark.timeout(1500)

STEPS = 320
SETTINGS = f"""
seed: 3
workspace: workspace
prepare: {{source: digits, image_size: 16, workers: 1}}
model: {{channels: 16, multipliers: [1, 2], blocks: 1, attention: [8], dropout: 0.1}}
diffusion: {{timesteps: 100}}
train:
  steps: {STEPS}
  batch_size: 16
  precision: fp32
  worker_timeout: 120
  log_every: 2
  snapshot_every: 10
  milestone_every: {STEPS}
  keep: 2
  grid: 0
  ema: [0.9]
  optimizer: {{warmup: 20}}
tracking: {{uri: "", experiment: elastic}}
device: cpu
"""
# Half a core each keeps the training from ending before everything has happened to it; where that
# takes a start of other pods, STOP does.
SLOW = ("-K", "cpu_limit=500m")
# Who is left waits for the worker that is started in place of another.
TWO = ("--min", "1", "--max", "2", "-K", "join_seconds=45", *SLOW)
# Run in a worker's pod: finds its training process, not torchrun, which is the first process.
TRAINING = """
import os, pathlib, signal, time
found = pathlib.Path("/proc").glob("[0-9]*")
[training] = [
    folder for folder in found
    if folder.name != "1" and b"train" in (folder / "cmdline").read_bytes().split(b"\\0")
]
def send(number):
    os.kill(int(training.name), number)
"""
STOP = "send(signal.SIGSTOP)"
GO_ON = "send(signal.SIGCONT)"
# What torchrun tells it, it hears when it goes on: to leave, when another worker has come.
UNTIL_TOLD = """
def told():
    lines = (training / "status").read_text().splitlines()
    [pending] = [line.split()[1] for line in lines if line.startswith("ShdPnd:")]
    return int(pending, 16) >> (signal.SIGTERM - 1) & 1
while not told():
    time.sleep(0.1)
"""
SAME_MODEL = 1e-3  # of how far it moved
HISTORY = """
import json
from mlflow import MlflowClient
client = MlflowClient("http://127.0.0.1:5000")
(experiment,) = client.search_experiments(filter_string="name = 'elastic'")
(run,) = client.search_runs([experiment.experiment_id])
history = client.get_metric_history(run.info.run_id, "train/loss")
print(json.dumps(sorted([m.step, m.value] for m in history)))
"""


@pytest.fixture(scope="module")
def namespace() -> Iterator[Namespace]:
    with own_namespace("elastic", "30-mlflow.yaml") as made:
        yield made


@pytest.fixture(scope="module")
def launching(namespace: Namespace) -> Launching:
    return Launching(namespace, SETTINGS).prepare()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Future[Path]]:
    """Train on this machine at the same time, and yield the folder of the run."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_params(folder, SETTINGS)

    def train() -> Path:
        ddpm(folder, "prepare")
        training = start(folder, "train")
        printed = training.ended(900)
        assert training.returncode == 0, printed
        return folder

    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(train)


def rows(launching: Launching, name: str) -> list[dict[str, Any]]:
    """Return the complete rows of a log that is being written."""
    text = launching.shell("sh", "-c", f"cat /workspace/{name}/log.jsonl 2>/dev/null || true")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def grows(launching: Launching, name: str, world: int, by: int = 2) -> int:
    """Wait for more rows of a world of this size, and return the step of the last one."""
    known = len(rows(launching, name))

    def holds() -> int:
        new = [row for row in rows(launching, name)[known:] if row["world_size"] == world]
        return int(new[-1]["step"]) if len(new) >= by else 0

    return int(wait_until(holds, f"{name} goes on with {world} workers", 400))


def tensors(launching: Launching, folder: str) -> runs.Tensors:
    """Return the tensors of a snapshot on the claim."""
    packed = launching.shell("sh", "-c", f"tar -C {folder} -c . | base64")
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(packed))) as archive:
        members = {Path(m.name).name: archive.extractfile(m) for m in archive.getmembers()}
        return runs.tensors((name, file.read()) for name, file in members.items() if file)


def delete(launching: Launching, job: str, number: int) -> None:
    """Delete a worker, and wait for its replacement."""

    def uid() -> str:
        pod = launching.worker(job, number)
        return str(pod["metadata"]["uid"]) if pod else ""

    gone, pod = uid(), launching.worker(job, number)
    assert pod
    launching.namespace.kubectl("delete", "pod", pod["metadata"]["name"], "--wait=false")
    wait_until(lambda: uid() not in ("", gone), f"worker {number} of {job} is there again", 180)


def do(launching: Launching, job: str, script: str) -> None:
    """Run a script for the training process of worker 0."""
    pod = launching.worker(job, 0)
    assert pod
    command = ("exec", pod["metadata"]["name"], "--", "python", "-c", TRAINING + script)
    launching.namespace.kubectl(*command, seconds=300)


def scale(launching: Launching, backend: str, job: str, workers: int) -> None:
    """Set the number of workers, as docs/elastic.md says."""
    if backend == "pytorchjob":
        launching.patch(job, pytorchReplicaSpecs={"Worker": {"replicas": workers}})
    else:
        launching.patch(f"{job}-node-0", "job", parallelism=workers, completions=workers)


def play_elastic(launching: Launching, backend: str) -> None:
    """Delete and scale the workers of a training, which must succeed."""
    workspace = launching.workspace(backend)
    job, launcher = job_name(workspace, "train"), f"launcher-{backend}"
    launching.launch(launcher, launching.arguments(workspace, *TWO, backend=backend))
    grows(launching, backend, world=2)
    delete(launching, job, 1)
    grows(launching, backend, world=2)
    delete(launching, job, 0)
    grows(launching, backend, world=2)
    scale(launching, backend, job, 1)
    grows(launching, backend, world=1)
    do(launching, job, STOP)
    scale(launching, backend, job, 2)
    do(launching, job, UNTIL_TOLD + GO_ON)
    grows(launching, backend, world=2)
    assert launching.ends(launcher, 600) == "Succeeded", launching.output(launcher)


def play_tracked(launching: Launching) -> list[list[float]]:
    """Stop MLflow during a training for a while, and return the history of its loss."""
    namespace, workspace = launching.namespace, launching.workspace("tracked")
    namespace.ready("ddpm-mlflow", 400)
    job = job_name(workspace, "train")
    tracked = ("-S", "tracking.uri=http://ddpm-mlflow:5000", "-S", "train.batch_size=32", *SLOW)
    launching.launch("launcher-tracked", launching.arguments(workspace, *tracked))
    grows(launching, "tracked", world=1)
    namespace.kubectl("scale", "deployment", "ddpm-mlflow", "--replicas=0")
    wait_until(
        lambda: not namespace.list("pods", "app.kubernetes.io/name=ddpm-mlflow"),
        "MLflow is gone",
        120,
    )
    grows(launching, "tracked", world=1)
    do(launching, job, STOP)
    namespace.kubectl("scale", "deployment", "ddpm-mlflow", "--replicas=1")
    namespace.ready("ddpm-mlflow", 400)
    do(launching, job, GO_ON)
    grows(launching, "tracked", world=1, by=1)  # so that MLflow returns during the training
    printed = launching.output("launcher-tracked")
    assert launching.ends("launcher-tracked", 600) == "Succeeded", printed
    (server,) = namespace.list("pods", "app.kubernetes.io/name=ddpm-mlflow")
    history = namespace.exec(server["metadata"]["name"], "python", "-c", HISTORY)
    return list(json.loads(history))


@pytest.fixture(scope="module")
def stories(launching: Launching) -> Iterator[dict[str, Future[Any]]]:
    """Run all trainings at the same time."""
    backends = [name for name, one in BACKENDS.items() if has(f"{one.plural}.{one.group}")]
    with ThreadPoolExecutor(3) as pool:
        elastic = {name: pool.submit(play_elastic, launching, name) for name in backends}
        yield {**elastic, "tracked": pool.submit(play_tracked, launching)}


@EITHER
def test_deleting_and_scaling_workers_gives_the_same_model(
    stories: dict[str, Future[Any]],
    launching: Launching,
    namespace: Namespace,
    undisturbed: Future[Path],
    backend: str,
) -> None:
    stories[backend].result()
    logged = rows(launching, backend)
    worlds = [row["world_size"] for row in logged]
    assert set(worlds) == {1, 2}
    changes = [b for a, b in zip([0, *worlds], worlds, strict=False) if a != b]
    printed = launching.output(f"launcher-{backend}")
    assert f"Processes: {', then '.join(str(world) for world in changes)}." in printed
    job = job_name(f"/workspace/{backend}", "train")
    wait_until(lambda: not launching.left(job), "the job and its pods are gone", 60)

    folder = undisturbed.result(900)
    initial = folder.parent / f"start-{backend}"
    (initial / "workspace").mkdir(parents=True)
    (initial / "workspace" / "data").symlink_to(folder / "workspace" / "data")
    write_params(initial, SETTINGS)
    before = runs.of_file(runs.at_start(initial))
    here = runs.of_file(runs.final(folder, STEPS))
    there = runs.of_file(tensors(launching, f"/workspace/{backend}/snapshots/step-{STEPS:08d}"))
    assert runs.distance(there, here, before) <= SAME_MODEL
    assert [row["step"] for row in logged] == [row["step"] for row in runs.rows(folder)]


def test_mlflow_gets_every_row_after_an_outage(
    stories: dict[str, Future[Any]], launching: Launching, namespace: Namespace
) -> None:
    history = stories["tracked"].result()
    logged = [[row["step"], row["loss"]] for row in rows(launching, "tracked")]
    assert history == logged
    assert [step for step, _ in logged] == list(range(2, STEPS + 1, 2))
    assert "restarts" not in launching.output("launcher-tracked")
