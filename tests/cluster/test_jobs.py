"""The jobs of manifests/jobs wait for each other and register a model, even if pods are killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from cluster import BELOW, ROOT, Document, Namespace, documents, wait_until, with_images

TINY = """
seed: 3
prepare: {source: digits, image_size: 8, workers: 1}
model: {channels: 8, multipliers: [1, 2], blocks: 1, attention: [4]}
diffusion: {timesteps: 100}
train: {steps: 12, batch_size: 8, precision: fp32, snapshot_every: 6, milestone_every: 6,
        log_every: 2, grid: 4, ema: [0.9], optimizer: {warmup: 2}}
sample: {count: 160, batch_size: 4, steps: 40, shards: 4, precision: fp32, checkpoints: latest}
evaluate: {metrics: [fid]}
tracking: {uri: "http://ddpm-mlflow:5000", experiment: ddpm}
"""
JOBS = ("ddpm-prepare", "ddpm-sample", "ddpm-evaluate")
# Prints the user of a process, and where it may write.
WHO = """
import json, os, pathlib
def writes(folder):
    try:
        file = pathlib.Path(folder, ".probe")
        file.write_text("x")
        file.unlink()
    except OSError:
        return False
    return True
folders = ("/", "/opt", "/usr/local", "/etc/ddpm", "/tmp", "/dev/shm", "/workspace")
writable = {folder: writes(folder) for folder in folders if os.path.isdir(folder)}
print(json.dumps({"uid": os.getuid(), "gid": os.getgid(), "writes": writable,
                  "token": os.path.exists("/var/run/secrets/kubernetes.io")}))
"""
# `ddpm sample` by one process alone from the same snapshots; then seed, number and bytes of the
# images of both, in order.
COMPARE = """
import hashlib, json, pathlib, shutil, subprocess
import numpy as np
for name in ("data", "snapshots"):
    shutil.copytree(f"/workspace/run/{name}", f"/workspace/alone/{name}", dirs_exist_ok=True)
settings = ("-S", "sample.shards=1", "-p", "/etc/ddpm/params.yaml", "-w", "/workspace/alone")
subprocess.run(("ddpm", "sample", *settings), check=True)
for root in ("/workspace/run", "/workspace/alone"):
    [folder] = pathlib.Path(root, "samples").glob("step-*")
    manifest = json.loads((folder / "manifest.json").read_text())
    images = np.concatenate([np.load(folder / name) for name in manifest["shards"]])
    summary = [manifest["seed"], len(images), hashlib.sha256(images.tobytes()).hexdigest()]
    print(json.dumps([len(manifest["shards"]), *summary]))
"""
# Stops the sampling of shard N after some of its ten batches; prints how many.
STOP = """
import os, pathlib, signal, sys, time
def drawn():
    pattern = f"run/samples/*/parts-*/chunk-0000{sys.argv[1]}*"
    return len(list(pathlib.Path("/workspace").glob(pattern)))
while not drawn():
    time.sleep(0.01)
for folder in pathlib.Path("/proc").glob("[0-9]*"):
    if folder.name != "1" and b"sample" in (folder / "cmdline").read_bytes().split(b"\\0"):
        os.kill(int(folder.name), signal.SIGSTOP)
print(drawn())
"""
ALIAS = """
import json, urllib.request
url = "http://127.0.0.1:5000/api/2.0/mlflow/registered-models/alias?name=ddpm&alias=champion"
print(json.load(urllib.request.urlopen(url, timeout=30))["model_version"]["version"])
"""


def rendered(*names: str) -> list[Document]:
    """Return the documents of manifests/jobs, all or these, for a namespace of tests."""
    found = [d for d in documents(ROOT / "manifests" / "jobs") if not names or of(d) in names]
    for document in found:
        document["metadata"].pop("namespace")
    return found


def spec_of(jobs: list[Document], name: str) -> Document:
    """Return the spec of one of them, which the caller may change."""
    spec: Document = next(job["spec"] for job in jobs if of(job) == name)
    return spec


def of(document: Document) -> str:
    return str(document["metadata"]["name"])


def configure(namespace: Namespace, **sample: Any) -> None:
    settings = yaml.safe_load(TINY)
    settings["sample"] |= sample
    [configmap] = documents(ROOT / "manifests" / "20-params.yaml")
    configmap["data"]["params.yaml"] = yaml.safe_dump(settings)
    namespace.apply(configmap)


def pods(namespace: Namespace, job: str) -> list[Document]:
    return namespace.list("pods", f"app.kubernetes.io/name={job}")


def own_pods(namespace: Namespace, job: str) -> list[Document]:
    """Return the pods of the present Job: those of a replaced one may still be ending."""
    uid = namespace.get("job", job)["metadata"]["uid"]
    return namespace.list("pods", f"batch.kubernetes.io/controller-uid={uid}")


def waiting(namespace: Namespace) -> list[tuple[str, str]]:
    """Return (pod, log) of the pods whose init container waits."""
    names = [of(p) for job in ("ddpm-train", *JOBS) for p in pods(namespace, job)]
    return [(name, namespace.kubectl("logs", name, "-c", "wait")) for name in names]


def done(namespace: Namespace, name: str) -> bool:
    """Return whether a Job, or the PyTorchJob, has succeeded. Fails if the job has failed."""
    kind = "job" if name in JOBS else "pytorchjob"
    conditions = namespace.get(kind, name).get("status", {}).get("conditions", [])
    held = {c["type"] for c in conditions if c["status"] == "True"}
    assert "Failed" not in held, conditions
    return bool(held & {"Complete", "Succeeded"})


def finish(namespace: Namespace, *names: str) -> None:
    for name in names:
        wait_until(lambda name=name: done(namespace, name), f"{name} succeeds", 900)


def compared(namespace: Namespace, name: str) -> list[list[object]]:
    """Return [shards, seed, images, SHA-256] of the pods' samples, and of those of one process."""
    printed = namespace.run(
        name,
        command=["python", "-c", COMPARE],
        env={"OMP_NUM_THREADS": "1"},
        claims={"ddpm-workspace": "/workspace"},
        config_maps={"ddpm-params": "/etc/ddpm"},
        seconds=900,
    )
    return [json.loads(line) for line in printed.splitlines()[-2:]]


@pytest.fixture(scope="module")
def chain(namespace: Namespace) -> Iterator[Namespace]:
    """Apply all jobs but the first, so that they wait."""
    configure(namespace)
    jobs = rendered("ddpm-train", "ddpm-sample", "ddpm-evaluate")
    [drawer] = spec_of(jobs, "ddpm-sample")["template"]["spec"]["containers"]
    drawer["command"] = ["python", "-c", BELOW]
    namespace.apply(jobs)
    wait_until(
        lambda: (
            len(printed := waiting(namespace)) == 7 and all("wait: " in log for _, log in printed)
        ),
        "seven pods wait",
        600,
    )
    yield namespace


def test_jobs_wait_as_user_1000_on_a_read_only_root(
    chain: Namespace,
) -> None:
    for name, log in waiting(chain):
        assert ": prepare: there are no data yet." in log, name
        found = json.loads(chain.kubectl("exec", name, "-c", "wait", "--", "python", "-c", WHO))
        writable = {folder for folder, may in found["writes"].items() if may}
        assert writable == {"/tmp", "/dev/shm", "/workspace"}, name
        assert {"/", "/etc/ddpm"} <= set(found["writes"]), name
        assert (found["uid"], found["gid"], found["token"]) == (1000, 1000, False), name


def test_a_waiting_pod_ends_at_once_on_sigterm(chain: Namespace) -> None:
    """It does not use its grace period, and another pod replaces it."""
    [evaluate] = pods(chain, "ddpm-evaluate")
    chain.kubectl("delete", "pod", of(evaluate), "--grace-period=600", seconds=60)


def test_only_the_shard_of_a_killed_pod_is_sampled_again(chain: Namespace) -> None:
    chain.apply(rendered("ddpm-prepare"))
    victim = wait_until(lambda: sampling(chain), "a sampling pod is at work", 900, pause=0.2)
    stop = ("python", "-c", STOP, index_of(victim))
    printed = chain.kubectl("exec", of(victim), "-c", "sample", "--", *stop, seconds=300)
    assert 1 <= int(printed) <= 9
    before = {index_of(p): p["metadata"]["uid"] for p in pods(chain, "ddpm-sample")}
    chain.kubectl("delete", "pod", of(victim), "--grace-period=1", "--wait=false")
    finish(chain, "ddpm-prepare", "ddpm-sample", "ddpm-train")
    after: dict[str, list[str]] = {}
    for pod in pods(chain, "ddpm-sample"):
        after.setdefault(index_of(pod), []).append(pod["metadata"]["uid"])
    killed = index_of(victim)
    assert after.keys() == before.keys()
    assert after[killed] and before[killed] not in after[killed]
    assert all(after[i] == [before[i]] for i in before if i != killed)


def index_of(pod: Document) -> str:
    return str(pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"])


def sampling(namespace: Namespace) -> Document | None:
    """Return a pod that samples; None if all are waiting."""
    found = pods(namespace, "ddpm-sample")
    return next((pod for pod in found if pod["status"]["phase"] == "Running"), None)


def test_four_pods_sample_the_same_bytes_as_one_process(chain: Namespace) -> None:
    finish(chain, "ddpm-sample")
    four, one = compared(chain, "alone")
    assert four[:3] == [4, 1, 160] and one[0] == 1
    assert four[1:] == one[1:]


def test_new_settings_rebuild_only_what_depends_on_them(
    chain: Namespace,
) -> None:
    """As described in docs/kubernetes.md; the samples of the previous run no longer count."""
    finish(chain, "ddpm-sample")
    configure(chain, seed=8)
    jobs = rendered()
    # Until the evaluation has printed what it waits for, however late it starts.
    spec_of(jobs, "ddpm-sample")["suspend"] = True
    given = with_images(jobs)
    replace = ("replace", "--force", "-f", "-")
    wait_until(lambda: chain.kubectl(*replace, given=given, seconds=240), "all are replaced", 240)
    wait_until(lambda: ": sample: " in evaluation(chain), "the evaluation waits for samples", 300)
    chain.kubectl("patch", "job", "ddpm-sample", "-p", '{"spec": {"suspend": false}}')
    finish(chain, "ddpm-prepare", "ddpm-sample", "ddpm-train")
    [prepare] = own_pods(chain, "ddpm-prepare")
    assert "up to date" in chain.kubectl("logs", of(prepare))
    four, one = compared(chain, "alone-again")
    assert four[:3] == [4, 8, 160] and one[0] == 1
    assert four[1:] == one[1:]


def evaluation(namespace: Namespace) -> str:
    """Return the output of the evaluation while it waits."""
    found = own_pods(namespace, "ddpm-evaluate")
    return "".join(namespace.kubectl("logs", of(pod), "-c", "wait") for pod in found)


def test_a_model_is_registered_and_served(chain: Namespace) -> None:
    finish(chain, "ddpm-evaluate")
    server = wait_until(lambda: pods(chain, "ddpm-mlflow"), "MLflow's pod", 60)[0]
    # The run with the first settings may have been registered before its jobs were replaced.
    assert chain.exec(of(server), "python", "-c", ALIAS).strip() in {"1", "2"}
    chain.ready("ddpm-champion", 300)
