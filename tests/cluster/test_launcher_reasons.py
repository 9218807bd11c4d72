"""Why training as a PyTorchJob failed: the launcher, as a pod, says it by name and in time.

Each reason comes from a real pod, quota, policy or account. They are played some at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import pytest
from cluster import ROOT, Document, Namespace, documents, wait_until
from launching import TINY, Launching, made_here, own_namespace, pod_of

from ddpm_kube.names import job_name

pytestmark = pytest.mark.timeout(900)

WITHIN = 60.0  # seconds
# No pod that asks for a GPU may be made here, and no other is hit.
QUOTA: Document = {
    "apiVersion": "v1",
    "kind": "ResourceQuota",
    "metadata": {"name": "no-gpu"},
    "spec": {"hard": {"requests.nvidia.com/gpu": "0"}},
}
GPU = ("-S", "device=cuda", "-K", "gpu=1")
# May do what ddpm-launcher may, but read events, as KFP's own pipeline-runner may not.
BLIND = "launcher-blind"


@dataclass(frozen=True)
class Case:
    """What the launcher has to say, and how it comes to that.

    `change` is done to its job, which is made here and adopted: the options allow no such job.
    """

    sentence: str
    arguments: tuple[str, ...] = ()
    account: str = "ddpm-launcher"
    change: Callable[[Document], object] | None = None
    timed: bool = True


CASES = {
    "memory": Case("worker-0 was OOMKilled", ("-K", "memory=150Mi", "-K", "shm=8Mi")),
    "image": Case("worker-0 has no image: ", ("--image", "no.such.registry/ddpm:1")),
    "image-name": Case("has no image: InvalidImageName of", ("--image", "ddpm:dev:twice")),
    "room": Case("worker-0 is Unschedulable: 0/", ("-K", "memory=9Ti")),
    "quota": Case("exceeded quota: no-gpu", GPU),
    "account": Case('serviceaccount "absent" not found', ("-K", "service_account=absent")),
    "secret": Case("CreateContainerConfigError", ("-K", "secrets=[absent]")),
    "blind": Case("The operator has made no pods for 45 s.", GPU, BLIND),
    # An operator that looks after other jobs does nothing, as one that does not run.
    "operator": Case(
        "Nobody has taken up the job for 45 s: the Training Operator does not run",
        change=lambda job: job["spec"]["runPolicy"].update(managedBy="kueue.x-k8s.io/multikueue"),
    ),
    "policy": Case(
        "Pod Security refuses worker-0",
        change=lambda job: pod_of(job)["containers"][0]["securityContext"].update(
            allowPrivilegeEscalation=True
        ),
    ),
    # The third start of the program takes as long as the machine likes.
    "no-data": Case("worker-0 ended 3 times with: There are no prepared data", timed=False),
}


@pytest.fixture(scope="module")
def launching() -> Iterator[Launching]:
    with own_namespace("reasons") as namespace:
        namespace.apply([QUOTA, *blind()])
        # A quota refuses nothing until a controller has counted what is there.
        wait_until(lambda: counted(namespace), "the quota is counted", 120)
        yield Launching(namespace, TINY)


@pytest.fixture
def namespace(launching: Launching) -> Namespace:
    """So that a failed test's story is told."""
    return launching.namespace


def counted(namespace: Namespace) -> bool:
    quota = namespace.get("resourcequota", QUOTA["metadata"]["name"])
    return bool(quota.get("status", {}).get("hard"))


def blind() -> list[Document]:
    """A ServiceAccount with the Role of the launcher, less the events."""
    found = {d["kind"]: d for d in documents(ROOT / "manifests" / "10-access.yaml")}
    role, binding = found["Role"], found["RoleBinding"]
    role["rules"] = [rule for rule in role["rules"] if rule["resources"] != ["events"]]
    for document in (role, binding):
        document["metadata"]["name"] = BLIND
    binding["roleRef"]["name"] = BLIND
    binding["subjects"] = [{"kind": "ServiceAccount", "name": BLIND}]
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": BLIND}}
    return [account, role, binding]


@pytest.fixture(scope="module")
def told(launching: Launching) -> dict[str, str]:
    """What the launcher of each case said."""

    def play(name: str) -> str:
        case, workspace, pod = CASES[name], f"/workspace/{name}", f"launcher-{name}"
        if case.change:
            job = made_here(launching, workspace)
            case.change(job)
            launching.namespace.apply(job)
        launching.launch(pod, launching.arguments(workspace, *case.arguments), case.account)
        with suppress(AssertionError):  # the test of this case tells
            launching.ends(pod)
        return launching.said(pod)

    with ThreadPoolExecutor(4) as pool:
        return dict(zip(CASES, pool.map(play, CASES), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_is_told_by_name_within_a_minute_and_nothing_is_left(
    launching: Launching, namespace: Namespace, told: dict[str, str], name: str
) -> None:
    case, pod = CASES[name], f"launcher-{name}"
    assert namespace.phase(pod) == "Failed"
    last = told[name].strip().splitlines()[-1]
    assert last.startswith("ddpm jobs: ")
    assert case.sentence in last
    assert "--- events:" in told[name]
    begun = "at work already" if case.change else "Made the PyTorchJob"
    took = launching.seconds_between(pod, begun, "Giving up: ")
    assert took <= WITHIN or not case.timed
    assert not launching.left(job_name(f"/workspace/{name}", "train"))


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
