"""When a job is given up, and what is told then."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.worker_logs import POD, SENTENCE, followed, pods, stamped

from ddpm_core.config import load as params
from ddpm_kube import options
from ddpm_kube.feed import View
from ddpm_kube.judge import NOBODY, Judge
from ddpm_kube.logs import Logs
from ddpm_kube.reasons import of_pod
from ddpm_kube.spec import JobSpec

Plain = dict[str, Any]


def judge(**given: Any) -> Judge:
    config = params.load(None, ("tracking.uri=''",), "/workspace/run")
    fixed = {"volumes": [{"claim": "runs", "path": "/workspace"}]}
    job = JobSpec(config, options.read({**fixed, **given}), "run", "ddpm", "ddpm:dev")
    return Judge(job, 30.0, lambda text: None)


def logs_of(said: list[str]) -> Logs:
    """Those of one container that has ended."""
    log, _ = followed(lambda _: stamped(said))
    log.follow(pods("c1", state="terminated"))
    log.finish(30)
    return log


def job(message: str = "", **conditions: str) -> Plain:
    """A job of these conditions, each True or False."""
    told = [{"type": t, "status": s, "message": message} for t, s in conditions.items()]
    return {"metadata": {"name": "run", "uid": "u-1"}, "status": {"conditions": told}}


# Ends, not processes


def test_an_end_of_three_processes_is_one_as_torchrun_really_tells_it(tmp_path: Path) -> None:
    """Three processes that are started three times say the sentence up to nine times."""
    program = tmp_path / "program.py"
    program.write_text(
        "from ddpm_core.console import telling\nfrom ddpm_core.errors import UserError\n"
        f"with telling('ddpm train'):\n    raise UserError({SENTENCE!r})\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node=3", "--max-restarts=2", str(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    said = done.stdout.splitlines()
    ends = [number for number, line in enumerate(said) if "failed (exitcode: " in line]
    assert len(ends) == 3, done.stdout

    twice, thrice = logs_of(said[: ends[2]]), logs_of(said)
    assert twice.ends() == {(POD, SENTENCE): 2}
    assert judge(processes=3).verdict(View(), twice, 0.0) == ""
    assert judge().verdict(View(), thrice, 0.0) == f"worker-0 ended 3 times with: {SENTENCE}"


def one_end(*progress: str) -> list[str]:
    return [*progress, f"ddpm train: {SENTENCE}", "E x] failed (exitcode: 1) local_rank: 0"]


def step(number: int) -> str:
    return f"train: {number}/9000 steps, 3.0/s"


@pytest.mark.parametrize(
    ("steps", "count"),
    [
        ([[1000], [3000], [5000]], 1),
        ([[1000], [1000], [1000]], 3),
        ([[1000, 2000], [1500], [1800, 1900]], 3),
        ([[], [1000], []], 2),
    ],
)
def test_ends_count_anew_once_training_has_come_further(steps: list[list[int]], count: int) -> None:
    """Outages that have passed, days apart, are no reason to give up."""
    said = [line for reached in steps for line in one_end(*map(step, reached))]
    log = logs_of(said)
    assert log.ends() == {(POD, SENTENCE): count}
    assert log.newest_sentence() == SENTENCE
    assert bool(judge().verdict(View(), log, 0.0)) == (count == 3)


def test_what_is_read_late_counts_where_it_was_said() -> None:
    """A launcher that comes late reads the logs of containers side by side."""
    progress_is_read = threading.Event()

    def read(previous: bool) -> Iterator[str]:
        if previous:
            assert progress_is_read.wait(30)
            yield from stamped(one_end() * 3)
        else:
            yield from stamped([step(10)], minute=1)
            progress_is_read.set()

    log, _ = followed(read)
    log.follow(pods("c2", before="c1", state="terminated"))
    log.finish(30)
    assert log.ends() == {} and log.newest_sentence() == ""


def test_a_job_is_judged_while_workers_go_on_writing() -> None:
    judging = judge()
    switches, stop = sys.getswitchinterval(), threading.Event()

    def read(previous: bool) -> Iterator[str]:
        for number in range(10**9):
            if stop.is_set():
                return
            moment = f"2026-01-01T00:00:00.{number:09}Z"
            yield f"{moment} ddpm train: sentence {number}"
            yield f"{moment}1 x] failed (exitcode: 1)"

    log, _ = followed(read)
    sys.setswitchinterval(1e-6)
    try:
        log.follow(pods("c1"))
        assert {judging.verdict(View(), log, 0.0) for _ in range(1000)} == {""}
    finally:
        stop.set()
        sys.setswitchinterval(switches)
    log.follow({})
    log.finish(30)


# Time that does not count


@pytest.mark.parametrize("events_shown", [True, False])
def test_a_job_that_was_suspended_has_all_the_time_again(events_shown: bool) -> None:
    """Kueue may admit a job hours after it was made."""
    judging, log = judge(queue="gpus"), logs_of([])
    view = View(job=job(), events_shown=events_shown)
    assert judging.verdict(view, log, 100.0) == ""
    view.job = job(Created="True", Suspended="True")
    assert judging.verdict(view, log, 101.0) == judging.verdict(view, log, 4000.0) == ""
    view.job = job(Created="True", Suspended="False") if not events_shown else job()
    assert judging.verdict(view, log, 4001.0) == ""
    assert judging.verdict(view, log, 4000.0 + NOBODY) == ""
    assert judging.verdict(view, log, 4001.0 + NOBODY)


# What the operator gave up


def test_why_the_operator_gave_up_is_told_beside_an_older_sentence() -> None:
    deadline = "it was active longer than specified deadline"
    view = View(job=job(deadline, Failed="True"))
    told = judge().verdict(view, logs_of(one_end()), 0.0)
    assert told == f"The job failed: {deadline}. The workers last ended with: {SENTENCE}"
    told = judge().verdict(view, logs_of([*one_end(), step(10)]), 0.0)
    assert told == f"The job failed: {deadline}."


# Pods


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({"terminated": {"reason": "OOMKilled", "exitCode": 137}}, "its memory limit, 2Gi"),
        ({"waiting": {"reason": "ErrImagePull"}}, "has no image: ErrImagePull of 'ddpm:1'"),
    ],
)
def test_a_container_that_the_cluster_puts_before_ours_is_not_taken_for_it(
    state: Plain, told: str
) -> None:
    ours = {"name": "pytorch", "image": "ddpm:1", "resources": {"limits": {"memory": "2Gi"}}}
    proxy = {"name": "proxy", "image": "proxy:1", "resources": {}}
    statuses = [{"name": "proxy", "state": {"running": {}}}, {"name": "pytorch", "state": state}]
    status = {"phase": "Running", "containerStatuses": statuses}
    pod = {"metadata": {"uid": "p-1"}, "spec": {"containers": [proxy, ours]}, "status": status}
    (problem,) = of_pod(POD, pod)
    assert told in problem.sentence
