"""The launcher as a pod: it adopts, replaces and cancels jobs, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import bare
import pytest
import yaml
from cluster import BELOW, IMAGE, Document, KubectlFailed, Namespace, applied, kubectl, wait_until
from launching import EITHER, TINY, Launching, made_here, own_namespace, pod_of

from ddpm_kube.spec import job_name

pytestmark = pytest.mark.timeout(900)

ENDLESS = ("-S", "train.steps=10000000")
REPORTED_WITHIN = 60.0  # seconds


@pytest.fixture(scope="module")
def launching() -> Iterator[Launching]:
    """Create a namespace with only what a launcher needs."""
    with own_namespace("launcher") as namespace:
        yield Launching(namespace, TINY).prepare()


@pytest.fixture
def namespace(launching: Launching) -> Namespace:
    """Name the fixture whose logs a failed test prints."""
    return launching.namespace


@EITHER
def test_the_schema_of_the_cluster_knows_every_field(
    launching: Launching, namespace: Namespace, backend: str
) -> None:
    # Those in a TrainingRuntime are in no TrainJob.
    secrets = ("secrets=[a]", "optional_secrets=[b]") if backend == "pytorchjob" else ()
    job = made_here(
        launching,
        "/workspace/schema",
        *(f"backend={backend}", "queue=q", "node_selector={a: b}", *secrets),
        *("tolerations=[{key: a, operator: Exists}]", "image_pull_secrets=[c]", "env={A: b}"),
    )
    check = ("--dry-run=server", "--validate=strict")
    applied(yaml.safe_dump(job), *check)
    pod_of(job)["containers"][0]["imagePolicy"] = "Never"
    with pytest.raises(KubectlFailed, match="imagePolicy"):
        kubectl("apply", *check, "-f", "-", given=yaml.safe_dump(job))


def test_a_suspended_job_is_awaited_and_a_finished_one_removed(
    launching: Launching, namespace: Namespace
) -> None:
    arguments = launching.arguments(launching.workspace("whole"))
    name = job_name("/workspace/whole", "train")
    # With a part of a core the worker is still starting when the job is suspended.
    launching.launch("launcher-whole", [*arguments, "-K", "cpu_limit=300m", "--keep"])
    launching.prints("launcher-whole", "Created the PyTorchJob")
    launching.patch(name, runPolicy={"suspend": True})
    launching.prints("launcher-whole", "The job is suspended; waiting until it is resumed.")
    wait_until(lambda: not launching.pods(name), "no worker is left", 120)
    launching.patch(name, runPolicy={"suspend": False})
    assert launching.ends("launcher-whole") == "Succeeded"
    output = launching.output("launcher-whole")
    assert "[worker-0] train: 40/40 steps" in output
    assert "at step 40. Processes: 1. Snapshots: " in output
    assert name in launching.jobs()
    # Before the next launcher starts, which replaces the job.
    listed = launching.launch("lists", ["jobs", "list"])
    assert f"{name}  " in namespace.finished(listed)

    launching.launch("launcher-again", arguments)
    assert launching.ends("launcher-again") == "Succeeded"
    output = launching.output("launcher-again")
    assert output == "train: up to date; no PyTorchJob is created.\n"
    assert not launching.left(name)


@pytest.mark.skipif(
    not bare.available(),
    reason="etcd and kube-apiserver (of envtest, say) are needed for a server without the operator",
)
def test_a_missing_operator_is_reported_with_its_installation(
    tmp_path: Path,
) -> None:
    arguments = ["jobs", "train", "-w", "s3://bucket/run", "--image", IMAGE]
    with bare.api_server(tmp_path) as kubeconfig:
        done = subprocess.run(
            [sys.executable, "-m", "ddpm_core.cli", *arguments, "-S", "tracking.uri=''"],
            env={**os.environ, "KUBECONFIG": str(kubeconfig)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=REPORTED_WITHIN,
        )
    assert done.returncode == 1
    assert "This cluster has neither PyTorchJob nor TrainJob" in done.stderr
    assert "kubectl apply --server-side -k " in done.stderr
    assert "Traceback" not in done.stderr


def going(job: Document) -> bool:
    return "deletionTimestamp" in job["metadata"]


KILL = """
import os, pathlib, signal
for folder in pathlib.Path("/proc").glob("[0-9]*"):
    words = (folder / "cmdline").read_bytes().split(b"\\0")
    if folder.name != "1" and b"jobs" in words and int(folder.name) != os.getpid():
        os.kill(int(folder.name), signal.SIGKILL)
"""


def kill_launcher(namespace: Namespace, pod: str) -> None:
    """Kill the launcher. The pod ends with it, and perhaps this command, so ignore its status."""
    with suppress(KubectlFailed):
        namespace.exec(pod, "python", "-c", KILL)


@EITHER
def test_an_adopted_job_is_deleted_with_its_new_launcher(
    launching: Launching, namespace: Namespace, backend: str
) -> None:
    workspace = launching.workspace(f"adopted-{backend}")
    arguments = launching.arguments(workspace, *ENDLESS, backend=backend)
    name, first, second = job_name(workspace, "train"), f"first-{backend}", f"second-{backend}"
    launching.launch(first, arguments, command=["python", "-c", BELOW])
    launching.prints(first, "[worker-0] train: ")
    uid = launching.jobs(backend)[name]["metadata"]["uid"]
    kill_launcher(namespace, first)
    assert launching.ends(first) == "Failed"
    assert not going(launching.jobs(backend)[name])

    launching.launch(second, arguments)
    launching.prints(second, "is already running; following it")
    launching.prints(second, "[worker-0] train: ")
    # KFP removes the first launcher's pod after a while: the second one must own the job by then.
    namespace.kubectl("delete", "pod", first)
    (owner,) = launching.jobs(backend)[name]["metadata"]["ownerReferences"]
    assert owner["name"] == second
    assert launching.jobs(backend)[name]["metadata"]["uid"] == uid

    namespace.kubectl("delete", "pod", second, "--wait=false")
    wait_until(
        lambda: name not in (jobs := launching.jobs(backend)) or going(jobs[name]),
        "the job is deleted",
        10,
        pause=0.2,
    )
    wait_until(lambda: not launching.left(name), "nothing is left", 120)
    saved = launching.shell("ls", f"{workspace}/snapshots").split()
    assert saved, "snapshots stay after the job is deleted"


def test_a_killed_launchers_job_is_deleted_by_owner_or_gc(
    launching: Launching, namespace: Namespace
) -> None:
    idle = ["node_selector={none: such}"]
    killed = launching.arguments("/workspace/killed", "--patience", "1h", options=idle)
    failed = launching.arguments("/workspace/lost", "--patience", "1h", options=idle)
    launching.launch("launcher-killed", killed)
    launching.launch("launcher-lost", failed, command=["python", "-c", BELOW])
    launching.prints("launcher-killed", "worker-0 is Unschedulable")
    launching.prints("launcher-lost", "worker-0 is Unschedulable")
    namespace.kubectl("delete", "pod", "launcher-killed", "--grace-period=0", "--force")
    kill_launcher(namespace, "launcher-lost")
    assert launching.ends("launcher-lost") == "Failed"
    gone, lost = (job_name(f"/workspace/{name}", "train") for name in ("killed", "lost"))
    wait_until(lambda: not launching.left(gone), "the job goes with its launcher's pod", 120)

    young = launching.launch("gc-young", ["jobs", "gc", "--older-than", "1h"])
    assert "0 jobs deleted." in namespace.finished(young)
    assert lost in launching.jobs()
    old = launching.launch("gc-old", ["jobs", "gc", "--older-than", "0s"])
    assert f"deleted {lost}" in namespace.finished(old)
    wait_until(lambda: not launching.left(lost), "the job is collected", 120)
