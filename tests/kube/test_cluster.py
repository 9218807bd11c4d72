"""Requests to the API server and watches: what is retried, what fails, and what is reported."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tenacity
from kubernetes.client.exceptions import ApiException
from kubernetes.config import kube_config

from ddpm_core.errors import UserError
from ddpm_kube import cluster, gc, launch, watch
from ddpm_kube.cluster import RETRY_FOR, Cluster, Retry, connect
from ddpm_kube.job import MANAGED, RUN_ID
from ddpm_kube.location import Location
from ddpm_kube.watch import JobWatch, WatchLost

UNAVAILABLE = ApiException(status=503, reason="away")
Json = dict[str, Any]


class Clock:
    """Time that passes only while the code sleeps."""

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
    for module in (cluster, tenacity):
        monkeypatch.setattr(module, "time", made)
    return made


# Retries


def unavailable() -> str:
    raise UNAVAILABLE


def test_a_request_is_retried_for_a_minute_with_growing_pauses(clock: Clock) -> None:
    with pytest.raises(ApiException):
        Retry()(unavailable)
    assert clock.pauses[:6] == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0]
    assert RETRY_FOR - 8.0 < clock.now <= RETRY_FOR


def test_requests_of_a_patient_launcher_are_retried_longer(clock: Clock) -> None:
    core: Any = SimpleNamespace(read_namespaced_pod=lambda *_, **__: unavailable())
    with pytest.raises(UserError, match="Cannot read the pod: 503 away"):
        Cluster("ddpm", core, core, patience=900.0).pod("launcher")
    assert 892 < clock.now <= 900 and max(clock.pauses) == 8.0


def test_the_minute_starts_with_a_requests_first_failure(clock: Clock) -> None:
    retry = Retry()
    for _ in range(3):
        errors = iter([UNAVAILABLE])

        def call(errors: Iterator[Exception] = errors) -> str:
            clock.now += 10 * RETRY_FOR  # a request that takes long
            if error := next(errors, None):
                raise error
            return "the result"

        assert retry(call) == "the result"
    assert clock.pauses == [0.5] * 3


def test_no_request_is_retried_after_the_end(clock: Clock) -> None:
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(ApiException):
        Retry(stopped=stopped)(unavailable)
    assert clock.pauses == []


def test_an_outage_is_reported_at_its_start_and_end(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = iter([UNAVAILABLE, ConnectionError("refused"), UNAVAILABLE])

    def call() -> str:
        if error := next(errors, None):
            raise error
        return "the result"

    assert cluster.request(call, "list PyTorchJobs") == "the result"
    assert capsys.readouterr().err.splitlines() == [
        "warning: Cannot list PyTorchJobs at present: 503 away. Retrying.",
        "The API server responds again.",
    ]


def test_a_refusal_is_reported_at_once(clock: Clock) -> None:
    def call() -> str:
        raise ApiException(status=403, reason="Forbidden")

    with pytest.raises(UserError, match=r"^Not allowed to list PyTorchJobs: 403 Forbidden\. "):
        cluster.request(call, "list PyTorchJobs")
    assert clock.pauses == []


# Watches


class Source:
    """An API server's responses to a list, `listed`, and to all watches together, `lines`.

    A line that is an exception is raised when a watch is opened.
    """

    def __init__(self, listed: Json | None = None, *lines: Json | Exception) -> None:
        self.listed = {"metadata": {"resourceVersion": "1"}, "items": []} | (listed or {})
        self.lines, self.lists, self.ended = list(lines), 0, threading.Event()

    def __call__(self, *_: object, watch: bool = False, **__: object) -> Any:
        if watch and self.lines and isinstance(self.lines[0], Exception):
            raise self.lines.pop(0)  # type: ignore[misc]
        if watch:
            return SimpleNamespace(stream=self.stream, close=int, release_conn=int)
        self.lists += 1
        return SimpleNamespace(data=json.dumps(self.listed))

    def stream(self, **_: object) -> Iterator[bytes]:
        while self.lines and not isinstance(self.lines[0], Exception):
            yield json.dumps(self.lines.pop(0)).encode() + b"\n"
        if not self.lines:
            self.ended.wait(30)


def watch_of(jobs: Source, pods: Source, events: Source) -> JobWatch:
    api: Any = SimpleNamespace(
        list_namespaced_custom_object=jobs,
        list_namespaced_pod=pods,
        list_namespaced_event=events,
    )
    return JobWatch(Cluster("ddpm", api, api), "run")


def test_an_unreadable_response_ends_the_launcher_not_the_job() -> None:
    odd = Source(None, {"type": "ADDED", "object": {"kind": "Pod"}})
    others = Source()
    with watch_of(Source(), odd, others) as watching:
        with pytest.raises(WatchLost, match=r"response about pods \(KeyError\("):
            for _ in range(20):
                watching.wait(0.5)
        for one in (odd, others):
            one.ended.set()


def test_an_expired_watch_lists_again_and_reports_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The API server sends 410 as an event or as the status of a new watch."""
    monkeypatch.setattr(watch, "PAUSES", (0.001, 0.001))
    pod = {"metadata": {"name": "run-worker-0", "uid": "u", "resourceVersion": "9"}, "status": {}}
    gone = {"type": "ERROR", "object": {"code": 410, "message": "too old"}}
    refused = ApiException(status=410, reason="Gone")
    pods, others = Source(None, gone, refused, {"type": "ADDED", "object": pod}), Source()
    with watch_of(others, pods, others) as watching:
        while not watching.wait(0.5).pods:
            pass
        for one in (pods, others):
            one.ended.set()
    assert pods.lists >= 3
    assert capsys.readouterr().err == ""


def test_what_a_new_list_does_not_contain_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod may be deleted while a watch is broken."""
    monkeypatch.setattr(watch, "PAUSES", (0.001, 0.001))
    pod = {"metadata": {"name": "run-worker-0", "uid": "u", "resourceVersion": "9"}, "status": {}}
    gone = {"type": "ERROR", "object": {"code": 410}}
    pods, others = Source(None, {"type": "ADDED", "object": pod}, gone), Source()
    with watch_of(others, pods, others) as watching:
        while not (view := watching.wait(0.5)).last_seen or view.pods:
            pass
        for one in (pods, others):
            one.ended.set()
    assert pods.lists >= 2


# A job that cannot be removed


class Held:
    """The jobs of an API server, of which a finalizer keeps one."""

    def __init__(self, job: Json) -> None:
        self.job, self.looks = job, 0

    def create_namespaced_custom_object(self, *_: object, **__: object) -> Json:
        raise ApiException(status=409, reason="exists")

    def get_namespaced_custom_object(self, *_: object, **__: object) -> Json:
        self.looks += 1
        assert self.looks < 1000, "the launcher waits for ever"
        return self.job

    def delete_namespaced_custom_object(self, *_: object, **__: object) -> None:
        self.job["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"

    def get_api_resources(self, group: str, *_: object, **__: object) -> Any:
        listed = {"resources": [{"name": "pytorchjobs"}] if group == "kubeflow.org" else []}
        return SimpleNamespace(data=json.dumps(listed))

    def list_namespaced_custom_object(self, *_: object, **__: object) -> Json:
        return {"items": [self.job]}


def held_job() -> Json:
    template = {"spec": {"terminationGracePeriodSeconds": 90}}
    return {
        "metadata": {"name": "train-run", "uid": "u-1", "labels": {**MANAGED, RUN_ID: "run"}},
        "spec": {"pytorchReplicaSpecs": {"Worker": {"template": template}}},
        "status": {"conditions": [{"type": "Failed", "status": "True"}]},
    }


def test_a_job_that_cannot_be_removed_ends_the_launcher(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs: Any = Held(held_job())
    with pytest.raises(UserError, match=r"^Cannot remove .* ddpm/train-run .*Remove what blocks"):
        launch.create_or_find(Location(Cluster("ddpm", jobs, jobs), None), held_job())
    assert 150 <= clock.now < 152
    assert "kubectl -n ddpm get pytorchjob train-run" in capsys.readouterr().err


def test_a_job_that_is_never_gone_does_not_count_as_removed(clock: Clock) -> None:
    jobs: Any = Held(held_job())
    assert gc.remove_run(Cluster("ddpm", jobs, jobs), "run") == []


# A job that is deleted while it is adopted


@pytest.mark.parametrize("late", [False, True], ids=["gone", "going"])
def test_a_job_deleted_while_it_is_adopted_is_created_again(
    clock: Clock, capsys: pytest.CaptureFixture[str], late: bool
) -> None:
    """The previous launcher may receive SIGTERM at that moment."""
    owner = {"metadata": {"name": "launcher", "uid": "u-2"}, "spec": {}}
    ending: Json = {**held_job(), "status": {}}
    existing = [ending]

    def create(*_: object, body: Json, **__: object) -> Json:
        if existing:
            raise ApiException(status=409, reason="exists")
        return body

    def adopt(*_: object, **__: object) -> Json:
        ending["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        if not late:
            existing.clear()
        return get()

    def get(*_: object, **__: object) -> Json:
        if not existing:
            raise ApiException(status=404, reason="gone")
        return existing[0]

    jobs: Any = SimpleNamespace(
        create_namespaced_custom_object=create,
        get_namespaced_custom_object=get,
        patch_namespaced_custom_object=adopt,
        delete_namespaced_custom_object=lambda *_, **__: existing.clear(),
    )
    wanted = held_job()
    assert launch.create_or_find(Location(Cluster("ddpm", jobs, jobs), owner), wanted) is wanted
    output = capsys.readouterr().err
    assert output.endswith("Created the PyTorchJob ddpm/train-run.\n")
    assert "following" not in output


# Finding the cluster


@pytest.mark.parametrize(
    "content",
    [b"{a: [", b"\xff\xfe\x00", b"- a list\n", b"a text", b"", b"a: 1\n", b"contexts: [{name: 1}]"],
)
def test_an_invalid_kubeconfig_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    file = tmp_path / "config"
    file.write_bytes(content)
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(file))
    with pytest.raises(UserError) as caught:
        connect(None, None)
    assert str(file) in str(caught.value) and "Set KUBECONFIG" in str(caught.value)
    assert "\n" not in str(caught.value)
