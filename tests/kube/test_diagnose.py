"""When a job is given up, and the reason that is reported."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.worker_logs import MESSAGE, POD, error, followed, pods, progress, stamped

from ddpm_core import errors
from ddpm_core.config import load as params
from ddpm_core.console import report_errors
from ddpm_core.errors import UserError
from ddpm_core.runtime import log_records
from ddpm_kube import options
from ddpm_kube.diagnose import Diagnosis, creation_problems, pod_problems
from ddpm_kube.logs import Logs
from ddpm_kube.spec import JobSpec
from ddpm_kube.watch import View

Json = dict[str, Any]


def diagnosis(print_line: Callable[[str], None] = str, **given: Any) -> Diagnosis:
    config = params.load(None, ("tracking.uri=''",), "/workspace/run")
    volumes = {"volumes": [{"claim": "runs", "path": "/workspace"}]}
    job = JobSpec(config, options.read({**volumes, **given}), "run", "ddpm", "ddpm:dev")
    return Diagnosis(job, print_line)


def logs_of(written: list[str]) -> Logs:
    """Return the logs of one container that has ended."""
    log, _ = followed(lambda _: stamped(written))
    log.follow(pods("c1", state="terminated"))
    log.finish(30)
    return log


def job(message: str = "", suspend: bool = False, **conditions: str) -> Json:
    """Return a job with these conditions, each "True" or "False"."""
    listed = [{"type": t, "status": s, "message": message} for t, s in conditions.items()]
    return {
        "metadata": {"name": "run", "uid": "u-1", "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"runPolicy": {"suspend": suspend}},
        "status": {"conditions": listed},
    }


def pod(phase: str = "Pending", **status: Any) -> Json:
    container = {"name": "pytorch", "image": "ddpm:1", "resources": {"limits": {"memory": "2Gi"}}}
    status |= {"phase": phase}
    return {"metadata": {"uid": "p-1"}, "spec": {"containers": [container]}, "status": status}


def container(**state: Json) -> Json:
    return {"containerStatuses": [{"name": "pytorch", "state": state}]}


def event(reason: str, message: str, kind: str = "PyTorchJob", at: str = "2026-01-02") -> Json:
    return {
        "metadata": {"uid": message},
        "type": "Warning",
        "reason": reason,
        "message": message,
        "involvedObject": {"kind": kind, "name": "run", "uid": "u-1"},
        "lastTimestamp": f"{at}T00:00:00Z",
    }


# Repeated errors


@pytest.mark.slow
def test_processes_of_one_start_count_as_one_failure(tmp_path: Path) -> None:
    """Three processes that torchrun starts three times write the error up to nine times."""
    program = tmp_path / "program.py"
    program.write_text(
        "from ddpm_core.console import report_errors\nfrom ddpm_core.errors import UserError\n"
        f"with report_errors('ddpm train'):\n    raise UserError({MESSAGE!r})\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]

    def run() -> list[str]:
        done = subprocess.run(
            [*torchrun, "--nproc-per-node=3", "--max-restarts=2", str(program)],
            env={**os.environ, log_records.VARIABLE: "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.stdout.splitlines()

    written = run()
    third = {record.attempt for line in written if (record := log_records.parse(line))}
    assert len(third) == 3, written
    last = max(third)
    before = [
        line for line in written if not ((r := log_records.parse(line)) and r.attempt == last)
    ]

    twice, thrice = logs_of(before), logs_of(written)
    assert twice.failure_counts() == {(POD, MESSAGE): 2}
    assert diagnosis(processes=3).failure(View(), twice, 0.0) == ""
    expected = f"worker-0 failed 3 times with the same error: {MESSAGE}"
    assert diagnosis().failure(View(), thrice, 0.0) == expected
    # The next container of the pod starts to count again, and its failures are others.
    assert logs_of([*written, *run()]).failure_counts() == {(POD, MESSAGE): 6}


@pytest.mark.parametrize(
    ("steps", "count"),
    [
        ([[1000], [3000], [5000]], 1),
        ([[1000], [1000], [1000]], 3),
        ([[1000, 2000], [1500], [1800, 1900]], 3),
        ([[], [1000], []], 2),
    ],
)
def test_progress_resets_the_count_of_failures(steps: list[list[int]], count: int) -> None:
    """Outages that are over, days apart, are no reason to give up."""
    written = []
    for attempt, reached in enumerate(steps):
        written += [*map(progress, reached), error(attempt)]
    log = logs_of(written)
    assert log.failure_counts() == {(POD, MESSAGE): count}
    assert log.last_error() == MESSAGE
    assert bool(diagnosis().failure(View(), log, 0.0)) == (count == 3)


def test_progress_of_other_tasks_does_not_reset_the_count() -> None:
    log = logs_of([error(0), progress(10, "prepare"), error(1)])
    assert log.failure_counts() == {(POD, MESSAGE): 2}


def test_log_lines_read_late_count_at_their_own_time() -> None:
    """A launcher that comes late reads the logs of containers side by side."""
    progress_is_read = threading.Event()

    def read(previous: bool) -> Iterator[str]:
        if previous:
            assert progress_is_read.wait(30)
            yield from stamped([error(attempt) for attempt in range(3)])
        else:
            yield from stamped([progress(10)], minute=1)
            progress_is_read.set()

    log, _ = followed(read)
    log.follow(pods("c2", before="c1", state="terminated"))
    log.finish(30)
    assert log.failure_counts() == {} and log.last_error() == ""


def test_a_job_is_diagnosed_while_workers_keep_writing() -> None:
    diagnosing = diagnosis()
    switches, stop = sys.getswitchinterval(), threading.Event()

    def read(previous: bool) -> Iterator[str]:
        for number in range(10**9):
            if stop.is_set():
                return
            yield f"2026-01-01T00:00:00.{number:09}Z {error(number, f'error {number}')}"

    log, _ = followed(read)
    sys.setswitchinterval(1e-6)
    try:
        log.follow(pods("c1"))
        assert {diagnosing.failure(View(), log, 0.0) for _ in range(1000)} == {""}
    finally:
        stop.set()
        sys.setswitchinterval(switches)
    log.follow({})
    log.finish(30)


# Waiting

CREATED = {"Created": "True"}
FULL = 'Error creating: pods "run-worker-0" is forbidden: exceeded quota: gpus, used: 8'
PULLING = {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}
UNSCHEDULABLE = {"type": "PodScheduled", "reason": "Unschedulable", "message": "0/3 nodes fit"}
WAITS = {
    "controller": (View(job=job()), "No controller has picked up the job."),
    "pods": (
        View(job=job(**CREATED)),
        "Kubeflow's Training Operator has not created the pods.",
    ),
    "blind": (
        View(job=job(**CREATED), events_readable=False),
        "Kubeflow's Training Operator has not created the pods. Either",
    ),
    "quota": (
        View(job=job(**CREATED), events=[event("FailedCreatePod", FULL)]),
        "The quota of the namespace does not allow worker-0: Error creating: pods",
    ),
    "node": (
        View(job=job(**CREATED), pods={POD: pod(conditions=[UNSCHEDULABLE])}),
        "worker-0 is Unschedulable: 0/3 nodes fit.",
    ),
    "image": (
        View(job=job(**CREATED), pods={POD: pod(**container(waiting=PULLING))}),
        "worker-0 cannot get its image: ImagePullBackOff of 'ddpm:1': Back-off pulling image.",
    ),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_problem_that_may_pass_is_reported_each_minute(name: str) -> None:
    view, message = WAITS[name]
    printed: list[str] = []
    diagnosing, log = diagnosis(printed.append, patience="10m"), logs_of([])
    for second in range(0, 600, 10):
        assert diagnosing.failure(view, log, 1000.0 + second) == ""
    reminders = [line for line in printed if line.startswith("Waiting for ")]
    starts = [f"Waiting for {minute} min of 10 min: {message}" for minute in range(1, 10)]
    assert [line[: len(start)] for line, start in zip(reminders, starts, strict=True)] == starts
    reason = diagnosing.failure(view, log, 1600.0)
    assert reason.startswith(message) and reason.endswith(" This has lasted 10 min (patience).")


def test_patience_starts_again_once_enough_workers_run() -> None:
    waiting, _ = WAITS["image"]
    running = View(job=job(**CREATED), pods={POD: pod("Running", **container(running={}))})
    diagnosing, log = diagnosis(patience="10m"), logs_of([])
    for now in (0.0, 599.0):
        assert diagnosing.failure(waiting, log, now) == ""
    assert diagnosing.failure(running, log, 600.0) == ""
    for now in (601.0, 1200.0):
        assert diagnosing.failure(waiting, log, now) == ""
    assert diagnosing.failure(waiting, log, 1201.0)


def test_enough_workers_train_without_one_that_waits() -> None:
    other = "run-worker-1"
    pods_ = {POD: pod("Running", **container(running={})), other: pod(conditions=[UNSCHEDULABLE])}
    printed: list[str] = []
    diagnosing = diagnosis(printed.append, max_replicas=2)
    for now in (0.0, 1e6):
        assert diagnosing.failure(View(job=job(**CREATED), pods=pods_), logs_of([]), now) == ""
    assert sum("training continues without worker-1" in line for line in printed) == 1
    assert not any(line.startswith("Waiting") for line in printed)


@pytest.mark.parametrize(
    "refusal",
    [
        'pods "run-worker-0" is forbidden: violates PodSecurity "restricted:latest"',
        'pods "run-worker-0" is forbidden: error looking up service account ddpm/absent',
        'admission webhook "policy.example.com" denied the request: no such team',
        'Pod "run-worker-0" is invalid: spec.containers[0].resources.limits: must be positive',
    ],
)
def test_a_refusal_ends_the_job_at_once(refusal: str) -> None:
    events = [event("FailedCreatePod", f"Error creating: {refusal}")]
    view = View(job=job(**CREATED), events=events)
    reason = diagnosis().failure(view, logs_of([]), 0.0)
    assert reason.startswith("The API server refuses to create ") and refusal in reason
    view.last_seen[POD] = pod("Succeeded")
    diagnosing = diagnosis(max_replicas=2, patience="10m")
    assert diagnosing.failure(view, logs_of([]), 0.0) == ""
    assert refusal in diagnosing.failure(view, logs_of([]), 600.0)


@pytest.mark.parametrize(
    "message",
    [
        'Internal error occurred: failed calling webhook "vpod.kb.io": connection refused',
        # Kueue may hear of the owner later than of the pod.
        'admission webhook "mpod.kb.io" denied the request: PyTorchJob.kubeflow.org "r" not found',
        'admission webhook "mpod.kb.io" denied the request: Job.batch "run-node-0" not found',
        'admission webhook "mjob.kb.io" denied the request: JobSet.jobset.x-k8s.io "r" not found',
        'pods is forbidden: User "operator" cannot create resource "pods" in API group ""',
    ],
)
def test_a_temporary_refusal_of_a_pod_is_awaited(message: str) -> None:
    (problem,) = creation_problems(event("FailedCreatePod", message))
    assert not problem.permanent and message in problem.message


# The queue


def test_a_queued_job_waits_as_long_as_it_takes() -> None:
    printed: list[str] = []
    diagnosing, log = diagnosis(printed.append, queue="gpus"), logs_of([])
    view = View(job=job(suspend=True))
    diagnosing.failure(view, log, 0.0)
    view.events = [
        event("Pending", "of an earlier job", "Workload", "2025-12-31"),
        event("Pending", "7 GPUs more needed", "Workload", "2026-01-03"),
        event("Pending", "8 GPUs more needed", "Workload", "2026-01-02"),
    ]
    for second in range(10, 36010, 10):
        assert diagnosing.failure(view, log, float(second)) == ""
    lines = [line for line in printed if line.startswith("Suspended")]
    assert len(lines) == 600
    assert lines[-1] == "Suspended for 10 h in the queue gpus: 7 GPUs more needed"


def test_a_queued_job_without_a_reason_names_the_command() -> None:
    printed: list[str] = []
    diagnosing = diagnosis(printed.append)
    for now in (0.0, 60.0):
        diagnosing.failure(View(job=job(suspend=True)), logs_of([]), now)
    expected = "Suspended for 1 min: run `kubectl -n ddpm describe workloads`"
    assert printed == ["The job is suspended; waiting until it is resumed.", expected]


@pytest.mark.parametrize("events_readable", [True, False])
def test_a_resumed_job_gets_the_full_time_again(events_readable: bool) -> None:
    """Kueue may admit a job hours after it was created."""
    diagnosing, log = diagnosis(queue="gpus"), logs_of([])
    view = View(job=job(), events_readable=events_readable)
    assert diagnosing.failure(view, log, 100.0) == ""
    view.job = job(suspend=True, Created="True", Suspended="True")
    assert diagnosing.failure(view, log, 101.0) == diagnosing.failure(view, log, 4000.0) == ""
    view.job = job(Created="True", Suspended="False")
    assert diagnosing.failure(view, log, 4001.0) == ""
    assert diagnosing.failure(view, log, 4000.0 + 900.0) == ""
    assert diagnosing.failure(view, log, 4001.0 + 900.0)


# Failed jobs


def test_a_failed_job_reports_operator_and_worker() -> None:
    deadline = "it was active longer than specified deadline"
    view = View(job=job(deadline, Failed="True"))
    reason = diagnosis().failure(view, logs_of([error(0)]), 0.0)
    assert reason == f"The job failed: {deadline}. The workers' last error: {MESSAGE}"
    reason = diagnosis().failure(view, logs_of([error(0), progress(10)]), 0.0)
    assert reason == f"The job failed: {deadline}."


@pytest.mark.parametrize("state", ["state", "lastState"])
def test_a_failed_job_without_logs_reports_the_termination_message(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator, or a node that is lost, removes pods together with their logs."""
    file = tmp_path / "termination-log"
    file.touch()
    monkeypatch.setattr(errors, "TERMINATION_LOG", file)
    with pytest.raises(SystemExit), report_errors("ddpm train"):
        raise UserError(MESSAGE)
    status = {"name": "pytorch", state: {"terminated": {"message": file.read_text()}}}
    view = View(job=job("", Failed="True"), last_seen={POD: pod(containerStatuses=[status])})
    reason = diagnosis().failure(view, logs_of([]), 0.0)
    assert reason == f"The job failed: no message. The workers' last error: {MESSAGE}"


# Pods


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"terminated": {"reason": "OOMKilled", "exitCode": 137}}, "its memory limit, 2Gi"),
        ({"waiting": {"reason": "ErrImagePull"}}, "cannot get its image: ErrImagePull of 'ddpm:1'"),
    ],
)
def test_an_injected_container_is_not_taken_for_ours(state: Json, message: str) -> None:
    ours = {"name": "pytorch", "image": "ddpm:1", "resources": {"limits": {"memory": "2Gi"}}}
    proxy = {"name": "proxy", "image": "proxy:1", "resources": {}}
    statuses = [{"name": "proxy", "state": {"running": {}}}, {"name": "pytorch", "state": state}]
    status = {"phase": "Running", "containerStatuses": statuses}
    pod = {"metadata": {"uid": "p-1"}, "spec": {"containers": [proxy, ours]}, "status": status}
    (problem,) = pod_problems(POD, pod)
    assert message in problem.message
