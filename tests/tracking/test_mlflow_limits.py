"""Time limits and retries of MLflow calls, and errors around MLflow."""

from __future__ import annotations

import errno
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.mlflow_server import QUIET, wait_until
from support.namespaces import as_nameless
from support.program import TINY, command, write_params

from ddpm_core.config import Config
from ddpm_core.config import load as params
from ddpm_core.errors import UserError, require
from ddpm_core.evaluation.shared import Unavailable, extractors_experiment, fetch_extractor
from ddpm_core.registry import models
from ddpm_core.registry.models import Registry, missing
from ddpm_core.storage.workspace import Workspace
from ddpm_core.text import counted, sentence
from ddpm_core.tracking import client as mlflow_client
from ddpm_core.tracking.client import connect, retrying, within
from ddpm_core.tracking.tracker import Tracker

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n"


@pytest.fixture
def trickling() -> Iterator[str]:
    """The URI of a server that begins a response and then sends ten bytes per second."""

    def trickle(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(65536)
            connection.sendall(HEAD)
            while not ended.wait(0.1):
                connection.sendall(b" ")

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=trickle, args=listener.accept()[:1], daemon=True).start()

    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        ended.set()
        listener.shutdown(socket.SHUT_RDWR)


def config(uri: str) -> Config:
    return params.validate({"tracking": {"uri": uri}})


def ask_registry(uri: str, folder: Path) -> None:
    with pytest.raises(UserError, match="is unavailable: the request timed out"):
        Registry(config(uri))


def ask_extractor(uri: str, folder: Path) -> None:
    with pytest.raises(Unavailable, match="the request timed out"):
        fetch_extractor(config(uri), "data", folder)


def ask_status(uri: str, folder: Path) -> None:
    assert missing(uri, "ddpm", "1", "", "champion") is None


def track(uri: str, folder: Path) -> None:
    tracker = Tracker.open(config(uri), Workspace.open(str(folder)))
    wait_until(lambda: tracker._outage.on, "the outage is noticed", 20)
    assert tracker.trouble == "the request timed out."
    tracker.close(timeout=1)


@pytest.mark.parametrize("ask", [ask_registry, ask_extractor, ask_status, track])
def test_a_trickling_server_delays_no_call(
    trickling: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ask: Callable[[str, Path], None],
) -> None:
    connect("http://127.0.0.1:1")  # the import takes seconds
    monkeypatch.setattr(mlflow_client, "CALL_TIMEOUT", 1.0)
    monkeypatch.setattr(models, "CHECK_TIMEOUT", 1.0)
    started = time.monotonic()
    ask(trickling, tmp_path)
    assert time.monotonic() - started < 20


def test_within_returns_results_and_raises_errors() -> None:
    assert within(20, divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        within(20, divmod, 7, 0)


def test_a_timeout_in_the_environment_raises_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert connect("http://127.0.0.1:1").timeout == 30
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "50")
    assert connect("http://127.0.0.1:1").timeout == 150


@pytest.mark.parametrize(
    ("error", "attempts"),
    [
        (ConnectionError("reset"), 2),
        (OSError(errno.ENOSPC, "No space left on device"), 2),
        (TimeoutError(), 1),
        (UserError("The experiment is deleted."), 1),
        (KeyError("a bug"), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_mlflow_calls_are_retried_once_if_that_can_help(
    error: Exception, attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_client, "PAUSE", 0.0)
    calls = []

    def call() -> None:
        calls.append(error)
        raise error

    with pytest.raises(type(error)):
        retrying()(call)
    assert len(calls) == attempts


def test_the_experiment_of_the_extractors_has_a_valid_name_too() -> None:
    longest = "e" * (256 - len("-extractors") - 1)
    given = params.validate({"tracking": {"experiment": longest}})
    assert len(extractors_experiment(given)) == 255
    with pytest.raises(UserError, match=r"tracking\.experiment"):
        params.validate({"tracking": {"experiment": f"{longest}e"}})


@pytest.mark.slow
def test_a_user_without_name_and_home_trains_without_noise(tmp_path: Path) -> None:
    store, scratch = f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "scratch"
    scratch.mkdir()
    write_params(tmp_path, TINY.replace('uri: ""', f"uri: {store}"))
    quiet = {"OMP_NUM_THREADS": "1", "TMPDIR": str(scratch), **QUIET}
    output = ""
    for verb in ("prepare", "train"):
        done = subprocess.run(
            as_nameless(command(verb), **quiet),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        output += done.stdout
        assert done.returncode == 0, output
    assert "train: 12/12 steps" in output
    assert "Traceback" not in output and "warning" not in output.lower(), output
    client = connect(store)
    place = client.get_experiment_by_name("ddpm").experiment_id
    [run] = client.search_runs([place])
    assert run.data.tags["mlflow.user"] == "uid-54321"
    assert run.data.metrics["train/loss"] > 0
    assert not list(scratch.glob("ddpm-home-*"))


def test_a_failing_import_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_at_home.py").write_text("raise RuntimeError('no home directory')\n")
    (tmp_path / "needs_another.py").write_text("import not_there_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError) as raised:
        require("broken_at_home", "tracking")
    assert str(raised.value) == (
        "The package 'broken_at_home' is installed but cannot be imported (RuntimeError: no home "
        "directory). To reinstall it: pip install --force-reinstall 'ddpm-core[tracking]'"
    )
    with pytest.raises(UserError, match="'not_there_at_all' is not installed"):
        require("needs_another", "tracking")


@pytest.mark.parametrize(
    ("number", "noun", "expected"),
    [
        (1, "row", "1 row"),
        (0, "row", "0 rows"),
        (1, "class", "1 class"),
        (1000, "class", "1,000 classes"),
        (2, "entry", "2 entries"),
        (3, "key", "3 keys"),
    ],
)
def test_counted_nouns_have_the_right_number(number: int, noun: str, expected: str) -> None:
    assert counted(number, noun) == expected


def test_a_sentence_ends_with_one_period() -> None:
    assert [sentence(text) for text in ("gone", "gone.", "gone?\n")] == ["gone.", "gone.", "gone?"]
