"""Launchers as pods: starting them, reading their output and its times, and what they leave."""

from __future__ import annotations

import json
import secrets
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from cluster import IMAGE, ROOT, Document, Namespace, documents, has, wait_until

from ddpm_core.config import load as params
from ddpm_kube import cli, options
from ddpm_kube.backends import BACKENDS, worker
from ddpm_kube.job import build
from ddpm_kube.spec import JobSpec

API = {"ddpm.io/uses-api": "true"}
PARAMS = "test-params"
# What a worker of a tiny network needs. The requests are small, so that the workers of three test
# files fit on two cores at once: a worker without a node ends its launcher. One core is one thread:
# two threads wait for each other when other pods use the second core.
SMALL = ("cpu=100m", "cpu_limit=1", "memory=1Gi", "shm=64Mi", "join_seconds=5")
TINY = """
seed: 3
prepare: {source: digits, image_size: 8, workers: 1}
model: {channels: 8, multipliers: [1, 2], blocks: 1, attention: [4]}
diffusion: {timesteps: 50}
train: {steps: 40, batch_size: 8, precision: fp32, snapshot_every: 10, milestone_every: 20,
        log_every: 5, grid: 0, ema: [0.9], optimizer: {warmup: 2}}
tracking: {uri: ""}
device: cpu
"""


TRAINJOB = pytest.mark.skipif(
    not has("trainjobs.trainer.kubeflow.org"), reason="the cluster has no Kubeflow Trainer v2"
)
# For tests of both kinds of jobs
EITHER = pytest.mark.parametrize(
    "backend", ["pytorchjob", pytest.param("trainjob", marks=TRAINJOB)]
)


@contextmanager
def own_namespace(about: str, *more: str) -> Iterator[Namespace]:
    """Create a namespace with what launchers need of manifests/, and with these files of it."""
    namespace = Namespace(f"ddpm-test-{about}-{secrets.token_hex(3)}")
    try:
        namespace.create(platform=False)
        files = ("10-access.yaml", "10-network.yaml", "20-storage.yaml", *more)
        namespace.apply(documents(*(ROOT / "manifests" / name for name in files)))
        if has("trainjobs.trainer.kubeflow.org"):
            namespace.apply(documents(ROOT / "overlays" / "trainjob" / "runtime"))
        yield namespace
    finally:
        namespace.delete()


class Launching:
    """A namespace with params; after `prepare`, also with data and a pod to look at them."""

    def __init__(self, namespace: Namespace, params: str) -> None:
        self.namespace, self.params = namespace, params
        metadata = {"name": PARAMS}
        namespace.apply(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": metadata,
                "data": {"params.yaml": params},
            }
        )

    def prepare(self) -> Launching:
        """Start the pod, and prepare data in /workspace/data-only."""
        namespace = self.namespace
        namespace.pod(
            "shell",
            command=["python", "-c", "import signal; signal.pause()"],
            env={"OMP_NUM_THREADS": "1"},
            claims={"ddpm-workspace": "/workspace"},
            config_maps={PARAMS: "/etc/ddpm"},
        )
        wait_until(lambda: namespace.phase("shell") == "Running", "the shell runs", 180)
        self.shell("ddpm", "prepare", "-p", "/etc/ddpm/params.yaml", "-w", "/workspace/data-only")
        return self

    def shell(self, *command: str, seconds: float = 300) -> str:
        return self.namespace.kubectl("exec", "shell", "--", *command, seconds=seconds)

    def workspace(self, name: str) -> str:
        """Create a workspace with data, and return its path."""
        self.shell("mkdir", f"/workspace/{name}")
        self.shell("cp", "-r", "/workspace/data-only/data", f"/workspace/{name}/data")
        return f"/workspace/{name}"

    def arguments(
        self,
        workspace: str,
        *more: str,
        options: Iterable[str] = (),
        backend: str = "pytorchjob",
    ) -> list[str]:
        """Return the arguments of `ddpm jobs train` in a pod; `options` are OPTION=VALUE."""
        given = [part for option in (*SMALL, *options) for part in ("-K", option)]
        fixed = ["jobs", "train", "-p", "/etc/ddpm/params.yaml", "-w", workspace]
        fixed += ["--backend", backend, "--volume", "ddpm-workspace:/workspace"]
        return [*fixed, *given, *more]

    def launch(
        self,
        pod: str,
        arguments: list[str],
        account: str = "ddpm-launcher",
        command: list[str] | None = None,
    ) -> str:
        """Start a launcher, and return the name of its pod."""
        return self.namespace.pod(
            pod,
            command=command,
            args=arguments,
            labels=API,
            account=account,
            claims={"ddpm-workspace": "/workspace"},
            config_maps={PARAMS: "/etc/ddpm"},
            memory="500Mi",
        )

    def output(self, pod: str) -> str:
        """Return the output of a launcher so far; empty before its container runs."""
        running = self.namespace.phase(pod) != "Pending"
        return self.namespace.logs(pod) if running else ""

    def prints(self, pod: str, part: str, seconds: float = 180) -> str:
        """Wait until a launcher has printed `part`, and return its output."""

        def holds() -> str:
            output = self.output(pod)
            if part not in output:
                ended = self.namespace.phase(pod) in ("Succeeded", "Failed")
                assert not ended or part in self.output(pod), (
                    f"{pod} ended without {part!r}:\n{output}"
                )
                return ""
            return output

        return str(wait_until(holds, f"{pod} prints {part!r}", seconds))

    def ends(self, pod: str, seconds: float = 400) -> str:
        """Wait until a launcher has ended, and return its phase."""
        wait_until(
            lambda: self.namespace.phase(pod) in ("Succeeded", "Failed"), f"{pod} ends", seconds
        )
        return self.namespace.phase(pod)

    def patch(self, job: str, kind: str = "pytorchjob", **spec: Any) -> None:
        """Change a job; try again if a webhook is too busy to answer."""
        change = ("--type=merge", "-p", json.dumps({"spec": spec}))
        asked = ("patch", kind, job, *change)
        wait_until(lambda: self.namespace.kubectl(*asked), f"{job} is patched", 120)

    def jobs(self, backend: str = "pytorchjob") -> dict[str, Document]:
        found = self.namespace.list(BACKENDS[backend].plural)
        return {job["metadata"]["name"]: job for job in found}

    def pods(self, job: str) -> list[Document]:
        """Return the pods of a job, of whichever kind."""
        labels = [backend.job_label for backend in BACKENDS.values()]
        return [pod for label in labels for pod in self.namespace.list("pods", f"{label}={job}")]

    def worker(self, job: str, number: int) -> Document | None:
        """Return the pod of a worker; None while it has none."""
        found = [p for p in self.pods(job) if worker(p["metadata"]["name"]) == f"worker-{number}"]
        return max(found, key=lambda p: str(p["metadata"]["creationTimestamp"]), default=None)

    def left(self, job: str) -> list[str]:
        """Return everything that exists of a job, as KIND/NAME."""
        kinds = "pytorchjobs,jobs,pods,services,configmaps,secrets"
        if has("trainjobs.trainer.kubeflow.org"):
            kinds += ",trainjobs,jobsets"
        found = self.namespace.kubectl("get", kinds, "-o", "name").split()
        return [name for name in found if f"/{job}" in name]

    def seconds_between(self, pod: str, first: str, then: str) -> float:
        """Return the time from a launcher's first line with one text to that with another."""
        lines = self.namespace.logs(pod, "--timestamps").splitlines()
        return (_moment(lines, then) - _moment(lines, first)).total_seconds()


def made_here(launching: Launching, workspace: str, *more: str) -> Document:
    """Return the job that a launcher with these options would create."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "params.yaml")
        file.write_text(launching.params, encoding="utf-8")
        config = params.load(file, (), workspace)
    given = cli.merge_options(None, {"volumes": ["ddpm-workspace:/workspace"]}, [*SMALL, *more])
    space = launching.namespace.name
    return build(JobSpec(config, options.read(given), workspace, space, IMAGE))


def pod_of(job: Document) -> Document:
    """Return the pod in a PyTorchJob, or the one with which a TrainJob patches its runtime."""
    if job["kind"] == "PyTorchJob":
        return dict(job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"])
    (patch,) = job["spec"]["runtimePatches"]
    (workers,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    return dict(workers["template"]["spec"]["template"]["spec"])


def _moment(lines: list[str], part: str) -> datetime:
    line = next(line for line in lines if part in line)
    return datetime.fromisoformat(line[:19])
