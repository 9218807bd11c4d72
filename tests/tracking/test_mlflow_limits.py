"""MLflow calls end in time, and what fails around MLflow is one message."""

from __future__ import annotations

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
from ddpm_core.evaluation.shared import Unavailable, fetch_extractor
from ddpm_core.registry import models
from ddpm_core.registry.models import Registry, lost
from ddpm_core.storage.workspace import Workspace
from ddpm_core.tracking import client as mlflow_client
from ddpm_core.tracking.client import connect, within
from ddpm_core.tracking.tracker import Tracker
from ddpm_core.wording import counted, sentence

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n"


@pytest.fixture
def trickling() -> Iterator[str]:
    """The URI of a server that begins an answer and then sends ten bytes a second."""

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
    with pytest.raises(UserError, match="cannot be used: it does not answer in time"):
        Registry(config(uri))


def ask_extractor(uri: str, folder: Path) -> None:
    with pytest.raises(Unavailable, match="it does not answer in time"):
        fetch_extractor(config(uri), "data", folder)


def ask_status(uri: str, folder: Path) -> None:
    record = {"uri": uri, "name": "ddpm", "version": "1", "weights": "", "promoted": False}
    assert lost({**record, "alias": "champion"}) is None


def track(uri: str, folder: Path) -> None:
    tracker = Tracker.open(config(uri), Workspace.open(str(folder)))
    wait_until(lambda: tracker._outage.on, "the outage is noticed", 20)
    assert tracker.trouble == "it does not answer in time."
    tracker.close(timeout=1)


@pytest.mark.parametrize("ask", [ask_registry, ask_extractor, ask_status, track])
def test_a_trickling_server_holds_up_no_call(
    trickling: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ask: Callable[[str, Path], None],
) -> None:
    connect("http://127.0.0.1:1")  # the import takes seconds
    monkeypatch.setattr(mlflow_client, "CALL_LIMIT", 1.0)
    monkeypatch.setattr(models, "PATIENCE", 1.0)
    started = time.monotonic()
    ask(trickling, tmp_path)
    assert time.monotonic() - started < 20


def test_within_passes_results_and_errors_on() -> None:
    assert within(20, divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        within(20, divmod, 7, 0)


def test_a_timeout_of_the_environment_raises_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert connect("http://127.0.0.1:1")._limit == 30
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "50")
    assert connect("http://127.0.0.1:1")._limit == 150


def test_a_user_without_name_and_home_trains_without_noise(tmp_path: Path) -> None:
    store, scratch = f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "scratch"
    scratch.mkdir()
    write_params(tmp_path, TINY.replace('uri: ""', f"uri: {store}"))
    quiet = {"OMP_NUM_THREADS": "1", "TMPDIR": str(scratch), **QUIET}
    said = ""
    for verb in ("prepare", "train"):
        done = subprocess.run(
            as_nameless(command(verb), **quiet),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        said += done.stdout
        assert done.returncode == 0, said
    assert "train: 12/12 steps" in said
    assert "Traceback" not in said and "warning" not in said.lower(), said
    client = connect(store)
    place = client.get_experiment_by_name("ddpm").experiment_id
    [run] = client.search_runs([place])
    assert run.data.tags["mlflow.user"] == "uid-54321"
    assert run.data.metrics["train/loss"] > 0
    assert not list(scratch.glob("ddpm-home-*"))


def test_a_failing_import_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_at_home.py").write_text("raise RuntimeError('no home directory')\n")
    (tmp_path / "needs_another.py").write_text("import not_there_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError) as told:
        require("broken_at_home", "tracking")
    assert str(told.value) == (
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
def test_nouns_are_counted(number: int, noun: str, expected: str) -> None:
    assert counted(number, noun) == expected


def test_a_sentence_ends_once() -> None:
    assert [sentence(text) for text in ("gone", "gone.", "gone?\n")] == ["gone.", "gone.", "gone?"]
