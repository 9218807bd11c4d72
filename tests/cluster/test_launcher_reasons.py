"""The launcher, as a pod with little patience, names the cause of a failed job in time.

Each cause comes from a real pod, quota, policy or account. Four cases run at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import pytest
from cluster import ROOT, Document, Namespace, documents, wait_until
from launching import TINY, TRAINJOB, Launching, made_here, own_namespace, pod_of

from ddpm_kube.spec import job_name

pytestmark = pytest.mark.timeout(900)

PATIENCE = ("--patience", "30s")
WITHIN = 60.0  # seconds
# Refuses pods that request a GPU, and no others.
QUOTA: Document = {
    "apiVersion": "v1",
    "kind": "ResourceQuota",
    "metadata": {"name": "no-gpu"},
    "spec": {"hard": {"requests.nvidia.com/gpu": "0"}},
}
GPU = ("-S", "device=cuda", "-K", "gpu=1")
# Has the permissions of ddpm-launcher except for events, like KFP's own pipeline-runner.
BLIND = "launcher-blind"


@dataclass(frozen=True)
class Case:
    """The message that the launcher must print, and how to provoke it.

    `change` patches the job, which the test creates and the launcher adopts: no option can do that.
    """

    message: str
    arguments: tuple[str, ...] = ()
    account: str = "ddpm-launcher"
    change: Callable[[Document], object] | None = None
    timed: bool = True
    backend: str = "pytorchjob"


CASES = {
    "memory": Case("worker-0 was OOMKilled", ("-K", "memory=150Mi", "-K", "shm=8Mi")),
    "image": Case("worker-0 cannot get its image: ", ("--image", "no.such.registry/ddpm:1")),
    "image-name": Case("cannot get its image: InvalidImageName of", ("--image", "ddpm:dev:twice")),
    "room": Case("worker-0 is Unschedulable: 0/", ("-K", "memory=9Ti")),
    "quota": Case("exceeded quota: no-gpu", GPU),
    "account": Case(
        "The API server refuses to create worker-0: ", ("-K", "service_account=absent")
    ),
    "secret": Case("CreateContainerConfigError", ("-K", "secrets=[absent]")),
    "blind": Case("Kubeflow's Training Operator has not created the pods. Either", GPU, BLIND),
    # The operator ignores jobs of another controller, as if it were not running.
    "operator": Case(
        "No controller has picked up the job. Is Kubeflow's Training Operator running",
        change=lambda job: job["spec"]["runPolicy"].update(managedBy="kueue.x-k8s.io/multikueue"),
    ),
    "policy": Case(
        "violates PodSecurity",
        change=lambda job: pod_of(job)["containers"][0]["securityContext"].update(
            allowPrivilegeEscalation=True
        ),
    ),
    # Three starts of the program take as long as the machine needs.
    "no-data": Case(
        "worker-0 failed 3 times with the same error: There are no prepared data", timed=False
    ),
    # What differs for a TrainJob: its Job creates the pods, whose container has another name.
    "v2-memory": Case(
        "worker-0 was OOMKilled", ("-K", "memory=150Mi", "-K", "shm=8Mi"), backend="trainjob"
    ),
    "v2-quota": Case("does not allow worker-0: ", GPU, backend="trainjob"),
    "v2-account": Case(
        "The API server refuses to create worker-0: ",
        ("-K", "service_account=absent"),
        backend="trainjob",
    ),
    "v2-operator": Case(
        "No controller has picked up the job. Is Kubeflow Trainer running",
        change=lambda job: job["spec"].update(managedBy="kueue.x-k8s.io/multikueue"),
        backend="trainjob",
    ),
}
PLAYED = [
    name for name, case in CASES.items() if case.backend != "trainjob" or not TRAINJOB.args[0]
]


@pytest.fixture(scope="module")
def launching() -> Iterator[Launching]:
    with own_namespace("reasons") as namespace:
        namespace.apply([QUOTA, *blind()])
        # A quota refuses nothing until a controller has counted what is there.
        wait_until(lambda: counted(namespace), "the quota is counted", 120)
        yield Launching(namespace, TINY)


@pytest.fixture
def namespace(launching: Launching) -> Namespace:
    """Name the fixture whose logs a failed test prints."""
    return launching.namespace


def counted(namespace: Namespace) -> bool:
    quota = namespace.get("resourcequota", QUOTA["metadata"]["name"])
    return bool(quota.get("status", {}).get("hard"))


def blind() -> list[Document]:
    """Return a ServiceAccount with the Role of the launcher, except for events."""
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
def outputs(launching: Launching) -> dict[str, str]:
    """Return the output of each case's launcher."""

    def play(name: str) -> str:
        case, workspace, pod = CASES[name], f"/workspace/{name}", f"launcher-{name}"
        if case.change:
            job = made_here(launching, workspace, f"backend={case.backend}")
            case.change(job)
            launching.namespace.apply(job)
        arguments = launching.arguments(workspace, *PATIENCE, *case.arguments, backend=case.backend)
        launching.launch(pod, arguments, case.account)
        with suppress(AssertionError):  # the test of this case fails instead
            launching.ends(pod)
        return launching.output(pod)

    with ThreadPoolExecutor(4) as pool:
        return dict(zip(PLAYED, pool.map(play, PLAYED), strict=True))


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=TRAINJOB if c.backend == "trainjob" else ()) for n, c in CASES.items()],
)
def test_the_cause_is_reported_in_a_minute_and_nothing_is_left(
    launching: Launching, namespace: Namespace, outputs: dict[str, str], name: str
) -> None:
    case, pod = CASES[name], f"launcher-{name}"
    assert namespace.phase(pod) == "Failed"
    last = outputs[name].strip().splitlines()[-1]
    assert last.startswith("ddpm jobs: ")
    assert case.message in last
    assert "--- events:" in outputs[name]
    started = "is already running" if case.change else "Created the "
    took = launching.seconds_between(pod, started, "Giving up: ")
    assert took <= WITHIN or not case.timed
    assert not launching.left(job_name(f"/workspace/{name}", "train"))


def test_a_launcher_without_permission_names_the_role(
    launching: Launching, namespace: Namespace
) -> None:
    launching.launch("launcher-rights", launching.arguments("/workspace/rights"), account="ddpm")
    assert launching.ends("launcher-rights") == "Failed"
    last = launching.output("launcher-rights").strip().splitlines()[-1]
    assert "Not allowed to" in last
    assert "the Role ddpm-launcher" in last


def test_a_running_job_with_different_settings_is_left_alone(
    launching: Launching, namespace: Namespace
) -> None:
    job = made_here(launching, "/workspace/other", "node_selector={none: such}")
    namespace.apply(job)
    launching.launch("launcher-other", launching.arguments("/workspace/other"))
    assert launching.ends("launcher-other") == "Failed"
    assert "is running with different settings" in launching.output("launcher-other")
    name = job["metadata"]["name"]
    assert name in launching.jobs()
    namespace.kubectl("delete", "pytorchjob", name)
