"""A real Kueue: queued jobs are admitted, or explained; preempted ones end with the same result."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from cluster import (
    CONTAINER_SECURITY,
    IMAGE,
    POD_SECURITY,
    ROOT,
    Document,
    Namespace,
    applied,
    documents,
    has,
    kubectl,
    wait_until,
)
from launching import EITHER, TRAINJOB, Launching, own_namespace

from ddpm_kube.backends import BACKENDS
from ddpm_kube.spec import job_name

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not has("workloads.kueue.x-k8s.io"), reason="the cluster has no Kueue"),
]

STEPS = 300
SETTINGS = f"""
seed: 3
prepare: {{source: digits, image_size: 8, workers: 1}}
model: {{channels: 8, multipliers: [1, 2], blocks: 1, attention: [4], dropout: 0.1}}
diffusion: {{timesteps: 50}}
train: {{steps: {STEPS}, batch_size: 8, precision: fp32, snapshot_every: 100, log_every: 5,
        milestone_every: {STEPS}, grid: 0, ema: [0.9], optimizer: {{warmup: 2}}}}
tracking: {{uri: ""}}
device: cpu
"""
MARK = secrets.token_hex(3)  # in the names of objects that belong to no namespace
QUOTA = "150m"  # of each queue: one worker with the requests of `launching.SMALL`
# A share of a core keeps the training from ending before it is preempted.
SLOW = ("-K", "cpu_limit=300m")
# The weights of a snapshot, by file; optimizer and averages too.
HASHES = "cd /workspace/{}/snapshots/step-00000{} && sha256sum *.safetensors"


def cluster_wide(kind: str, name: str, version: str = "v1beta2", **fields: object) -> Document:
    api = f"kueue.x-k8s.io/{version}"
    return {"apiVersion": api, "kind": kind, "metadata": {"name": f"{name}-{MARK}"}, **fields}


def cluster_queue(name: str, cpu: str) -> Document:
    """Return a queue with a quota of CPU; the other resources of our pods are not limited."""
    names = ("memory", "ephemeral-storage", "pods")
    quotas: list[Document] = [{"name": "cpu", "nominalQuota": cpu}]
    quotas += [{"name": one, "nominalQuota": "1Ti" if one != "pods" else 100} for one in names]
    flavor = {"name": f"ddpm-{MARK}", "resources": quotas}
    group = {"coveredResources": [one["name"] for one in quotas], "flavors": [flavor]}
    spec = {
        "namespaceSelector": {},
        "preemption": {"withinClusterQueue": "LowerPriority"},
        "resourceGroups": [group],
    }
    return cluster_wide("ClusterQueue", name, spec=spec)


def local_queue(name: str, of: str) -> Document:
    """Return the queue of overlays/kueue, for another ClusterQueue."""
    (queue,) = documents(ROOT / "overlays" / "kueue" / "queue.yaml")
    queue["metadata"]["name"], queue["spec"]["clusterQueue"] = name, f"{of}-{MARK}"
    return queue


@pytest.fixture(scope="module")
def launching() -> Iterator[Launching]:
    """Create queues: one for each backend and one for the chain."""
    wide = [
        cluster_wide("ResourceFlavor", "ddpm"),
        *(cluster_queue(name, QUOTA) for name in BACKENDS),
        cluster_queue("chain", "1"),
        *(cluster_wide("WorkloadPriorityClass", n, value=v) for n, v in (("low", 1), ("high", 2))),
    ]
    try:
        applied(yaml.safe_dump_all(wide))
        with own_namespace("kueue", "20-params.yaml") as namespace:
            namespace.apply([local_queue(name, name) for name in BACKENDS])
            namespace.apply(local_queue("ddpm", "chain"))
            yield Launching(namespace, SETTINGS).prepare()
    finally:
        text = yaml.safe_dump_all(wide)
        kubectl("delete", "--ignore-not-found", "--wait=false", "-f", "-", given=text)


@pytest.fixture
def namespace(launching: Launching) -> Namespace:
    """Name the fixture whose logs a failed test prints."""
    return launching.namespace


@pytest.fixture(scope="module")
def undisturbed(launching: Launching) -> str:
    """Return the hashes of a training in a pod that nothing interrupts."""
    workspace = launching.workspace("undisturbed")
    train = ("ddpm", "train", "-p", "/etc/ddpm/params.yaml", "-w", workspace)
    launching.shell(*train, seconds=800)
    return hashes(launching, "undisturbed", STEPS)


def hashes(launching: Launching, name: str, step: int) -> str:
    return launching.shell("sh", "-c", HASHES.format(name, f"{step:03}"))


def urgent(name: str, queue: str) -> Document:
    """Return a Job of the higher priority that takes the whole quota for some seconds."""
    container = {
        "name": "main",
        "image": IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sleep", "5"],
        "resources": {
            "requests": {"cpu": QUOTA, "memory": "64Mi"},
            "limits": {"cpu": "1", "memory": "64Mi"},
        },
        "securityContext": CONTAINER_SECURITY,
    }
    pod = {"restartPolicy": "Never", "securityContext": POD_SECURITY, "containers": [container]}
    labels = {
        "kueue.x-k8s.io/queue-name": queue,
        "kueue.x-k8s.io/priority-class": f"high-{MARK}",
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels},
        "spec": {"suspend": True, "template": {"spec": pod}},
    }


def play_preempted(launching: Launching, backend: str) -> list[str]:
    """Preempt a queued training; return the snapshots that it had while it was suspended."""
    namespace, launcher = launching.namespace, f"launcher-{backend}"
    workspace = launching.workspace(backend)
    labels = f"labels={{kueue.x-k8s.io/priority-class: low-{MARK}}}"
    options = [f"queue={backend}", labels]
    arguments = launching.arguments(workspace, *SLOW, options=options, backend=backend)
    launching.launch(launcher, arguments)
    rows = ("sh", "-c", f"cat {workspace}/log.jsonl 2>/dev/null | wc -l")
    wait_until(lambda: int(launching.shell(*rows)) >= 3, f"{backend} trains", 300)
    namespace.apply(urgent(f"urgent-{backend}", backend))
    launching.prints(launcher, "Workload: Preempted: Preempted to accommodate a workload")
    job = job_name(workspace, "train")
    wait_until(lambda: not launching.pods(job), "no worker is left", 120)
    saved = launching.shell("ls", f"{workspace}/snapshots").split()
    done = "jsonpath={.status.succeeded}"
    asked = ("get", "job", f"urgent-{backend}", "-o", done)
    wait_until(lambda: namespace.kubectl(*asked) == "1", "the urgent job succeeds", 180)
    assert launching.ends(launcher, 600) == "Succeeded", launching.output(launcher)
    wait_until(lambda: not launching.left(job), "the job and its pods are gone", 60)
    return saved


@pytest.fixture(scope="module")
def stories(launching: Launching) -> Iterator[dict[str, Future[list[str]]]]:
    there = [name for name, one in BACKENDS.items() if has(f"{one.plural}.{one.group}")]
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(play_preempted, launching, name) for name in there}


@EITHER
def test_a_preempted_training_is_saved_and_ends_the_same(
    stories: dict[str, Future[list[str]]],
    launching: Launching,
    namespace: Namespace,
    undisturbed: str,
    backend: str,
) -> None:
    saved = stories[backend].result()
    # At SIGTERM, and not at a multiple of snapshot_every.
    assert int(saved[-1].removeprefix("step-")) % 100 != 0, saved
    output = launching.output(f"launcher-{backend}")
    assert f"at step {STEPS}. Processes: 1." in output
    assert hashes(launching, backend, STEPS) == undisturbed


@EITHER
def test_a_quota_that_is_too_small_is_explained(
    stories: dict[str, Future[list[str]]],
    launching: Launching,
    namespace: Namespace,
    backend: str,
) -> None:
    stories[backend].result()
    launcher, workspace = f"large-{backend}", f"/workspace/large-{backend}"
    options = [f"queue={backend}", "cpu=1"]
    launching.launch(launcher, launching.arguments(workspace, options=options, backend=backend))
    printed = launching.prints(launcher, "insufficient quota for cpu")
    assert f"suspended (Kueue's queue {backend} has not admitted it)" in printed
    assert "Workload: Pending: couldn't assign flavors to pod set" in printed
    namespace.kubectl("delete", "pod", launcher)
    name = job_name(workspace, "train")
    wait_until(lambda: not launching.left(name), "the job goes with its launcher", 60)


@TRAINJOB
def test_the_chain_of_the_overlays_is_admitted_and_trains(
    launching: Launching, namespace: Namespace, tmp_path: Path
) -> None:
    """`prepare` and `train` of overlays/trainjob/jobs, with the component `kueue`."""
    up = Path("../" * len(tmp_path.resolve().parts[1:]))
    folders = {"resources": "trainjob/jobs", "components": "components/kueue"}
    own = {key: [str(up / f"{ROOT}/overlays/{name}"[1:])] for key, name in folders.items()}
    (tmp_path / "Kustomization").write_text(yaml.safe_dump(own))
    (runtime,) = yaml.safe_load_all(kubectl("kustomize", f"{ROOT}/overlays/trainjob/chain"))
    (settings,) = documents(ROOT / "manifests" / "20-params.yaml")
    steps = SETTINGS.replace(f"steps: {STEPS}", "steps: 20").replace("every: 300", "every: 20")
    settings["data"] = {"workspace": "/workspace/chain", "params.yaml": steps}
    rendered = list(yaml.safe_load_all(kubectl("kustomize", str(tmp_path))))
    jobs = [d for d in rendered if d["metadata"]["name"] in ("ddpm-prepare", "ddpm-train")]
    assert [d["kind"] for d in jobs] == ["Job", "TrainJob"]
    namespace.apply([settings, runtime, *jobs])

    def held(kind: str, name: str) -> set[str]:
        conditions = namespace.get(kind, name).get("status", {}).get("conditions", [])
        found = {one["type"] for one in conditions if one["status"] == "True"}
        assert "Failed" not in found, conditions
        return found

    wait_until(lambda: "Complete" in held("job", "ddpm-prepare"), "prepare succeeds", 300)
    wait_until(lambda: "Complete" in held("trainjob", "ddpm-train"), "train succeeds", 400)
    queues = {one["spec"]["queueName"] for one in namespace.list("workloads") if admitted(one)}
    assert "ddpm" in queues
    assert "step-00000020" in launching.shell("ls", "/workspace/chain/snapshots")


def admitted(workload: Document) -> bool:
    conditions = workload.get("status", {}).get("conditions", [])
    return any(one["type"] == "Finished" and one["status"] == "True" for one in conditions)
