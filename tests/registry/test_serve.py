"""`ddpm serve`: its champion, the change to the next one, invalid requests, and outages."""

from __future__ import annotations

import json
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from mlflow.exceptions import MlflowException
from starlette.testclient import TestClient
from support.mlflow_server import shared_server, wait_until
from support.models import write_checkpoint
from support.program import Program, ddpm, start
from support.s3_server import Gate
from support.served_models import SHAPES, address, ask, assert_same_images, drawn, get, publish

from ddpm_core.checkpoint import Checkpoint
from ddpm_core.config import Config
from ddpm_core.errors import UserError
from ddpm_core.registry.answering import Limits
from ddpm_core.registry.current import CurrentChampion, Loaded
from ddpm_core.registry.models import Registry
from ddpm_core.registry.request import Task, parse, resolve
from ddpm_core.registry.server import application
from ddpm_core.registry.serving import Shot

ROW = {
    "step": 4,
    "score_name": "fid",
    "score": 12.5,
    "evidence": {
        "count": 20,
        "data": "feed",
        "extractor_fingerprint": "e",
        "sampler": {"steps": 5},
    },
}


@dataclass
class Serving:
    """A running `ddpm serve`, its connection to MLflow, and two versions."""

    process: Program
    url: str
    gate: Gate
    registry: Registry
    versions: list[Any]
    checkpoints: list[Checkpoint]
    temporary: Path

    def get(self, path: str) -> tuple[int, Any]:
        return get(f"{self.url}/{path}")

    def ask(self, body: Any) -> tuple[int, Any]:
        return ask(f"{self.url}/invocations", body)

    def takes(self, number: int) -> None:
        """Make a version the champion and wait until it is served."""
        self.registry.promote(self.versions[number - 1])
        self.answers_with(number)

    def answers_with(self, number: int) -> None:
        wait_until(
            lambda: self.get("version")[1].get("version") == str(number),
            f"version {number} answers",
        )

    def says(self, words: str) -> None:
        """Wait until /ready gives a certain reason why the newest champion is not served."""
        wait_until(lambda: words in self.get("ready")[1]["message"], f"/ready says {words!r}")


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Started while MLflow is unavailable; ready with its first champion."""
    folder = tmp_path_factory.mktemp("serve")
    server = shared_server().running()
    checkpoints = [write_checkpoint(folder / f"step-{seed}", seed=seed) for seed in (1, 2)]
    gate = Gate(server.uri)
    gate.shut()
    (folder / "tmp").mkdir()
    process = start(
        folder, "serve", "--port", "0", "--every", "0.2", "-S", f"tracking.uri={gate.endpoint}",
        "-S", "register.name=champions", TMPDIR=str(folder / "tmp"),
    )  # fmt: skip
    try:
        url = address(process)
        serving = Serving(process, url, gate, None, [], checkpoints, folder / "tmp")
        begin(serving, server.uri, folder)
        yield serving
    finally:
        process.send_signal(signal.SIGKILL)


def begin(serving: Serving, uri: str, folder: Path) -> None:
    """Check the reasons and responses without MLflow, without a champion, and with one."""
    assert get(f"{serving.url}/health")[0] == get(f"{serving.url}/ping")[0] == 200
    serving.says("is unavailable: the connection was refused")
    serving.gate.open()
    serving.says("champions has no version with the alias 'champion'")
    assert serving.get("ready")[0] == serving.get("version")[0] == 503
    status, message = serving.ask({"inputs": [{"n": 1}]})
    assert (status, "has no version" in message) == (503, True)
    for number, checkpoint in enumerate(serving.checkpoints, 1):
        package = folder / f"package-{number}"
        serving.registry, version = publish(
            uri, "champions", checkpoint, package, row=json.dumps(ROW)
        )
        serving.versions.append(version)
    serving.registry.promote(serving.versions[0])
    wait_until(lambda: serving.get("ready")[0] == 200, "it is ready")


def test_the_champion_draws_the_same_images_as_sampling(serving: Serving) -> None:
    serving.takes(1)
    status, predictions = serving.ask({"dataframe_records": [{"n": 3}]})
    assert status == 200
    assert_same_images(predictions, drawn(serving.checkpoints[0], 3))
    assert serving.get("version") == (
        200,
        {"name": "champions", "alias": "champion", "version": "1", **ROW},
    )


def test_all_forms_of_a_request_get_the_same_response(serving: Serving) -> None:
    serving.takes(1)
    results = [serving.ask(body) for body in SHAPES]
    assert all(result == results[0] for result in results)
    assert (results[0][0], len(results[0][1])) == (200, 2)


@pytest.mark.parametrize(
    ("body", "status", "expected"),
    [
        ({"inputs": [{"n": 0}]}, 400, "n: got 0; must be"),
        ({"inputs": [{"seed": 0}]}, 400, "n: missing (required)"),
        (
            {"inputs": [{"n": 1, "smapler": "ddim"}]},
            400,
            "smapler: unknown key; did you mean sampler?",
        ),
        ({"inputs": [1]}, 400, "inputs: invalid table"),
        (b'{"inputs": [{"n": 1, "\\ud800": 1}]}', 400, "\\ud800: unknown key; known keys: n, seed"),
        (b'{"inputs": [{"n": 1, "prompt": "\\ud800"}]}', 400, "prompt: got '\\ud800'; must be"),
        (b'{"inputs": [{"n": ' + b"[" * 900 + b"]" * 900 + b"}]}", 400, "n: got "),
        (b'{"inputs": [{"n": ' + b"9" * 4000 + b"}]}", 400, "n: got 999"),
        ({"inputs": {"n": [1], "seed": []}}, 400, "inputs: invalid table"),
        ({"dataframe_split": {"columns": ["n"], "data": [[]]}}, 400, "invalid table"),
        ({"inputs": [{"n": 1}], "params": {}}, 400, "exactly one of"),
        (
            {"rows": 1},
            400,
            "must be a JSON object with exactly one of dataframe_records, dataframe_split",
        ),
        (b"{", 400, "The request is not valid JSON: Expecting property name"),
        (b"[" * 100_000, 400, "The request is not valid JSON"),
        (b"\xff", 400, "The request is not valid JSON"),
        (b" " * (2**20 + 1), 413, "larger than 262,144 bytes"),
    ],
)
def test_an_invalid_request_gets_a_short_message(
    serving: Serving, body: Any, status: int, expected: str
) -> None:
    actual, message = serving.ask(body)
    assert (actual, expected in message) == (status, True), message
    assert len(message) <= 500
    assert "Traceback" not in message


@pytest.mark.parametrize("kind", ["text/csv", "application/jsonl", "text/html; charset=utf-8"])
def test_only_json_is_accepted(serving: Serving, kind: str) -> None:
    asked = urllib.request.Request(f"{serving.url}/invocations", b"n\n1\n", {"Content-Type": kind})
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(asked, timeout=60)
    message = json.load(raised.value)["message"]
    assert (raised.value.code, message) == (415, "Content-Type must be application/json.")


def test_the_next_champion_takes_over_without_a_lost_request(serving: Serving) -> None:
    serving.takes(1)
    answers: list[tuple[int, Any]] = []
    done = threading.Event()

    def keep_asking() -> None:
        while not done.is_set():
            answers.append(serving.ask({"inputs": [{"n": 2}]}))

    asking = threading.Thread(target=keep_asking)
    asking.start()
    try:
        wait_until(lambda: answers, "a first answer")
        serving.takes(2)
        after = len(answers) + 2
        wait_until(lambda: len(answers) > after, "answers of the new champion")
    finally:
        done.set()
        asking.join()
    assert {status for status, _ in answers} == {200}
    assert_same_images(answers[0][1], drawn(serving.checkpoints[0], 2))
    assert_same_images(answers[-1][1], drawn(serving.checkpoints[1], 2))
    kinds = [images[0]["image"] for _, images in answers]
    assert len([1 for before, after in pairwise(kinds) if before != after]) == 1


def test_many_clients_at_once_get_their_own_images(serving: Serving) -> None:
    serving.takes(1)
    with ThreadPoolExecutor(64) as clients:
        answers = list(
            clients.map(lambda seed: serving.ask({"inputs": {"n": 1, "seed": seed}}), range(64))
        )
    assert {status for status, _ in answers} == {200}
    for seed in (0, 31, 63):
        expected = drawn(serving.checkpoints[0], 1, seed=seed)
        assert_same_images(answers[seed][1], expected)


def test_an_outage_or_a_damaged_version_does_not_stop_serving(
    serving: Serving,
) -> None:
    serving.takes(1)
    serving.gate.shut()
    serving.says("is unavailable")
    weights = (serving.checkpoints[1].folder / "ema-0.9.safetensors").read_bytes()
    [stored] = [
        path
        for path in shared_server().root.rglob("ema-0.9.safetensors")
        if path.read_bytes() == weights
    ]
    stored.write_bytes(weights[:-1] + b"?")
    serving.registry.promote(serving.versions[1])
    assert serving.get("ready")[0] == 200
    serving.gate.open()
    serving.says("ema-0.9.safetensors")
    assert serving.get("version")[1]["version"] == "1"
    _, predictions = serving.ask({"inputs": [{"n": 1}]})
    assert_same_images(predictions, drawn(serving.checkpoints[0], 1))
    stored.write_bytes(weights)
    serving.answers_with(2)
    serving.says("")
    assert serving.process.said().count("Still serving version 1.") == 2
    assert list(serving.temporary.iterdir()) == []


def test_sigterm_ends_an_idle_server_at_once(serving: Serving) -> None:
    serving.process.send_signal(signal.SIGTERM)
    output = serving.process.ended(10)
    assert serving.process.returncode == 0, output
    unexpected = [line for line in output.splitlines() if "serve: " not in line]
    assert not unexpected  # no traceback, and no advice from MLflow


def test_an_unavailable_address_is_an_error(tmp_path: Path) -> None:
    output = ddpm(tmp_path, "serve", "--host", "192.0.2.1", status=1)
    assert "ddpm serve: Cannot listen on --host 192.0.2.1 --port 8080" in output
    output = ddpm(tmp_path, "serve", "-S", "tracking.uri=''", status=1)
    assert "the champion is stored in MLflow" in output


# Errors


class FailingModel:
    """Validates requests, but cannot draw any image."""

    batch_size = 64

    def tasks(self, rows: list[dict[str, Any]], max_work: int = 0) -> list[Task]:
        return [resolve(parse(row), Config(), []) for row in rows]

    def images(self, tasks: list[Task]) -> Iterator[dict[str, Any]]:
        return iter(self.draw([]))

    def draw(self, shots: list[Shot], on_step: Any = None) -> list[dict[str, Any]]:
        raise UserError("1 of 1 images are not finite.")


FAILURES = [({"n": 0}, 400, "n: got 0; must be"), ({"n": 1}, 500, "Drawing failed")]


@pytest.mark.parametrize(("row", "status", "expected"), FAILURES)
def test_a_valid_request_that_fails_is_a_server_error(
    row: dict[str, Any], status: int, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    champion = CurrentChampion(Config())
    champion.loaded = Loaded(("1", 0), cast(Any, FailingModel()), {"version": "1"})
    client = TestClient(
        application(champion, Limits(work=10**9, waiting=1, timeout=1.0, seconds=60.0))
    )
    response = client.post("/invocations", json={"inputs": [row]})
    assert (response.status_code, expected in response.json()["message"]) == (status, True)
    assert ("1 of 1 images are not finite" in capsys.readouterr().err) == (status == 500)


@pytest.mark.parametrize(("row", "status", "expected"), FAILURES)
def test_mlflows_server_responds_with_the_same_status(
    row: dict[str, Any], status: int, expected: str
) -> None:
    from ddpm_core.registry.served import Model

    model = Model()
    model._served = FailingModel()
    with pytest.raises(MlflowException, match=expected) as raised:
        model.predict(None, [row])
    assert raised.value.get_http_status_code() == status
