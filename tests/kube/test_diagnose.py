"""When a job is given up, and the reason that is reported."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.worker_logs import MESSAGE, POD, error, followed, pods, progress, stamped

from ddpm_core.config import load as params
from ddpm_core.runtime import log_records
from ddpm_kube import options
from ddpm_kube.diagnose import OPERATOR_TIMEOUT, Diagnosis, pod_problems
from ddpm_kube.logs import Logs
from ddpm_kube.spec import JobSpec
from ddpm_kube.watch import View

Json = dict[str, Any]


def diagnosis(**given: Any) -> Diagnosis:
    config = params.load(None, ("tracking.uri=''",), "/workspace/run")
    volumes = {"volumes": [{"claim": "runs", "path": "/workspace"}]}
    job = JobSpec(config, options.read({**volumes, **given}), "run", "ddpm", "ddpm:dev")
    return Diagnosis(job, 30.0, lambda text: None)


def logs_of(written: list[str]) -> Logs:
    """Return the logs of one container that has ended."""
    log, _ = followed(lambda _: stamped(written))
    log.follow(pods("c1", state="terminated"))
    log.finish(30)
    return log


def job(message: str = "", **conditions: str) -> Json:
    """Return a job with these conditions, each "True" or "False"."""
    listed = [{"type": t, "status": s, "message": message} for t, s in conditions.items()]
    return {"metadata": {"name": "run", "uid": "u-1"}, "status": {"conditions": listed}}


# Repeated errors


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


# Time that does not count


@pytest.mark.parametrize("events_readable", [True, False])
def test_a_resumed_job_gets_the_full_time_again(events_readable: bool) -> None:
    """Kueue may admit a job hours after it was created."""
    diagnosing, log = diagnosis(queue="gpus"), logs_of([])
    view = View(job=job(), events_readable=events_readable)
    assert diagnosing.failure(view, log, 100.0) == ""
    view.job = job(Created="True", Suspended="True")
    assert diagnosing.failure(view, log, 101.0) == diagnosing.failure(view, log, 4000.0) == ""
    view.job = job(Created="True", Suspended="False") if not events_readable else job()
    assert diagnosing.failure(view, log, 4001.0) == ""
    assert diagnosing.failure(view, log, 4000.0 + OPERATOR_TIMEOUT) == ""
    assert diagnosing.failure(view, log, 4001.0 + OPERATOR_TIMEOUT)


# Failed jobs


def test_a_failed_job_reports_operator_and_worker() -> None:
    deadline = "it was active longer than specified deadline"
    view = View(job=job(deadline, Failed="True"))
    reason = diagnosis().failure(view, logs_of([error(0)]), 0.0)
    assert reason == f"The job failed: {deadline}. The workers' last error: {MESSAGE}"
    reason = diagnosis().failure(view, logs_of([error(0), progress(10)]), 0.0)
    assert reason == f"The job failed: {deadline}."


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
