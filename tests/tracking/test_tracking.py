"""The tracker: MLflow gets every row once, whatever fails, and no command waits for it."""

from __future__ import annotations

import errno
import getpass
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.mlflow_server import QUIET, Server, free_port, put_store, shared_server, wait_until

from ddpm_core import __version__
from ddpm_core.config import Config
from ddpm_core.config import load as params
from ddpm_core.storage.workspace import LOG, RUN, Workspace
from ddpm_core.text import masked
from ddpm_core.tracking.client import _create_store, connect
from ddpm_core.tracking.errors import reason
from ddpm_core.tracking.run import MlflowRun, flatten
from ddpm_core.tracking.tracker import Log, Tracker


@pytest.fixture
def server() -> Server:
    return shared_server().running()


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    (tmp_path / "run").mkdir()
    return Workspace.open(str(tmp_path / "run"))


@pytest.fixture
def silent_uri() -> Iterator[str]:
    """A server that accepts connections and never responds."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def config(uri: str, **sections: Any) -> Config:
    return params.validate({"tracking": {"uri": uri, "experiment": "tests"}, **sections})


def log_rows(workspace: Workspace, steps: range) -> None:
    with workspace.path(LOG).open("a") as file:
        for step in steps:
            row = {"step": step, "loss": 1 / step, "lr": 1e-3, "time": 1.7e9 + step}
            file.write(json.dumps({**row, "device": "cpu", "last": False}) + "\n")


def run_id(workspace: Workspace) -> str:
    return str(workspace.read_json(RUN)["mlflow"]["run_id"])


def history(uri: str, run: str, key: str) -> list[tuple[int, float, int]]:
    """Return what the server has: (step, value, Unix ms), in the order of arrival."""
    metrics = connect(uri).get_metric_history(run, key)
    return [(metric.step, metric.value, metric.timestamp) for metric in metrics]


def logged(workspace: Workspace, key: str) -> list[tuple[int, float, int]]:
    rows = [json.loads(line) for line in workspace.path(LOG).read_text().splitlines()]
    return [(row["step"], row[key], int(row["time"] * 1000)) for row in rows]


def assert_follows(uri: str, workspace: Workspace) -> None:
    """Check that the server's history equals log.jsonl, row for row."""
    for key in ("loss", "lr"):
        assert history(uri, run_id(workspace), f"train/{key}") == logged(workspace, key)


def has_step(uri: str, workspace: Workspace, step: int) -> bool:
    known = workspace.read_json(RUN).get("mlflow", {})
    return "run_id" in known and any(
        at == step for at, *_ in history(uri, known["run_id"], "train/loss")
    )


# What the server receives


def test_every_number_of_the_log_is_sent_once(server: Server, workspace: Workspace) -> None:
    tracker = Tracker.open(config(server.uri), workspace)
    log_rows(workspace, range(1, 2001))
    tracker.close()
    assert_follows(server.uri, workspace)
    run = connect(server.uri).get_run(run_id(workspace))
    assert set(run.data.metrics) == {"train/loss", "train/lr"}
    assert run.info.status == "FINISHED"


def test_a_resumed_training_keeps_its_mlflow_run(server: Server, workspace: Workspace) -> None:
    seen = []
    for steps in (range(1, 11), range(11, 21)):
        log_rows(workspace, steps)
        Tracker.open(config(server.uri), workspace, identity="same").close()
        seen.append(run_id(workspace))
    assert seen[0] == seen[1]
    assert_follows(server.uri, workspace)


def test_a_copied_workspace_gets_a_separate_mlflow_run(
    server: Server, workspace: Workspace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log_rows(workspace, range(1, 11))
    Tracker.open(config(server.uri), workspace, identity="same").close()
    first = run_id(workspace)
    shutil.copytree(workspace.uri, tmp_path / "copy")
    copy = Workspace.open(str(tmp_path / "copy"))
    for steps, one in ((range(11, 21), copy), (range(11, 16), workspace), (range(21, 23), copy)):
        log_rows(one, steps)
        Tracker.open(config(server.uri), one, identity="same").close()
        assert_follows(server.uri, one)
    assert run_id(workspace) == first != run_id(copy)
    notice = f"This workspace is a copy of {workspace.uri}. It gets a separate MLflow run."
    assert capsys.readouterr().err.count(notice) == 1


def test_a_moved_or_linked_workspace_keeps_its_mlflow_run(
    server: Server, workspace: Workspace, tmp_path: Path
) -> None:
    log_rows(workspace, range(1, 11))
    Tracker.open(config(server.uri), workspace).close()
    first = run_id(workspace)
    (tmp_path / "link").symlink_to(workspace.uri)
    Tracker.open(config(server.uri), Workspace.open(str(tmp_path / "link"))).close()
    moved = Workspace.open(str(Path(workspace.uri).rename(tmp_path / "moved")))
    Tracker.open(config(server.uri), moved).close()
    assert run_id(moved) == first


def test_rows_repeated_after_a_resume_are_not_sent_again(
    server: Server, workspace: Workspace
) -> None:
    log_rows(workspace, range(1, 11))
    Tracker.open(config(server.uri), workspace).close()
    first = history(server.uri, run_id(workspace), "train/loss")
    workspace.path(LOG).write_text("")
    log_rows(workspace, range(6, 13))
    Tracker.open(config(server.uri), workspace).close()
    assert history(server.uri, run_id(workspace), "train/loss") == [
        *first,
        *logged(workspace, "loss")[-2:],
    ]


def test_a_different_training_gets_a_new_mlflow_run(server: Server, workspace: Workspace) -> None:
    log_rows(workspace, range(1, 4))
    Tracker.open(config(server.uri), workspace, identity="one").close()
    first = run_id(workspace)
    Tracker.open(config(server.uri), workspace, identity="two").close()
    assert run_id(workspace) != first
    Tracker.open(config(server.uri), workspace).close()
    assert_follows(server.uri, workspace)


def test_a_run_that_the_server_does_not_have_is_replaced(
    server: Server, workspace: Workspace
) -> None:
    log_rows(workspace, range(1, 4))
    Tracker.open(config(server.uri), workspace).close()
    deleted = run_id(workspace)
    connect(server.uri).delete_run(deleted)
    Tracker.open(config(server.uri), workspace).close()
    assert run_id(workspace) != deleted
    assert_follows(server.uri, workspace)
    for unknown in ("0" * 32, "not an id"):
        workspace.write_json(RUN, {"mlflow": {"run_id": unknown, "uri": server.uri}})
        Tracker.open(config(server.uri), workspace).close()
        assert_follows(server.uri, workspace)


def test_a_run_created_before_a_broken_connection_is_found(
    server: Server, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, lost = MlflowRun.__init__, []

    def interrupted(self: MlflowRun, client: Any, run_id: str) -> None:
        if not lost:
            lost.append(run_id)
            raise ConnectionError("the server went away after it had made the run")
        begin(self, client, run_id)

    monkeypatch.setattr(MlflowRun, "__init__", interrupted)
    tracker = Tracker.open(config(server.uri), workspace)
    log_rows(workspace, range(1, 11))
    wait_until(lambda: has_step(server.uri, workspace, 10), "the rows have arrived")
    tracker.close()
    assert [run_id(workspace)] == lost
    assert_follows(server.uri, workspace)


def test_a_run_has_tags_for_its_user_and_commit(server: Server, workspace: Workspace) -> None:
    Tracker.open(config(server.uri), workspace).close()
    tags = connect(server.uri).get_run(run_id(workspace)).data.tags
    assert tags["mlflow.user"] == getpass.getuser()
    assert tags["mlflow.source.name"] == "ddpm"
    if Path(__file__).parents[2].joinpath(".git").exists():
        assert len(tags["mlflow.source.git.commit"]) == 40


def test_a_run_stays_in_its_experiment_with_a_warning(
    server: Server, workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    Tracker.open(config(server.uri), workspace).close()
    first = run_id(workspace)
    assert not capsys.readouterr().err
    given = config(server.uri)
    tracking = given.tracking.model_copy(update={"experiment": "another"})
    Tracker.open(given.model_copy(update={"tracking": tracking}), workspace).close()
    assert run_id(workspace) == first
    assert (
        "stays in the experiment 'tests'; tracking.experiment is now 'another'"
        in capsys.readouterr().err
    )


def test_params_tags_scores_and_files_are_sent_once(server: Server, workspace: Workspace) -> None:
    given = config(server.uri, train={"steps": 7})
    grid = workspace.path("grid.png")
    grid.write_bytes(b"image")
    for _ in range(2):  # the second time changes nothing
        tracker = Tracker.open(given, workspace)
        tracker.params(given.dump())
        tracker.params({"long": "x" * 7000, "from": "http://me:secret@host"})
        tracker.tags({"data": "abc", "classes": ["a", "b"]})
        tracker.metrics(200, {"fid_500": 12.5, "odd": math.nan, "name (with) signs": 1.0})
        tracker.artifact(grid, "samples")
        tracker.close()
    client = connect(server.uri)
    run = client.get_run(run_id(workspace))
    assert run.data.params["train.steps"] == "7"
    assert run.data.params["train.optimizer.betas"] == "[0.9, 0.999]"
    assert run.data.params["long"] == "x" * 6000
    assert run.data.params["from"] == "http://***@host"
    assert (run.data.tags["data"], run.data.tags["classes"]) == ("abc", '["a", "b"]')
    assert not [tag for tag in run.data.tags if tag.startswith("changed.")]
    assert [m[:2] for m in history(server.uri, run_id(workspace), "fid_500")] == [(200, 12.5)]
    assert len(history(server.uri, run_id(workspace), "odd")) == 1
    assert [f.path for f in client.list_artifacts(run_id(workspace), "samples")] == [
        "samples/grid.png"
    ]


def test_scores_of_earlier_steps_are_sent_and_queried_once(
    server: Server, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    ask, asked = MlflowClient.get_metric_history, []

    def counted(client: Any, run: str, key: str) -> Any:
        asked.append(key)
        return ask(client, run, key)

    monkeypatch.setattr(MlflowClient, "get_metric_history", counted)
    for steps in ((800,), (200, 400, 600, 800)):
        tracker = Tracker.open(config(server.uri), workspace)
        for step in steps:
            tracker.metrics(step, {"fid_500": step / 7})
        tracker.close()
    assert asked == ["fid_500"]
    sent = [m[:2] for m in history(server.uri, run_id(workspace), "fid_500")]
    assert sorted(sent) == [(step, step / 7) for step in steps]


def test_earlier_entries_are_replayed_into_an_empty_run_only(
    server: Server, workspace: Workspace
) -> None:
    asked: list[str] = []

    def replay(tracker: Tracker) -> None:
        asked.append("")
        tracker.params({"seed": 3})

    for _ in range(2):
        Tracker.open(config(server.uri), workspace, replay=replay).close()
    assert len(asked) == 1
    connect(server.uri).delete_run(run_id(workspace))
    Tracker.open(config(server.uri), workspace, replay=replay).close()
    assert connect(server.uri).get_run(run_id(workspace)).data.params == {"seed": "3"}


@pytest.mark.slow
def test_the_advice_for_a_deleted_experiment_restores_it(
    workspace: Workspace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = config(put_store(tmp_path / "mlflow.db"))
    Tracker.open(given, workspace).close()
    client = connect(given.tracking.uri)
    place = client.get_experiment_by_name("tests").experiment_id
    client.delete_experiment(place)
    log_rows(workspace, range(1, 4))
    Tracker.open(given, workspace).close()
    output = capsys.readouterr().err
    assert "The experiment 'tests' is deleted." in output
    advice = re.search("`(MLFLOW_TRACKING_URI=.*)`, or set tracking.experiment", output)
    assert advice
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(advice[1], shell=True, check=True, env={**os.environ, **QUIET, "PATH": path})
    Tracker.open(given, workspace).close()
    assert_follows(given.tracking.uri, workspace)


def test_the_run_names_its_data_and_training(server: Server, workspace: Workspace) -> None:
    uri = f"/data/{'deep/' * 100}shapes.zip"  # MLflow rejects a data set's name of 501 characters
    source = {"uri": uri, "sha256": "abc"}
    workspace.write_json("data/manifest.json", {"fingerprint": "feed", "source": source})
    for _ in range(2):
        Tracker.open(config(server.uri), workspace, identity="cafe").close()
    run = connect(server.uri).get_run(run_id(workspace))
    assert [(i.dataset.name, i.dataset.digest) for i in run.inputs.dataset_inputs] == [
        (f"…{uri[-499:]}", "feed")
    ]
    assert run.data.tags["source.uri"] == uri
    named = {key: run.data.tags.get(key) for key in ("data", "source.sha256", "training")}
    assert named == {"data": "feed", "source.sha256": "abc", "training": "cafe"}
    assert run.data.tags["ddpm"] == __version__


def test_a_changed_param_becomes_a_tag(server: Server, workspace: Workspace) -> None:
    for steps in (100, 200):
        tracker = Tracker.open(config(server.uri), workspace)
        tracker.params({"train": {"steps": steps}})
        tracker.close()
    data = connect(server.uri).get_run(run_id(workspace)).data
    assert data.params["train.steps"] == "100"
    assert data.tags["changed.train.steps"] == "200"


def test_a_rejected_entry_is_skipped(
    server: Server, workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = Tracker.open(config(server.uri), workspace)
    tracker.tags({"": "a tag without a name"})
    tracker.tags({"after": "it"})
    tracker.close()
    assert connect(server.uri).get_run(run_id(workspace)).data.tags["after"] == "it"
    assert "MLflow rejected an entry" in capsys.readouterr().err


def test_an_invalid_entry_is_skipped(
    workspace: Workspace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user may have edited run.json."""
    given = config(put_store(tmp_path / "mlflow.db"))
    unsent = [["metrics", 3], ["params", 7], ["tags", {"after": "them"}]]
    workspace.write_json(RUN, {"mlflow": {"uri": given.tracking.uri, "unsent": unsent}})
    Tracker.open(given, workspace).close()
    data = connect(given.tracking.uri).get_run(run_id(workspace)).data
    assert data.tags["after"] == "them"
    output = capsys.readouterr().err
    assert output.count("Skipped an invalid ") == 2 and "is back" not in output


def test_an_internal_error_stops_the_tracker_with_a_message(
    workspace: Workspace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def wrong(*_: Any) -> None:
        raise KeyError("loss")

    monkeypatch.setattr(MlflowRun, "rows", wrong)
    tracker = Tracker.open(config(put_store(tmp_path / "mlflow.db")), workspace)
    thread = tracker._thread
    assert thread is not None
    thread.join(30)
    assert not thread.is_alive()
    tracker.metrics(1, {"fid": 2.0})
    tracker.close()
    output = capsys.readouterr().err
    assert "an internal error (KeyError: 'loss')" in output and "unavailable" not in output
    assert workspace.read_json(RUN)["mlflow"]["unsent"][0][0] == "metrics"


def test_a_store_on_a_full_disk_is_an_outage_that_ends(
    workspace: Workspace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    begin, full = MlflowRun.__init__, [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))]

    def begins(self: MlflowRun, client: Any, run_id: str) -> None:
        if full:
            raise full.pop()
        begin(self, client, run_id)

    monkeypatch.setattr(MlflowRun, "__init__", begins)
    given = config(put_store(tmp_path / "mlflow.db"))
    log_rows(workspace, range(1, 4))
    Tracker.open(given, workspace).close()
    output = capsys.readouterr().err
    assert (
        "is unavailable: the disk is full. Free some space there. The command continues" in output
    )
    assert "is back" in output
    assert_follows(given.tracking.uri, workspace)


# Outages


@pytest.mark.slow
def test_a_killed_server_gets_each_row_once_when_it_is_back(
    server: Server, workspace: Workspace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = Tracker.open(config(server.uri), workspace)
    log_rows(workspace, range(1, 101))
    wait_until(lambda: has_step(server.uri, workspace, 100), "the first rows have arrived")
    server.kill()
    log_rows(workspace, range(101, 201))
    wait_until(lambda: tracker._outage.on, "the outage is noticed")
    (tmp_path / "short").mkdir()
    short = Workspace.open(str(tmp_path / "short"))
    run_during_an_outage(config(server.uri), short)
    output = capsys.readouterr().err
    assert "has not received 20 rows of log.jsonl and 2 entries such as settings" in output
    server.start()
    log_rows(workspace, range(201, 301))
    tracker.close()
    assert_follows(server.uri, workspace)
    assert capsys.readouterr().err.count("is back") == 1

    Tracker.open(config(server.uri), short).close()  # the next command on that workspace
    assert_follows(server.uri, short)
    data = connect(server.uri).get_run(run_id(short)).data
    assert data.params["seed"] == "3"
    assert data.metrics["fid_500"] == 9.0


def run_during_an_outage(given: Config, workspace: Workspace) -> None:
    tracker = Tracker.open(given, workspace)
    tracker.params({"seed": 3})
    tracker.metrics(20, {"fid_500": 9.0})
    log_rows(workspace, range(1, 21))
    tracker.close()


def test_a_frozen_server_gets_each_row_once(
    server: Server, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    tracker = Tracker.open(config(server.uri), workspace)
    log_rows(workspace, range(1, 11))
    wait_until(lambda: has_step(server.uri, workspace, 10), "the first rows have arrived")
    server.signal(signal.SIGSTOP)
    try:
        log_rows(workspace, range(11, 21))
        wait_until(lambda: tracker._outage.on, "the outage is noticed")
    finally:
        server.signal(signal.SIGCONT)
    tracker.close()
    assert_follows(server.uri, workspace)


@pytest.mark.slow
def test_a_killed_process_loses_no_row_and_repeats_none(
    server: Server, workspace: Workspace
) -> None:
    code = f"""
        import sys
        from ddpm_core.config import load as params
        from ddpm_core.tracking.tracker import Tracker
        from ddpm_core.storage.workspace import Workspace
        given = params.validate({{"tracking": {{"uri": {server.uri!r}, "experiment": "tests"}}}})
        Tracker.open(given, Workspace.open({workspace.uri!r}))
        sys.stdin.read()
    """
    log_rows(workspace, range(1, 3001))
    for last in (300, 1200):  # killed while it sends the rows after this step
        command = [sys.executable, "-c", textwrap.dedent(code)]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
            wait_until(lambda: has_step(server.uri, workspace, last), f"step {last}")  # noqa: B023
            process.kill()
    Tracker.open(config(server.uri), workspace).close()
    assert_follows(server.uri, workspace)


# No command waits


@pytest.mark.parametrize("kind", ["refused", "silent"])
def test_calls_return_at_once_without_a_server(
    kind: str,
    silent_uri: str,
    workspace: Workspace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    uri = silent_uri if kind == "silent" else f"http://127.0.0.1:{free_port()}"
    started = time.monotonic()
    tracker = Tracker.open(config(uri), workspace)
    tracker.params({"a": 1})
    tracker.metrics(1, {"b": 2.0})
    tracker.artifact(workspace.path("none.png"))
    assert time.monotonic() - started < 0.5
    wait_until(lambda: tracker._outage.on, "the outage is noticed")
    tracker.close(timeout=20)
    output = capsys.readouterr().err
    assert output.count("is unavailable") == 1
    assert ("refused" if kind == "refused" else "the request timed out") in output


def test_close_returns_within_its_timeout(silent_uri: str, workspace: Workspace) -> None:
    tracker = Tracker.open(config(silent_uri), workspace)
    started = time.monotonic()
    tracker.close(timeout=0.5)
    assert time.monotonic() - started < 2


def test_a_full_disk_while_closing_is_a_warning(
    silent_uri: str,
    workspace: Workspace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An error here would change the exit status of a run that was asked to stop."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    tracker = Tracker.open(config(silent_uri), workspace)
    tracker.params({"a": 1})
    monkeypatch.setattr(workspace.storage, "write", full)
    tracker.close(timeout=0.2)
    assert "No space left" in capsys.readouterr().err


def test_timeouts_do_not_change_the_environment(server: Server, workspace: Workspace) -> None:
    Tracker.open(config(server.uri), workspace).close()
    assert not [name for name in os.environ if name.startswith("MLFLOW_HTTP")]


# The store without a server


@pytest.mark.slow
def test_a_store_whose_creation_was_killed_is_created_again(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/store/mlflow.db"
    kill_during_creation(uri)
    assert list((tmp_path / "store").glob(".mlflow.db.*"))
    assert not (tmp_path / "store/mlflow.db").exists()
    code = f"""
        from pathlib import Path
        from ddpm_core.config import load as params
        from ddpm_core.tracking.tracker import Tracker
        from ddpm_core.storage.workspace import Workspace
        given = params.validate({{"tracking": {{"uri": {uri!r}, "experiment": "tests"}}}})
        workspace = Workspace.open("run")
        workspace.storage.write("log.jsonl", b'{{"step": 1, "loss": 0.5}}\\n')
        tracker = Tracker.open(given, workspace)
        tracker.artifact(workspace.path("log.jsonl"), "logs")
        tracker.close(timeout=300)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=tmp_path,
        env={**os.environ, **QUIET},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout + done.stderr == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "store"]
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == [
        "mlartifacts",
        "mlflow.db",
    ]
    assert list((tmp_path / "store/mlartifacts").rglob("logs/log.jsonl"))
    workspace = Workspace.open(str(tmp_path / "run"))
    assert [m[:2] for m in history(uri, run_id(workspace), "train/loss")] == [(1, 0.5)]


def kill_during_creation(uri: str) -> None:
    """Kill a process at its 40th SQL statement, which leaves a store that MLflow cannot open."""
    code = f"""
        import os, signal
        from sqlalchemy import event
        from sqlalchemy.engine import Engine
        from ddpm_core.tracking.client import connect
        seen = []
        @event.listens_for(Engine, "before_cursor_execute")
        def count(*_):
            seen.append("")
            if len(seen) == 40:
                os.kill(os.getpid(), signal.SIGKILL)
        connect({uri!r})
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False)
    assert done.returncode == -signal.SIGKILL


class QuickMlflow:
    """Replaces mlflow, whose client takes seconds to create a store."""

    class MlflowClient:
        def __init__(self, uri: str) -> None:
            put_store(Path(uri.removeprefix("sqlite:///")))

        def search_experiments(self, **_: Any) -> None: ...


@pytest.mark.parametrize("first", ["us", "another"])
def test_a_store_is_created_without_hard_links_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    path, others = tmp_path / "mlflow.db", b"made by another meanwhile"

    def none(self: Path, target: Path) -> None:
        if first == "another":
            self.write_bytes(others)
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Path, "hardlink_to", none)
    _create_store(QuickMlflow, path)
    assert [file.name for file in tmp_path.iterdir()] == ["mlflow.db"]
    assert (path.read_bytes() == others) == (first == "another")


def test_an_empty_uri_means_no_tracking_and_no_import(tmp_path: Path) -> None:
    code = f"""
        import sys, threading
        from pathlib import Path
        from ddpm_core.config import load as params
        from ddpm_core.tracking.tracker import Tracker
        from ddpm_core.storage.workspace import Workspace
        tracker = Tracker.open(
            params.validate({{"tracking": {{"uri": ""}}}}), Workspace.open({str(tmp_path)!r})
        )
        tracker.params({{"a": 1}}); tracker.tags({{}}); tracker.metrics(1, {{"a": 1.0}})
        tracker.artifact(Path("x")); tracker.close()
        assert "mlflow" not in sys.modules and "torch" not in sys.modules
        assert threading.active_count() == 1
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False)
    assert done.returncode == 0


def test_a_missing_mlflow_is_a_warning_that_names_the_extra(tmp_path: Path) -> None:
    code = f"""
        import sys
        sys.modules["mlflow"] = None  # as if it were not installed
        from ddpm_core.config import load as params
        from ddpm_core.tracking.tracker import Tracker
        from ddpm_core.storage.workspace import Workspace
        tracker = Tracker.open(params.validate({{}}), Workspace.open({str(tmp_path)!r}))
        tracker.metrics(1, {{"a": 1.0}})
        tracker.close()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], check=True, capture_output=True, text=True
    )
    assert done.stderr.count("\n") == 1
    assert "pip install 'ddpm-core[tracking]'" in done.stderr


# Small parts


def test_a_half_written_line_waits_for_its_rest(tmp_path: Path) -> None:
    log = Log(tmp_path / LOG)
    assert log.peek() == ([], 0)
    log.path.write_bytes(b'{"step": 1, "loss": 2.0, "time": 3}\n{"step": 2, "lo')
    rows, end = log.peek()
    assert [(row.step, row.values, row.milliseconds) for row in rows] == [(1, {"loss": 2.0}, 3000)]
    log.offset = end
    assert log.peek() == ([], end)
    with log.path.open("ab") as file:
        file.write(b'ss": 1.5, "time": 4}\nnot json\n[]\n{"step": 3, "time": 5}\n')
    assert [row.step for row in log.peek()[0]] == [2, 3]


def test_nested_params_are_flattened() -> None:
    given = {"train": {"loss": {"kind": "l2"}, "ema": [0.9]}, "seed": 0, "none": None}
    assert flatten(given) == {
        "train.loss.kind": "l2",
        "train.ema": "[0.9]",
        "seed": "0",
        "none": "null",
    }


def test_a_password_in_a_uri_is_masked() -> None:
    assert masked("https://me:secret@host:5000/x") == "https://***@host:5000/x"
    assert masked("https://TOKEN:x-oauth-basic@host/r.git") == "https://***@host/r.git"
    assert masked("sqlite:////a/b.db") == "sqlite:////a/b.db"
    assert masked("from s3://u:p@ss and http://h:80/x") == "from s3://u:***@ss and http://h:80/x"


def test_an_error_message_of_mlflow_contains_no_password(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    """MLflow's message contains the whole address if the server hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=hang_up, args=(listener,), daemon=True).start()
        place = f"127.0.0.1:{listener.getsockname()[1]}"
        Tracker.open(config(f"http://me:secret@{place}"), workspace).close()
        listener.shutdown(socket.SHUT_RDWR)
    output = capsys.readouterr().err
    assert f"API request to http://***@{place}/api" in output and "secret" not in output


def hang_up(listener: socket.socket) -> None:
    """Close every connection after its first bytes, until the listener is shut down."""
    with suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)


def test_a_long_message_is_masked_before_it_is_cut() -> None:
    output = reason(Exception("x" * 280 + " https://me:a-long-secret@host/api"))
    assert len(output) <= 300 and "secre" not in output


def test_an_unknown_host_name_is_reported(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    Tracker.open(config("http://no-such-host.invalid:5000"), workspace).close()
    output = capsys.readouterr().err
    assert "is unavailable: the host name is unknown. The command continues" in output


@pytest.mark.parametrize(
    "message",
    [
        "Allowed hosts must not resolve to other names.",
        "The tag was refused: it is too long.",
        "Param train.timeout has another value.",
    ],
)
def test_other_messages_of_a_server_are_unchanged(message: str) -> None:
    assert reason(Exception(message)) == message
