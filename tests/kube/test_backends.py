"""The two backends: what each builds, reads and refuses, and which one a cluster gets."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace
from typing import Any

import pytest
from kubernetes.client.exceptions import ApiException
from support.documents import OVERLAYS, Document, mistakes_in_pod, read

from ddpm_core.config import load as params
from ddpm_core.errors import UserError
from ddpm_kube import options
from ddpm_kube.backends import BACKENDS, condition, of_name, worker
from ddpm_kube.cluster import Cluster
from ddpm_kube.diagnose import Diagnosis, creation_problems, find_problems
from ddpm_kube.job import build
from ddpm_kube.manifests import load
from ddpm_kube.options import AUTO
from ddpm_kube.spec import JobSpec
from ddpm_kube.watch import WORKLOAD, View

Json = dict[str, Any]
TRAINJOB = BACKENDS["trainjob"]
(RUNTIME,) = read(OVERLAYS / "trainjob" / "runtime")


def spec(backend: str, run_id: str = "run", **given: Any) -> JobSpec:
    config = params.load(None, ("tracking.uri=''",), "/workspace/run")
    mounted = {"volumes": [{"claim": "ddpm-workspace", "path": "/workspace"}], "backend": backend}
    return JobSpec(config, options.read({**mounted, **given}), run_id, "ddpm", "ddpm:dev")


def patch_of(job: Json) -> Json:
    """Return the pod template with which a TrainJob patches its runtime."""
    (patch,) = job["spec"]["runtimePatches"]
    (workers,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert workers["name"] == jobs_of(RUNTIME)["name"]
    return dict(workers["template"]["spec"]["template"])


def jobs_of(runtime: Document) -> Document:
    (workers,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    return dict(workers)


def pod_of(runtime: Document) -> Document:
    return dict(jobs_of(runtime)["template"]["spec"]["template"])


# What they build


def test_both_backends_give_workers_the_same_pod() -> None:
    given: Json = {
        "cpu": 2,
        "memory": "8Gi",
        "gpu": 2,
        "shm": "1Gi",
        "tmp": "128Mi",
        "env": {"A": "b"},
        "node_selector": {"pool": "gpu"},
        "image_pull_secrets": ["registry"],
        "labels": {"team": "a"},
        "annotations": {"note": "b"},
        "service_account": "trainer",
        "grace_seconds": 200,
        "deadline_seconds": 3600,
        "queue": "gpus",
    }
    first, second = (build(spec(name, **given)) for name in BACKENDS)
    pod = first["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    trainer, patch = second["spec"]["trainer"], patch_of(second)
    (ours,), (theirs,) = pod["spec"]["containers"], patch["spec"].pop("containers")
    assert patch["metadata"] == pod["metadata"]
    assert patch["spec"] == {field: pod["spec"][field] for field in patch["spec"]}
    assert {"volumes", "tolerations", "imagePullSecrets", "nodeSelector"} < set(patch["spec"])
    assert theirs == {"name": "node", "volumeMounts": ours["volumeMounts"]}
    assert trainer["image"] == ours["image"] and trainer["resourcesPerNode"] == ours["resources"]
    assert (trainer["command"], trainer["args"]) == (ours["command"], ours["args"])
    assert [one for one in trainer["env"] if not one["name"].startswith("PET_")] == ours["env"]
    assert second["spec"]["activeDeadlineSeconds"] == 3600
    assert TRAINJOB.grace_seconds(second) == of_name("pytorchjob").grace_seconds(first) == 200
    labels = [job["metadata"]["labels"] for job in (first, second)]
    assert labels[0] == labels[1] and labels[0]["kueue.x-k8s.io/queue-name"] == "gpus"


def test_a_trainjob_sets_up_torchrun_like_the_operator() -> None:
    given = {"min_replicas": 2, "max_replicas": 4, "processes": 3, "max_restarts": 7}
    job = build(spec("trainjob", **given, join_seconds=9))
    variables = {one["name"]: one["value"] for one in job["spec"]["trainer"]["env"]}
    assert {name: value for name, value in variables.items() if name.startswith("PET_")} == {
        "PET_NNODES": "2:4",
        "PET_NPROC_PER_NODE": "3",
        "PET_MAX_RESTARTS": "7",
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": "train-run-node-0-0.train-run:29400",
        "PET_RDZV_ID": "train-run",
        "PET_RDZV_CONF": "last_call_timeout=9",
    }
    assert job["spec"]["trainer"]["numNodes"] == 4
    assert job["spec"]["runtimeRef"] == {"kind": "TrainingRuntime", "name": "ddpm"}
    assert RUNTIME["metadata"]["name"] == "ddpm" and "torch" not in RUNTIME["spec"]["mlPolicy"]
    # Those of the file for kubectl are the same, for its own name.
    static = load("trainjob.yaml")["spec"]["trainer"]["env"]
    assert {one["name"] for one in static} == {one for one in variables if one.startswith("PET_")}


def test_the_runtime_has_the_pod_of_the_pytorchjob() -> None:
    """What the launcher's TrainJob does not patch is the same as in a PyTorchJob."""
    manifest = load("train.yaml")["spec"]["pytorchReplicaSpecs"]["Worker"]
    pod, ours = copy.deepcopy(pod_of(RUNTIME)["spec"]), manifest["template"]["spec"]
    (container,), (their,) = pod.pop("containers"), ours.pop("containers")
    chain = {"workspace", "params"}  # set by the launcher or by overlays/trainjob/chain
    assert ours.pop("initContainers")
    assert pod.pop("restartPolicy") == manifest["restartPolicy"] == "OnFailure"
    ours["volumes"] = [one for one in ours["volumes"] if one["name"] not in chain]
    their["volumeMounts"] = [one for one in their["volumeMounts"] if one["name"] not in chain]
    their["env"] = [one for one in their["env"] if one["name"] != "DDPM_WORKSPACE"]
    assert pod == ours
    assert {**container, "name": "pytorch"} == their
    assert mistakes_in_pod(jobs_of(RUNTIME)["template"]) == []
    limits = load("train.yaml")["spec"]["runPolicy"]
    assert jobs_of(RUNTIME)["template"]["spec"]["backoffLimit"] == limits["backoffLimit"]
    kept = RUNTIME["spec"]["template"]["spec"]["ttlSecondsAfterFinished"]
    assert kept == limits["ttlSecondsAfterFinished"]


def test_options_that_only_the_runtime_has_are_refused_at_once() -> None:
    given: Json = {
        "secrets": ["mine"],
        "optional_secrets": ["ddpm-s3", "other"],
        "backoff_limit": 3,
        "runtime_class": "nvidia",
        "image_pull_policy": "Always",
    }
    assert build(spec("pytorchjob", **given))
    with pytest.raises(UserError) as caught:
        spec("trainjob", **given)
    assert str(caught.value).startswith("5 problems in the options of the job:")
    for name in given:
        assert f"  {name}: got " in str(caught.value)
    assert str(caught.value).count("set it in the TrainingRuntime ddpm (overlays/trainjob)") == 5
    assert build(spec("trainjob", optional_secrets=["ddpm-s3", "ddpm-mlflow"]))


def test_names_of_pods_fit_for_a_run_with_a_long_name() -> None:
    """Kubernetes shortens the names of a Job's pods, from which the worker is read."""
    made = spec("trainjob", run_id="s3://a-bucket/" + "a-long-prefix/" * 5)
    assert len(f"{made.name}-node-0-999-x7k2p") <= 63


# What they read


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ({}, ""),
        ({"jobsStatus": [{"name": "node", "ready": 0, "active": 1}]}, "Starting"),
        ({"jobsStatus": [{"name": "node", "ready": 1, "active": 1}]}, "Running"),
        ({"conditions": [{"type": "Suspended", "status": "True"}]}, "Suspended"),
        # After a resume the condition stays, with status False.
        (
            {
                "conditions": [{"type": "Suspended", "status": "False"}],
                "jobsStatus": [{"name": "node", "ready": 1}],
            },
            "Running",
        ),
        (
            {
                "conditions": [{"type": "Complete", "status": "True"}],
                "jobsStatus": [{"name": "node", "ready": 0, "succeeded": 1}],
            },
            "Succeeded",
        ),
        ({"conditions": [{"type": "Failed", "status": "True", "message": "why"}]}, "Failed"),
    ],
)
def test_the_state_of_a_trainjob_is_read(status: Json, state: str) -> None:
    assert condition(TRAINJOB, {"status": status})[0] == state


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        ("train-run-worker-12", "worker-12"),
        ("train-run-node-0-12-x7k2p", "worker-12"),
        ("train-run-node-0-12-", "worker-12"),
        ("train-worker-1-abcde-worker-0", "worker-0"),
        ("train-node-0-1-abcde-worker-0", "worker-0"),
        ("train-node-0-1-abcde-node-0-3-x7k2p", "worker-3"),
    ],
)
def test_workers_are_named_by_their_number(pod: str, expected: str) -> None:
    assert worker(pod) == expected


def event(kind: str, reason: str, message: str, at: str) -> Json:
    return {
        "metadata": {"uid": f"{kind} {at}"},
        "type": "Warning",
        "reason": reason,
        "message": message,
        "involvedObject": {"kind": kind, "name": "run-node-0", "uid": "of-the-child"},
        "eventTime": at,
    }


def job(**status: Any) -> Json:
    metadata = {"name": "run", "uid": "u-1", "creationTimestamp": "2026-01-02T00:00:00Z"}
    return {"metadata": metadata, "spec": {}, "status": status}


def test_a_refused_pod_is_explained_by_an_event_of_the_child() -> None:
    """The launcher does not watch the Job, so its events count if they are newer than the job."""
    refused = 'Error creating: pods "run-node-0-1-x7k2p" is forbidden: exceeded quota: gpus'
    view = View(kinds=(WORKLOAD, *TRAINJOB.children))
    old = event("Job", "FailedCreate", "of an earlier job", "2026-01-01T00:00:00Z")
    view.update("events", "ADDED", old)
    view.update("events", "ADDED", event("Job", "FailedCreate", refused, "2026-01-03T00:00:00Z"))
    assert view.events == []  # the job is not known yet
    view.update("jobs", "ADDED", job(jobsStatus=[{"name": "node", "active": 1}]))
    (problem,) = find_problems(view, 2)
    assert problem.message.startswith("The quota of the namespace does not allow worker-1: ")
    assert not problem.permanent
    (problem,) = creation_problems(event("JobSet", "JobCreationFailed", "jobs is forbidden: x", ""))
    assert problem.permanent and problem.worker == "a worker"
    # JobSet's cache may be late.
    exists = 'job "run-node-0" creation failed with error: jobs.batch "run-node-0" already exists'
    assert not list(creation_problems(event("JobSet", "JobCreationFailed", exists, "")))


def test_only_the_newest_pod_of_a_worker_counts() -> None:
    """An evicted pod of a Job stays, and its replacement has another name."""
    spec_ = {"containers": [{"name": "node", "image": "ddpm:1"}]}
    running = [{"name": "node", "state": {"running": {}}}]
    states = {
        "run-node-0-0-zzzzz": {"phase": "Failed", "reason": "Evicted"},
        "run-node-0-0-aaaaa": {"phase": "Running", "containerStatuses": running},
    }
    view = View(job=job())
    for day, (name, status) in enumerate(states.items(), start=1):
        metadata = {"name": name, "uid": name, "creationTimestamp": f"2026-01-0{day}T00:00:00Z"}
        view.update("pods", "ADDED", {"metadata": metadata, "spec": spec_, "status": status})
    printed: list[str] = []
    logs: Any = SimpleNamespace(failure_counts=dict)
    assert Diagnosis(spec("trainjob"), printed.append).failure(view, logs, 0.0) == ""
    assert printed == ["worker-0: Running"]


def test_a_trainjob_without_a_controller_names_trainer() -> None:
    logs: Any = SimpleNamespace(failure_counts=dict)
    diagnosing = Diagnosis(spec("trainjob", patience="10s"), str)
    assert diagnosing.failure(View(job=job()), logs, 0.0) == ""
    reason = diagnosing.failure(View(job=job()), logs, 10.0)
    assert "Is Kubeflow Trainer running" in reason and "kubeflow-system" in reason
    suspended = {**job(), "spec": {"suspend": True}}
    assert diagnosing.failure(View(job=suspended), logs, 1000.0) == ""


# Which one a cluster gets


class Server:
    """An API server with the resources of these backends; `refusal` is that of a webhook."""

    refusal = ""

    def __init__(self, *names: str) -> None:
        self.there = [BACKENDS[name] for name in names]

    def get_api_resources(self, group: str, version: str, **_: object) -> Any:
        # Kubeflow's Notebooks are in the group of PyTorchJobs.
        served = [one.plural for one in self.there if one.group == group]
        if group != "kubeflow.org" and not served:
            raise ApiException(status=404, reason="404 page not found")
        resources = [{"name": name} for name in ("notebooks", *served)]
        return SimpleNamespace(data=json.dumps({"resources": resources}))

    def list_namespaced_custom_object(self, *place: str, **_: object) -> Json:
        return {"items": [{"metadata": {"name": place[3]}}]}

    def create_namespaced_custom_object(self, *_: object, **__: object) -> Json:
        body = json.dumps({"message": self.refusal})
        response = SimpleNamespace(status=403, reason="", data=body, getheaders=dict)
        raise ApiException(http_resp=response)


def cluster(*names: str) -> Cluster:
    server: Any = Server(*names)
    return Cluster("ddpm", server, server)


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        (("pytorchjob",), "pytorchjob"),
        (("trainjob",), "trainjob"),
        (("pytorchjob", "trainjob"), "pytorchjob"),
    ],
)
def test_auto_takes_what_the_cluster_has(there: tuple[str, ...], expected: str) -> None:
    made = cluster(*there)
    assert made.using(AUTO).backend.name == expected
    assert [one.backend.name for one in made.installed()] == list(there)
    assert made.using("trainjob").backend is TRAINJOB


def test_a_cluster_without_controllers_gets_both_commands() -> None:
    with pytest.raises(UserError, match="has neither PyTorchJob nor TrainJob") as caught:
        cluster().using(AUTO)
    assert all(backend.install in str(caught.value) for backend in BACKENDS.values())


@pytest.mark.parametrize(
    "refusal",
    [
        'admission webhook "validator.trainjob.trainer.kubeflow.org" denied the request: '
        'TrainingRuntime "ddpm" not found: specified trainingRuntime must be created before',
        # Kueue's webhook may look first.
        "admission webhook \"vtrainjob.kb.io\" denied the request: runtime 'ddpm' not found",
    ],
)
def test_a_missing_runtime_is_reported_with_its_installation(refusal: str) -> None:
    made = cluster("trainjob").using("trainjob")
    made.jobs.refusal = refusal
    with pytest.raises(UserError, match="Cannot create the TrainJob: ") as caught:
        made.create({})
    assert "kubectl apply -k overlays/trainjob" in str(caught.value)
    assert "Role" not in str(caught.value)
