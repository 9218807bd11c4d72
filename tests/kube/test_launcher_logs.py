"""The workers' logs: each line is passed on once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kubernetes.client.exceptions import ApiException
from support.digits_workspace import digits, put_data
from support.program import write_params
from support.worker_logs import POD, SENTENCE, Answer, followed, followed_until, pods, stamped
from urllib3.exceptions import ReadTimeoutError

from ddpm_core import cli
from ddpm_core.storage.workspace import Workspace
from ddpm_kube import answers, launch, logs
from ddpm_kube.feed import View
from ddpm_kube.logs import Logs


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "AGAIN", 0.05)
    monkeypatch.setattr(answers, "PAUSES", (0.001, 0.001))


# What is understood


def test_what_training_says_of_its_progress_and_its_end_is_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The words are the program's, which knows nothing of who reads them."""
    monkeypatch.chdir(tmp_path)

    write_params(tmp_path)
    monkeypatch.setattr("sys.argv", ["ddpm", "train", "-S", "train.steps=2"])

    def said() -> list[str]:
        with suppress(SystemExit):
            cli.main()
        return capsys.readouterr().err.splitlines()

    failed = [*said(), "x] failed (exitcode: 1) local_rank: 0"]
    ended = heard(failed)
    ((_, sentence), count) = ended.ends().popitem()
    assert count == 1 and sentence.startswith("There are no prepared data")

    workspace = Workspace.open("workspace")
    images, labels = digits(8)
    put_data(workspace, images[:20], labels[:20], held_out=4)
    went_on = said()
    assert heard([*failed, *went_on]).ends() == {}, went_on


def heard(written: list[str]) -> Logs:
    log, _ = followed(lambda previous: stamped(written))
    log.follow(pods("c1", state="terminated"))
    log.finish(30)
    return log


# Each line once


def test_a_connection_that_breaks_again_and_again_repeats_no_line() -> None:
    written = stamped(["a", f"ddpm train: {SENTENCE}", "x] failed (exitcode: 1) local_rank: 0"])
    calls, whole = [], threading.Event()

    def read(previous: bool) -> Iterator[str]:
        calls.append(previous)
        yield from written
        if len(calls) < 6:
            raise ReadTimeoutError(None, "/", "Read timed out.")  # type: ignore[arg-type]
        yield "2026-01-01T00:01:00Z z"
        whole.set()

    log, told = followed(read)
    followed_until(whole, log)
    assert [line.partition("] ")[2] for line in told] == [
        "a",
        f"ddpm train: {SENTENCE}",
        "x] failed (exitcode: 1) local_rank: 0",
        "z",
    ]
    assert log.ends() == {(POD, SENTENCE): 1}


def test_lines_of_one_moment_are_all_passed_on_and_each_once() -> None:
    """CRI-O gives all lines that it read at once the same time."""
    said = [
        "Traceback:",
        "",
        "",
        f"ddpm train: {SENTENCE}",
        "x] failed (exitcode: 1) local_rank: 0",
    ]
    written = [f"2026-01-01T00:00:00.123456789+00:00 {text}" for text in said]
    calls, whole = [], threading.Event()

    def read(previous: bool) -> Iterator[str]:
        calls.append(previous)
        yield from written[: 2 * len(calls)]
        if len(calls) < 3:
            raise ReadTimeoutError(None, "/", "Read timed out.")  # type: ignore[arg-type]
        whole.set()

    log, told = followed(read)
    followed_until(whole, log)
    assert told == [f"[worker-0] {text}" for text in said]
    assert log.ends() == {(POD, SENTENCE): 1}


def test_where_the_nodes_clock_is_ahead_no_line_is_left_out_after_a_break() -> None:
    """By 30 s, and the line was written 10 s ago."""
    ahead, asked, whole = datetime.now(UTC) + timedelta(seconds=20), list[int](), threading.Event()

    def answer(*_: object, since_seconds: int = 0, **__: object) -> Answer:
        asked.append(since_seconds)
        if len(asked) > 1:
            whole.set()
        return Answer([f"{ahead.isoformat()} a"])

    cluster: Any = SimpleNamespace(
        namespace="ddpm", core=SimpleNamespace(read_namespaced_pod_log=answer)
    )
    followed_until(whole, Logs(cluster, str))
    assert asked[0] == 0 and asked[1] > 10


def test_a_worker_that_is_silent_for_long_is_heard_when_it_speaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each connection that was answered begins the API server's patience anew."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(answers, "time", SimpleNamespace(monotonic=lambda: clock.now))
    calls, spoken = [], threading.Event()

    def read(previous: bool) -> Iterator[str]:
        calls.append(previous)
        if len(calls) < 4:
            clock.now += 300.0
            raise ReadTimeoutError(None, "/", "Read timed out.")  # type: ignore[arg-type]
        yield from stamped(["at last"])
        spoken.set()

    log, told = followed(read)
    followed_until(spoken, log)
    assert told == ["[worker-0] at last"]


def test_a_worker_is_heard_again_after_a_refusal_that_passes() -> None:
    calls, spoken = [], threading.Event()

    def read(previous: bool) -> list[str]:
        calls.append(previous)
        if 1 < len(calls) < 4:
            raise ApiException(status=401, reason="Unauthorized")
        if len(calls) == 4:
            spoken.set()
        return stamped(["before", "after"][: 1 if len(calls) == 1 else 2])

    log, told = followed(read)
    followed_until(spoken, log)
    assert told == ["[worker-0] before", "[worker-0] after"]


@pytest.mark.parametrize("late", [False, True], ids=["status-in-time", "status-late"])
def test_a_container_that_is_started_again_at_once_is_read_once(late: bool) -> None:
    """The thread of the one before may run into its log before anybody tells that it has ended."""
    first, second = stamped(["start 1"]), stamped(["start 2", "end 2"], minute=1)
    calls, ended, again = [], threading.Event(), threading.Event()

    def read(previous: bool) -> Iterator[str]:
        calls.append(previous)
        if len(calls) == 1:
            yield from first
            ended.set()
        else:
            yield from second
            again.set()

    log, told = followed(read)
    log.follow(pods("c1"))
    assert (again if late else ended).wait(30)
    log.follow(pods("c2", before="c1"))
    assert again.wait(30)
    log.follow({})
    log.finish(30)
    assert told == ["[worker-0] start 1", "[worker-0] start 2", "[worker-0] end 2"]


def test_a_launcher_that_comes_late_reads_the_container_before_too() -> None:
    log, told = followed(
        lambda previous: stamped(["before"]) if previous else stamped(["now"], minute=1)
    )
    log.follow(pods("c2", before="c1", state="terminated"))
    log.finish(30)
    assert sorted(told) == ["[worker-0] before", "[worker-0] now"]


def test_times_of_any_zone_are_taken_and_lines_without_one_are_not_the_workers() -> None:
    log, told = followed(
        lambda _: [
            "unable to retrieve container logs for containerd://c1",
            "2026-01-01T01:00:00.1+01:00 a",
            "2026-01-01T01:00:00.12+01:00 b",
            "2026-01-01T01:00:00.1+01:00 a",
        ]
    )
    log.follow(pods("c1", state="terminated"))
    log.finish(30)
    assert told == ["[worker-0] a", "[worker-0] b"]


def test_what_a_worker_says_while_its_job_is_removed_does_not_follow_the_reason() -> None:
    begun, removed = threading.Event(), threading.Event()

    def read(previous: bool) -> Iterator[str]:
        yield from stamped(["at work"])
        begun.set()
        assert removed.wait(30)
        yield from stamped(["told to leave"], minute=1)

    log, told = followed(read)
    with log:
        log.follow(pods("c1"))
        assert begun.wait(30)
    removed.set()
    log.finish(30)
    assert told == ["[worker-0] at work"]


# What is asked while they are written


def test_a_failure_is_explained_while_workers_go_on_writing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, written = threading.Semaphore(0), threading.Semaphore(0)

    def read(previous: bool) -> Iterator[str]:
        yield from stamped(["old 1", "old 2"])
        written.release()
        for number in range(50):
            asked.acquire()
            yield f"2026-01-01T00:01:{number:02}Z new"
            written.release()

    log, _ = followed(read)
    log.follow(pods("c1"))
    written.acquire()
    said: list[str] = []

    def say(text: str) -> None:
        """Each line that is said gives the worker time for another one."""
        said.append(text)
        asked.release()
        written.acquire()

    monkeypatch.setattr(launch, "say", say)
    launch.explain(View(last=pods("c1")), log)
    assert said[1:3] == ["    old 1", "    old 2"]
    log.follow({})
    asked.release(50)
    log.finish(30)
