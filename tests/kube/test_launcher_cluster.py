"""Asking the API server: what is waited out, what ends it, and what is told then."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kubernetes.client.exceptions import ApiException
from kubernetes.config import kube_config

from ddpm_core.errors import UserError
from ddpm_kube import answers, cluster, gc, launch
from ddpm_kube.answers import PATIENCE, Backoff
from ddpm_kube.cluster import Cluster, connect
from ddpm_kube.feed import Feed, LostSight
from ddpm_kube.here import Here
from ddpm_kube.job import MANAGER, RUN

AWAY = ApiException(status=503, reason="away")
Plain = dict[str, Any]


class Clock:
    """Time that passes while somebody sleeps."""

    def __init__(self) -> None:
        self.now, self.pauses = 0.0, list[float]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.pauses.append(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (answers, cluster):
        monkeypatch.setattr(module, "time", made)
    return made


# Asking again


def test_a_question_is_asked_again_for_a_minute_and_less_and_less_often(clock: Clock) -> None:
    backoff = Backoff(clock.sleep)
    while backoff.passes(AWAY):
        pass
    assert clock.pauses[:6] == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0]
    assert PATIENCE - 8.0 < clock.now <= PATIENCE


def test_the_minute_begins_with_the_first_failure_and_anew_after_an_answer(clock: Clock) -> None:
    backoff = Backoff(clock.sleep)
    for _ in range(3):
        clock.now += 10 * PATIENCE  # a watch that went well for long
        assert backoff.passes(AWAY)
        backoff.over()
    assert clock.pauses == [0.5] * 3


def test_an_outage_is_told_once_and_its_end_too(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = iter([AWAY, ConnectionError("refused"), AWAY])

    def call() -> str:
        if error := next(questions, None):
            raise error
        return "the answer"

    assert answers.asked(call, "list PyTorchJobs") == "the answer"
    assert capsys.readouterr().err.splitlines() == [
        "warning: Cannot list PyTorchJobs yet: 503 away. It is tried again.",
        "The API server answers again.",
    ]


def test_what_waiting_does_not_mend_is_told_at_once(clock: Clock) -> None:
    def call() -> str:
        raise ApiException(status=403, reason="Forbidden")

    with pytest.raises(UserError, match=r"^Not allowed to list PyTorchJobs: 403 Forbidden\. "):
        answers.asked(call, "list PyTorchJobs")
    assert clock.pauses == []


# Watching


class Watched:
    """An API server's answers to a list or a watch: `listed` once a list, then the `lines`."""

    def __init__(self, listed: Plain | None = None, *lines: Plain) -> None:
        self.listed = {"metadata": {"resourceVersion": "1"}, "items": []} | (listed or {})
        self.lines, self.lists, self.ended = list(lines), 0, threading.Event()

    def __call__(self, *_: object, watch: bool = False, **__: object) -> Any:
        if watch:
            return SimpleNamespace(stream=self.stream, close=int, release_conn=int)
        self.lists += 1
        return SimpleNamespace(data=json.dumps(self.listed))

    def stream(self, **_: object) -> Iterator[bytes]:
        while self.lines:
            yield json.dumps(self.lines.pop(0)).encode() + b"\n"
        self.ended.wait(30)


def feed_of(jobs: Watched, pods: Watched, events: Watched) -> Feed:
    api: Any = SimpleNamespace(
        list_namespaced_custom_object=jobs,
        list_namespaced_pod=pods,
        list_namespaced_event=events,
    )
    return Feed(Cluster("ddpm", api, api), "run")


def test_an_answer_that_nobody_understands_ends_the_launcher_and_not_the_job() -> None:
    odd = Watched(None, {"type": "ADDED", "object": {"kind": "Pod"}})
    others = Watched()
    with feed_of(Watched(), odd, others) as feed:
        with pytest.raises(LostSight, match=r"tells of pods is not understood \(KeyError\("):
            for _ in range(20):
                feed.wait(0.5)
        for one in (odd, others):
            one.ended.set()


def test_a_watch_that_is_too_old_begins_anew_and_nobody_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(answers, "PAUSES", (0.001, 0.001))
    pod = {"metadata": {"name": "run-worker-0", "uid": "u", "resourceVersion": "9"}, "status": {}}
    gone = {"type": "ERROR", "object": {"code": 410, "message": "too old"}}
    pods, others = Watched(None, gone, gone, {"type": "ADDED", "object": pod}), Watched()
    with feed_of(others, pods, others) as feed:
        while not feed.wait(0.5).pods:
            pass
        for one in (pods, others):
            one.ended.set()
    assert pods.lists >= 3
    assert capsys.readouterr().err == ""


# A job that cannot be got rid of


class Held:
    """The jobs of an API server that a finalizer keeps, whoever deletes them."""

    def __init__(self, job: Plain) -> None:
        self.job, self.looks = job, 0

    def create_namespaced_custom_object(self, *_: object, **__: object) -> Plain:
        raise ApiException(status=409, reason="exists")

    def get_namespaced_custom_object(self, *_: object, **__: object) -> Plain:
        self.looks += 1
        assert self.looks < 1000, "the launcher looks for ever"
        return self.job

    def delete_namespaced_custom_object(self, *_: object, **__: object) -> None:
        self.job["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"

    def list_namespaced_custom_object(self, *_: object, **__: object) -> Plain:
        return {"items": [self.job]}


def held_job() -> Plain:
    template = {"spec": {"terminationGracePeriodSeconds": 90}}
    return {
        "metadata": {"name": "train-run", "uid": "u-1", "labels": {**MANAGER, RUN: "run"}},
        "spec": {"pytorchReplicaSpecs": {"Worker": {"template": template}}},
        "status": {"conditions": [{"type": "Failed", "status": "True"}]},
    }


def test_a_job_that_is_never_gone_ends_the_launcher_with_what_to_do(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs: Any = Held(held_job())
    with pytest.raises(UserError, match=r"ddpm/train-run .* cannot be removed\. End what keeps it"):
        launch.make_or_find(Here(Cluster("ddpm", jobs, jobs), None), held_job())
    assert 150 <= clock.now < 152
    assert "kubectl -n ddpm get pytorchjob train-run" in capsys.readouterr().err


def test_a_job_that_is_never_gone_does_not_count_as_removed(clock: Clock) -> None:
    jobs: Any = Held(held_job())
    assert gc.remove_run(Cluster("ddpm", jobs, jobs), "run") == []


# A job that goes while it is adopted


@pytest.mark.parametrize("late", [False, True], ids=["gone", "going"])
def test_a_job_that_is_ended_while_it_is_adopted_is_made_anew(
    clock: Clock, capsys: pytest.CaptureFixture[str], late: bool
) -> None:
    """The launcher before this one may be told to stop at that very moment."""
    owner = {"metadata": {"name": "launcher", "uid": "u-2"}, "spec": {}}
    ending: Plain = {**held_job(), "status": {}}
    there = [ending]

    def create(*_: object, body: Plain, **__: object) -> Plain:
        if there:
            raise ApiException(status=409, reason="exists")
        return body

    def adopt(*_: object, **__: object) -> Plain:
        ending["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        if not late:
            there.clear()
        return get()

    def get(*_: object, **__: object) -> Plain:
        if not there:
            raise ApiException(status=404, reason="gone")
        return there[0]

    jobs: Any = SimpleNamespace(
        create_namespaced_custom_object=create,
        get_namespaced_custom_object=get,
        patch_namespaced_custom_object=adopt,
        delete_namespaced_custom_object=lambda *_, **__: there.clear(),
    )
    wanted = held_job()
    assert launch.make_or_find(Here(Cluster("ddpm", jobs, jobs), owner), wanted) is wanted
    said = capsys.readouterr().err
    assert said.endswith("Made the PyTorchJob ddpm/train-run.\n") and "following" not in said


# Finding the cluster


@pytest.mark.parametrize(
    "content",
    [b"{a: [", b"\xff\xfe\x00", b"- a list\n", b"a text", b"", b"a: 1\n", b"contexts: [{name: 1}]"],
)
def test_a_kubeconfig_that_is_none_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    file = tmp_path / "config"
    file.write_bytes(content)
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(file))
    with pytest.raises(UserError) as caught:
        connect(None, None)
    assert str(file) in str(caught.value) and "Set KUBECONFIG" in str(caught.value)
    assert "\n" not in str(caught.value)
