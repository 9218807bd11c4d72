"""The workers' logs: each line is printed once, and records are read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tenacity
from kubernetes.client.exceptions import ApiException
from support.digits_workspace import digits, put_data
from support.program import write_params
from support.worker_logs import (
    MESSAGE,
    POD,
    Answer,
    error,
    followed,
    followed_until,
    pods,
    stamped,
)
from urllib3.exceptions import ReadTimeoutError

from ddpm_core import cli
from ddpm_core.runtime import log_records
from ddpm_core.storage.workspace import Workspace
from ddpm_kube import cluster, launch, logs
from ddpm_kube.backends import DEFAULT
from ddpm_kube.logs import Logs
from ddpm_kube.watch import View


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "REOPEN_AFTER", 0.05)
    for module in (cluster, logs):
        monkeypatch.setattr(module, "PAUSES", (0.001, 0.001))


# Records


def test_training_writes_records_that_the_launcher_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_params(tmp_path)
    monkeypatch.setattr("sys.argv", ["ddpm", "train", "-S", "train.steps=2"])
    monkeypatch.setenv(log_records.VARIABLE, "1")

    def output_of_training() -> list[str]:
        with suppress(SystemExit):
            cli.main()
        return capsys.readouterr().err.splitlines()

    failed = output_of_training()
    ((_, message), count) = read_log(failed).failure_counts().popitem()
    assert count == 1 and f"ddpm train: {message}" in failed

    workspace = Workspace.open("workspace")
    images, labels = digits(8)
    put_data(workspace, images[:20], labels[:20], held_out=4)
    trained = output_of_training()
    assert read_log([*failed, *trained]).failure_counts() == {}, trained

    monkeypatch.delenv(log_records.VARIABLE)
    assert not any(map(log_records.parse, output_of_training()))


def read_log(written: list[str]) -> Logs:
    log, _ = followed(lambda previous: stamped(written))
    log.follow(pods("c1", state="terminated"))
    log.finish(30)
    return log


@pytest.mark.parametrize(
    "line", ['{"ddpm": "error"}', '{"ddpm": "other", "a": 1}', '{"ddpm": [', '{"ddpm": 1}', "{}"]
)
def test_lines_that_are_no_records_are_printed(line: str) -> None:
    log, printed = followed(lambda previous: stamped([line]))
    log.follow(pods("c1", state="terminated"))
    log.finish(30)
    assert printed == [f"[worker-0] {line}"] and log.failure_counts() == {}


# Each line once


def test_a_connection_that_keeps_breaking_repeats_no_line() -> None:
    written = stamped(["a", "b", error(0)])
    calls, complete = [], threading.Event()

    def read(previous: bool) -> Iterator[str]:
        calls.append(previous)
        yield from written
        if len(calls) < 6:
            raise ReadTimeoutError(None, "/", "Read timed out.")  # type: ignore[arg-type]
        yield "2026-01-01T00:01:00Z z"
        complete.set()

    log, printed = followed(read)
    followed_until(complete, log)
    assert printed == [f"[worker-0] {text}" for text in "abz"]
    assert log.failure_counts() == {(POD, MESSAGE): 1}


def test_lines_with_the_same_time_are_printed_once_each() -> None:
    """CRI-O gives all lines that it read at once the same time."""
    texts = ["Traceback:", "", "", f"ddpm train: {MESSAGE}", error(0)]
    written = [f"2026-01-01T00:00:00.123456789+00:00 {text}" for text in texts]
    calls, complete = [], threading.Event()

    def read(previous: bool) -> Iterator[str]:
        calls.append(previous)
        yield from written[: 2 * len(calls)]
        if len(calls) < 3:
            raise ReadTimeoutError(None, "/", "Read timed out.")  # type: ignore[arg-type]
        complete.set()

    log, printed = followed(read)
    followed_until(complete, log)
    assert printed == [f"[worker-0] {text}" for text in texts[:-1]]
    assert log.failure_counts() == {(POD, MESSAGE): 1}


def test_a_node_clock_that_is_ahead_loses_no_line() -> None:
    """The clock is 30 s ahead, and the line was written 10 s ago."""
    ahead, asked, complete = (
        datetime.now(UTC) + timedelta(seconds=20),
        list[int](),
        threading.Event(),
    )

    def answer(*_: object, since_seconds: int = 0, **__: object) -> Answer:
        asked.append(since_seconds)
        if len(asked) > 1:
            complete.set()
        return Answer([f"{ahead.isoformat()} a"])

    api: Any = SimpleNamespace(
        namespace="ddpm",
        patience=0.0,
        backend=DEFAULT,
        core=SimpleNamespace(read_namespaced_pod_log=answer),
    )
    followed_until(complete, Logs(api, str))
    assert asked[0] == 0 and asked[1] > 10


def test_a_worker_that_was_silent_for_long_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each connection that was opened gives the API server the full time again."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(tenacity, "time", SimpleNamespace(monotonic=lambda: clock.now))
    calls, complete = [], threading.Event()

    def read(previous: bool) -> Iterator[str]:
        calls.append(previous)
        if len(calls) < 4:
            clock.now += 300.0
            raise ReadTimeoutError(None, "/", "Read timed out.")  # type: ignore[arg-type]
        yield from stamped(["at last"])
        complete.set()

    log, printed = followed(read)
    followed_until(complete, log)
    assert printed == ["[worker-0] at last"]


def test_reading_continues_after_a_temporary_refusal() -> None:
    calls, complete = [], threading.Event()

    def read(previous: bool) -> list[str]:
        calls.append(previous)
        if 1 < len(calls) < 4:
            raise ApiException(status=401, reason="Unauthorized")
        if len(calls) == 4:
            complete.set()
        return stamped(["before", "after"][: 1 if len(calls) == 1 else 2])

    log, printed = followed(read)
    followed_until(complete, log)
    assert printed == ["[worker-0] before", "[worker-0] after"]


@pytest.mark.parametrize("late", [False, True], ids=["status-in-time", "status-late"])
def test_a_restarted_container_is_read_once(late: bool) -> None:
    """The thread of the previous container may run into its log before the status arrives."""
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

    log, printed = followed(read)
    log.follow(pods("c1"))
    assert (again if late else ended).wait(30)
    log.follow(pods("c2", before="c1"))
    assert again.wait(30)
    log.follow({})
    log.finish(30)
    assert printed == ["[worker-0] start 1", "[worker-0] start 2", "[worker-0] end 2"]


def test_a_late_launcher_also_reads_the_previous_container() -> None:
    log, printed = followed(
        lambda previous: stamped(["before"]) if previous else stamped(["now"], minute=1)
    )
    log.follow(pods("c2", before="c1", state="terminated"))
    log.finish(30)
    assert sorted(printed) == ["[worker-0] before", "[worker-0] now"]


def test_times_have_any_zone_and_other_lines_are_skipped() -> None:
    log, printed = followed(
        lambda _: [
            "unable to retrieve container logs for containerd://c1",
            "2026-01-01T01:00:00.1+01:00 a",
            "2026-01-01T01:00:00.12+01:00 b",
            "2026-01-01T01:00:00.1+01:00 a",
        ]
    )
    log.follow(pods("c1", state="terminated"))
    log.finish(30)
    assert printed == ["[worker-0] a", "[worker-0] b"]


def test_nothing_is_printed_after_the_launcher_gave_up() -> None:
    started, removed = threading.Event(), threading.Event()

    def read(previous: bool) -> Iterator[str]:
        yield from stamped(["at work"])
        started.set()
        assert removed.wait(30)
        yield from stamped(["stopping"], minute=1)

    log, printed = followed(read)
    with log:
        log.follow(pods("c1"))
        assert started.wait(30)
    removed.set()
    log.finish(30)
    assert printed == ["[worker-0] at work"]


# Reading while workers write


def test_a_failure_is_explained_while_workers_keep_writing(
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
    shown: list[str] = []

    def say(text: str) -> None:
        """Let the worker write another line for each line that is shown."""
        shown.append(text)
        asked.release()
        written.acquire()

    monkeypatch.setattr(launch, "say", say)
    launch.explain(View(last_seen=pods("c1")), log)
    assert shown[1:3] == ["    old 1", "    old 2"]
    log.follow({})
    asked.release(50)
    log.finish(30)
