"""The chain of manifests/jobs: to a registered model, by pods that wait, killed or not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from cluster import BELOW, IMAGE, ROOT, Document, Namespace, documents, wait_until

TINY = """
seed: 3
prepare: {source: digits, image_size: 8, workers: 1}
model: {channels: 8, multipliers: [1, 2], blocks: 1, attention: [4]}
diffusion: {timesteps: 100}
train: {steps: 12, batch_size: 8, precision: fp32, snapshot_every: 6, milestone_every: 6,
        log_every: 2, grid: 4, ema: [0.9], optimizer: {warmup: 2}}
sample: {count: 160, batch_size: 4, steps: 40, shards: 4, precision: fp32, checkpoints: latest}
evaluate: {metrics: [fid]}
tracking: {uri: "http://mlflow:5000", experiment: ddpm}
"""
JOBS = ("ddpm-prepare", "ddpm-sample", "ddpm-evaluate")
# Who a process is, and where it may write.
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
told = {folder: writes(folder) for folder in folders if os.path.isdir(folder)}
print(json.dumps({"uid": os.getuid(), "gid": os.getgid(), "writes": told,
                  "token": os.path.exists("/var/run/secrets/kubernetes.io")}))
"""
# `ddpm sample` by one process alone from the same snapshots; then seed, number and bytes of the
# images of both, in order, whoever drew them.
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
    told = [manifest["seed"], len(images), hashlib.sha256(images.tobytes()).hexdigest()]
    print(json.dumps([len(manifest["shards"]), *told]))
"""
# Stops the sampling of shard N once it has drawn some of its ten batches; prints how many.
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
    """The documents of manifests/jobs, of these names or all, for a namespace of tests."""
    found = [d for d in documents(ROOT / "manifests" / "jobs") if not names or of(d) in names]
    for document in found:
        document["metadata"].pop("namespace")
    return found


def spec_of(jobs: list[Document], name: str) -> Document:
    """The spec of one of them, to be changed."""
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
    """Those of the Job as it is now: the pods of one that was replaced may end a while later."""
    uid = namespace.get("job", job)["metadata"]["uid"]
    return namespace.list("pods", f"batch.kubernetes.io/controller-uid={uid}")


def waiting(namespace: Namespace) -> list[tuple[str, str]]:
    """(pod, what it says) of the pods whose init container waits."""
    names = [of(p) for job in ("ddpm-train", *JOBS) for p in pods(namespace, job)]
    return [(name, namespace.kubectl("logs", name, "-c", "wait")) for name in names]


def done(namespace: Namespace, name: str) -> bool:
    """Whether a Job, or the PyTorchJob, has succeeded. Fails at once where it has failed."""
    kind = "job" if name in JOBS else "pytorchjob"
    conditions = namespace.get(kind, name).get("status", {}).get("conditions", [])
    held = {c["type"] for c in conditions if c["status"] == "True"}
    assert "Failed" not in held, conditions
    return bool(held & {"Complete", "Succeeded"})


def finish(namespace: Namespace, *names: str) -> None:
    for name in names:
        wait_until(lambda name=name: done(namespace, name), f"{name} succeeds", 900)


def compared(namespace: Namespace, name: str) -> list[list[object]]:
    """[shards, seed, images, SHA-256] of what the pods drew, and of what one process draws."""
    said = namespace.run(
        name,
        command=["python", "-c", COMPARE],
        env={"OMP_NUM_THREADS": "1"},
        claims={"ddpm-workspace": "/workspace"},
        config_maps={"ddpm-params": "/etc/ddpm"},
        seconds=900,
    )
    return [json.loads(line) for line in said.splitlines()[-2:]]


@pytest.fixture(scope="module")
def chain(namespace: Namespace) -> Iterator[Namespace]:
    """All but the first job applied, so that they wait."""
    configure(namespace)
    jobs = rendered("ddpm-train", "ddpm-sample", "ddpm-evaluate")
    [drawer] = spec_of(jobs, "ddpm-sample")["template"]["spec"]["containers"]
    drawer["command"] = ["python", "-c", BELOW]
    namespace.apply(jobs)
    wait_until(
        lambda: len(said := waiting(namespace)) == 7 and all("wait: " in log for _, log in said),
        "seven pods wait",
        600,
    )
    yield namespace


def test_each_waits_for_its_input_and_says_so_as_user_1000_on_a_root_that_stays(
    chain: Namespace,
) -> None:
    for name, log in waiting(chain):
        assert ": prepare: there are no data yet." in log, name
        found = json.loads(chain.kubectl("exec", name, "-c", "wait", "--", "python", "-c", WHO))
        writable = {folder for folder, may in found["writes"].items() if may}
        assert writable == {"/tmp", "/dev/shm", "/workspace"}, name
        assert {"/", "/etc/ddpm"} <= set(found["writes"]), name
        assert (found["uid"], found["gid"], found["token"]) == (1000, 1000, False), name


def test_a_waiting_pod_ends_when_it_is_told_to(chain: Namespace) -> None:
    """At once, not at the end of its grace period; and another takes its place."""
    [evaluate] = pods(chain, "ddpm-evaluate")
    chain.kubectl("delete", "pod", of(evaluate), "--grace-period=600", seconds=60)


def test_a_killed_sampling_pod_is_drawn_again_alone(chain: Namespace) -> None:
    chain.apply(rendered("ddpm-prepare"))
    victim = wait_until(lambda: sampling(chain), "a sampling pod is at work", 900, pause=0.2)
    stop = ("python", "-c", STOP, index_of(victim))
    said = chain.kubectl("exec", of(victim), "-c", "sample", "--", *stop, seconds=300)
    assert 1 <= int(said) <= 9
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
    """A pod whose wait is over."""
    found = pods(namespace, "ddpm-sample")
    return next((pod for pod in found if pod["status"]["phase"] == "Running"), None)


def test_four_pods_of_which_one_was_killed_draw_the_bytes_of_one(chain: Namespace) -> None:
    finish(chain, "ddpm-sample")
    four, one = compared(chain, "alone")
    assert four[:3] == [4, 1, 160] and one[0] == 1
    assert four[1:] == one[1:]


def test_running_again_with_other_settings_makes_what_depends_on_them_and_waits_for_that(
    chain: Namespace,
) -> None:
    """As docs/kubernetes.md says; the samples of the run before are those of nobody now."""
    finish(chain, "ddpm-sample")
    configure(chain, seed=8)
    jobs = rendered()
    # Until the evaluation has said what it waits for, however late it starts.
    spec_of(jobs, "ddpm-sample")["suspend"] = True
    given = yaml.safe_dump_all(jobs).replace("ddpm:dev", IMAGE)
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
    """What the evaluation says while it waits."""
    found = own_pods(namespace, "ddpm-evaluate")
    return "".join(namespace.kubectl("logs", of(pod), "-c", "wait") for pod in found)


def test_a_model_is_registered_and_served(chain: Namespace) -> None:
    finish(chain, "ddpm-evaluate")
    server = wait_until(lambda: pods(chain, "mlflow"), "MLflow's pod", 60)[0]
    assert chain.exec(of(server), "python", "-c", ALIAS).strip() == "1"
    chain.ready("ddpm-champion", 300)
