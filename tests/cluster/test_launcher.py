"""The launcher of a PyTorchJob, as a pod: adopts, cancels, cleans up, and says what is wrong.

Each reason of a failure comes from a real pod, quota, policy or node.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import bare
import pytest
import yaml
from cluster import IMAGE, ROOT, Document, KubectlFailed, Namespace, documents, wait_until
from launching import JOB_LABEL, SMALL, Launching, own_namespace

from ddpm_core import params
from ddpm_kube import cli, options
from ddpm_kube.job import build
from ddpm_kube.names import job_name
from ddpm_kube.spec import JobSpec

pytestmark = pytest.mark.timeout(900)

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
ENDLESS = ("-S", "train.steps=10000000")
TOLD_WITHIN = 60.0  # seconds
# No pod that asks for a GPU may be made here, and no other is hit.
QUOTA = {
    "apiVersion": "v1",
    "kind": "ResourceQuota",
    "metadata": {"name": "no-gpu"},
    "spec": {"hard": {"requests.nvidia.com/gpu": "0"}},
}
# May do what ddpm-launcher may, but read events, as KFP's own pipeline-runner may not.
BLIND = "launcher-blind"
GPU = ("-S", "device=cuda", "-K", "gpu=1")
# What is wrong, how the launcher is started, and what it has to say.
CASES: dict[str, tuple[tuple[str, ...], str]] = {
    "memory": (("-K", "memory=150Mi", "-K", "shm=8Mi"), "worker-0 was OOMKilled"),
    "image": (("--image", "no.such.registry/ddpm:1"), "worker-0 has no image: "),
    "image-name": (("--image", "ddpm:dev:twice"), "worker-0 has no image: InvalidImageName of"),
    "room": (("-K", "memory=9Ti"), "worker-0 is Unschedulable: 0/1 nodes are available"),
    "quota": (GPU, "exceeded quota: no-gpu"),
    "account": (("-K", "service_account=absent"), 'serviceaccount "absent" not found'),
    "secret": (("-K", "secrets=[absent]"), "CreateContainerConfigError"),
    "blind": (GPU, "The operator has made no pods for 45 s."),
}


@pytest.fixture(scope="module")
def launching() -> Iterator[Launching]:
    """A namespace of its own, with what a launcher needs and no more."""
    with own_namespace("launcher") as namespace:
        namespace.apply([QUOTA, *blind()])
        yield Launching(namespace, TINY)


@pytest.fixture
def namespace(launching: Launching) -> Namespace:
    """So that a failed test's story is told."""
    return launching.namespace


def blind() -> list[Document]:
    """A ServiceAccount with the Role of the launcher, less the events."""
    found = {d["kind"]: d for d in documents(ROOT / "manifests" / "10-access.yaml")}
    role, binding = found["Role"], found["RoleBinding"]
    for rule in role["rules"]:
        rule["resources"] = [name for name in rule["resources"] if name != "events"]
    for document in (role, binding):
        document["metadata"]["name"] = BLIND
    binding["roleRef"]["name"] = BLIND
    binding["subjects"] = [{"kind": "ServiceAccount", "name": BLIND}]
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": BLIND}}
    return [account, role, binding]


def made_here(launching: Launching, workspace: str, *more: str) -> Document:
    """The job that a launcher with these arguments would make."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "params.yaml")
        file.write_text(launching.params)
        config = params.load(file, (), workspace)
    given = cli.gathered(None, {"volumes": ["ddpm-workspace:/workspace"]}, [*SMALL, *more])
    space = launching.namespace.name
    return build(JobSpec(config, options.read(given), workspace, space, IMAGE))


def pod_of(job: Document) -> Document:
    return dict(job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"])


@pytest.fixture(scope="module")
def told(launching: Launching) -> dict[str, str]:
    """What the launcher of each case said, some cases at a time."""

    def play(case: str) -> str:
        arguments = launching.arguments(f"/workspace/{case}", *CASES[case][0])
        account = BLIND if case == "blind" else "ddpm-launcher"
        launching.launch(f"launcher-{case}", arguments, account=account)
        with suppress(AssertionError):  # the test of this case tells
            launching.ends(f"launcher-{case}", 180)
        return launching.said(f"launcher-{case}")

    with ThreadPoolExecutor(4) as pool:
        return dict(zip(CASES, pool.map(play, CASES), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_told_by_name_within_a_minute_and_nothing_is_left(
    launching: Launching, namespace: Namespace, told: dict[str, str], case: str
) -> None:
    pod, sentence = f"launcher-{case}", CASES[case][1]
    last = told[case].strip().splitlines()[-1]
    assert sentence in last, told[case]
    assert last.startswith("ddpm jobs: ")
    assert "Traceback" not in told[case]
    assert "--- events:" in told[case]
    assert namespace.phase(pod) == "Failed"
    assert launching.seconds_between(pod, "Made the PyTorchJob", "Giving up: ") <= TOLD_WITHIN
    assert not launching.left(job_name(f"/workspace/{case}", "train"))


def test_a_worker_that_says_the_same_again_and_again_is_not_waited_for(
    launching: Launching, namespace: Namespace
) -> None:
    arguments = launching.arguments("/workspace/no-data", options=["max_restarts=4"])
    launching.launch("launcher-no-data", arguments)
    assert launching.ends("launcher-no-data") == "Failed"
    said = launching.said("launcher-no-data")
    assert "worker-0 ended 3 times with: " in said.splitlines()[-1]
    assert "ddpm prepare" in said.splitlines()[-1]
    assert "[worker-0] ddpm train: " in said


@pytest.mark.parametrize(
    ("case", "change", "sentence"),
    [
        (
            "operator",
            lambda job: job["spec"]["runPolicy"].update(managedBy="kueue.x-k8s.io/multikueue"),
            "Nobody has taken up the job for 45 s: the Training Operator does not run",
        ),
        (
            "policy",
            lambda job: pod_of(job)["containers"][0]["securityContext"].update(
                allowPrivilegeEscalation=True
            ),
            "Pod Security refuses worker-0",
        ),
    ],
)
def test_a_job_that_nobody_may_or_will_run_is_given_up(
    launching: Launching, namespace: Namespace, case: str, change: Any, sentence: str
) -> None:
    """The options allow no such job: it is made here, and adopted by its hash."""
    job = made_here(launching, f"/workspace/{case}")
    change(job)
    namespace.apply(job)
    launching.launch(f"launcher-{case}", launching.arguments(f"/workspace/{case}"))
    assert launching.ends(f"launcher-{case}") == "Failed"
    last = launching.said(f"launcher-{case}").strip().splitlines()[-1]
    assert sentence in last
    took = launching.seconds_between(f"launcher-{case}", "at work already", "Giving up: ")
    assert took <= TOLD_WITHIN
    assert not launching.left(job["metadata"]["name"])


def test_a_launcher_without_the_rights_says_which_it_lacks(
    launching: Launching, namespace: Namespace
) -> None:
    launching.launch("launcher-rights", launching.arguments("/workspace/rights"), account="ddpm")
    assert launching.ends("launcher-rights") == "Failed"
    last = launching.said("launcher-rights").strip().splitlines()[-1]
    assert "Not allowed to" in last
    assert "the Role ddpm-launcher" in last


def test_a_job_at_work_with_other_settings_is_refused_and_left_alone(
    launching: Launching, namespace: Namespace
) -> None:
    job = made_here(launching, "/workspace/other", "node_selector={none: such}")
    namespace.apply(job)
    launching.launch("launcher-other", launching.arguments("/workspace/other"))
    assert launching.ends("launcher-other") == "Failed"
    assert "is at work with other settings" in launching.said("launcher-other")
    name = job["metadata"]["name"]
    assert name in launching.jobs()
    namespace.kubectl("delete", "pytorchjob", name)


def test_the_schema_of_the_cluster_knows_every_field(
    launching: Launching, namespace: Namespace
) -> None:
    job = made_here(
        launching,
        "/workspace/schema",
        *("queue=q", "secrets=[a]", "optional_secrets=[b]", "node_selector={a: b}"),
        *("tolerations=[{key: a, operator: Exists}]", "image_pull_secrets=[c]", "env={A: b}"),
    )
    check = ("create", "--dry-run=server", "--validate=strict", "-f", "-")
    namespace.kubectl(*check, given=yaml.safe_dump(job))
    pod_of(job)["containers"][0]["imagePolicy"] = "Never"
    with pytest.raises(KubectlFailed, match="imagePolicy"):
        namespace.kubectl(*check, given=yaml.safe_dump(job))


def test_suspended_is_waited_for_and_a_finished_job_is_replaced(
    launching: Launching, namespace: Namespace
) -> None:
    arguments = launching.arguments(launching.workspace("whole"), options=["queue=research"])
    name = job_name("/workspace/whole", "train")
    launching.launch("launcher-whole", [*arguments, "--keep"])
    launching.hears("launcher-whole", "Made the PyTorchJob")
    patch = "patch", "pytorchjob", name, "--type=merge", "-p"
    namespace.kubectl(*patch, '{"spec": {"runPolicy": {"suspend": true}}}')
    launching.hears("launcher-whole", "suspended (Kueue's queue research has not admitted it)")
    wait_until(lambda: not pods_of(namespace, name), "no worker is left", 120)
    namespace.kubectl(*patch, '{"spec": {"runPolicy": {"suspend": false}}}')
    assert launching.ends("launcher-whole") == "Succeeded"
    said = launching.said("launcher-whole")
    assert "[worker-0] train: 40/40 steps" in said
    assert "at step 40, by 1 processes; snapshots of " in said
    assert name in launching.jobs()

    launching.launch("launcher-again", arguments)
    listed = launching.launch("lists", ["jobs", "list"])
    assert f"{name}  " in namespace.finished(listed)
    assert launching.ends("launcher-again") == "Succeeded"
    said = launching.said("launcher-again")
    assert "of an earlier attempt is removed first" in said
    assert "train: 5/40 steps" not in said
    assert not launching.left(name)


@pytest.mark.skipif(
    not bare.available(),
    reason="etcd and kube-apiserver (of envtest, say) are needed for a server without the operator",
)
def test_a_cluster_without_the_operator_is_told_at_once_and_how_to_install_it(
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
            timeout=TOLD_WITHIN,
        )
    assert done.returncode == 1
    assert "The cluster knows no PyTorchJob" in done.stderr
    assert "kubectl apply --server-side -k " in done.stderr
    assert "Traceback" not in done.stderr


def pods_of(namespace: Namespace, job: str) -> list[Document]:
    return namespace.list("pods", f"{JOB_LABEL}={job}")


def going(job: Document) -> bool:
    return "deletionTimestamp" in job["metadata"]


# The first process of a container can't be killed from within it: this one waits for another.
BELOW = "import subprocess, sys; sys.exit(subprocess.call(['ddpm', *sys.argv[1:]]))"
KILL = """
import os, pathlib, signal
for folder in pathlib.Path("/proc").glob("[0-9]*"):
    words = (folder / "cmdline").read_bytes().split(b"\\0")
    if folder.name != "1" and b"jobs" in words and int(folder.name) != os.getpid():
        os.kill(int(folder.name), signal.SIGKILL)
"""


def test_a_killed_launchers_job_is_adopted_and_goes_with_the_launcher_that_is_deleted(
    launching: Launching, namespace: Namespace
) -> None:
    arguments = launching.arguments(launching.workspace("adopted"), *ENDLESS)
    name = job_name("/workspace/adopted", "train")
    launching.launch("launcher-1", arguments, command=["python", "-c", BELOW])
    launching.hears("launcher-1", "[worker-0] train: ")
    uid = launching.jobs()[name]["metadata"]["uid"]
    namespace.exec("launcher-1", "python", "-c", KILL)
    assert launching.ends("launcher-1") == "Failed"
    assert not going(launching.jobs()[name])

    launching.launch("launcher-2", arguments)
    launching.hears("launcher-2", "is at work already; following it")
    launching.hears("launcher-2", "[worker-0] train: ")
    # The first one's pod is removed, as KFP does after a while: the job is the second one's now.
    namespace.kubectl("delete", "pod", "launcher-1")
    (owner,) = launching.jobs()[name]["metadata"]["ownerReferences"]
    assert owner["name"] == "launcher-2"
    assert launching.jobs()[name]["metadata"]["uid"] == uid

    namespace.kubectl("delete", "pod", "launcher-2", "--wait=false")
    wait_until(
        lambda: name not in (jobs := launching.jobs()) or going(jobs[name]),
        "the job is deleted",
        10,
        pause=0.2,
    )
    wait_until(lambda: not launching.left(name), "nothing is left", 120)
    saved = launching.shell("ls", "/workspace/adopted/snapshots").split()
    assert saved, "what was trained before the end stays"


def test_a_launcher_that_cannot_say_goodbye_takes_its_job_along_and_gc_takes_the_rest(
    launching: Launching, namespace: Namespace
) -> None:
    idle = ["node_selector={none: such}"]
    killed = launching.arguments("/workspace/killed", "--patience", "1h", options=idle)
    failed = launching.arguments("/workspace/lost", "--patience", "1h", options=idle)
    launching.launch("launcher-killed", killed)
    launching.launch("launcher-lost", failed, command=["python", "-c", BELOW])
    launching.hears("launcher-killed", "worker-0 is Unschedulable")
    launching.hears("launcher-lost", "worker-0 is Unschedulable")
    namespace.kubectl("delete", "pod", "launcher-killed", "--grace-period=0", "--force")
    namespace.exec("launcher-lost", "python", "-c", KILL)
    launching.ends("launcher-lost")
    gone, lost = (job_name(f"/workspace/{name}", "train") for name in ("killed", "lost"))
    wait_until(lambda: not launching.left(gone), "the job goes with its launcher's pod", 120)

    young = launching.launch("gc-young", ["jobs", "gc", "--older-than", "1h"])
    assert "0 jobs deleted." in namespace.finished(young)
    assert lost in launching.jobs()
    old = launching.launch("gc-old", ["jobs", "gc", "--older-than", "0s"])
    assert f"deleted {lost}" in namespace.finished(old)
    wait_until(lambda: not launching.left(lost), "the job is collected", 120)
