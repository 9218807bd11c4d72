"""`ddpm serve` with clients that leave, stall, ask for too much or send nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from support.mlflow_server import put_store, wait_until
from support.models import write_checkpoint
from support.program import Program, start
from support.served_models import address, ask, get, publish

from ddpm_core.runtime.connection import MAX_CONNECTIONS, Connection

TIMEOUT = 2.0  # of the server, seconds
WAITING = 2  # requests that may wait
WORK = 256 * 64 * 600  # the largest request: 256 images of 8x8 pixels in 600 steps

LONG = {"inputs": [{"n": 256, "steps": 600}]}  # takes minutes
LARGE = 2**25  # bytes
SHORT = {"inputs": [{"n": 1, "steps": 1}]}


@dataclass
class Serving:
    """A running `ddpm serve` with a champion."""

    process: Program
    url: str

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def ask(self, body: Any) -> tuple[int, Any]:
        return ask(f"{self.url}/invocations", body)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def send(self, body: Any, rest: bytes = b"") -> socket.socket:
        """Return a connection on which a request was sent, and no response read."""
        connection = self.connect()
        connection.sendall(request(json.dumps(body).encode()) + rest)
        return connection

    def is_busy(self) -> bool:
        """Return whether a request has to wait, because another one is being drawn."""
        with contextlib.closing(self.send(SHORT)) as connection:
            return not early(connection)

    def fill(self) -> tuple[list[socket.socket], bytes]:
        """Send long requests until one is rejected; return the others and that response."""
        wait_until(lambda: self.ask(SHORT)[0] == 200, "the queue is empty")
        taken = []
        while not (refused := early(connection := self.send(LONG))):
            taken.append(connection)
        connection.close()
        return taken, refused

    def sockets(self) -> int:
        """Return how many sockets the server has open."""
        folder = Path(f"/proc/{self.process.pid}/fd")
        return sum(target(link).startswith("socket:") for link in folder.iterdir())

    def seconds(self) -> float:
        """Return the CPU seconds that the server has used."""
        stat = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> int:
        """Return the resident memory of the server in bytes."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


def target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""


def request(body: bytes, headers: str = "", path: str = "/invocations") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{headers}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def answer(connection: socket.socket) -> bytes:
    """Return everything until the server closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(2**16):
            data += part
    return data


def early(connection: socket.socket) -> bytes:
    """Return what arrives within a second: nothing while a request waits or is drawn."""
    connection.settimeout(1)
    try:
        return connection.recv(2**12)
    except TimeoutError:
        return b""
    finally:
        connection.settimeout(30)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("limits")
    uri = put_store(folder / "mlflow.db")
    checkpoint = write_checkpoint(folder / "step", timesteps=1000)
    cwd = Path.cwd()
    os.chdir(folder)  # MLflow puts the artifacts of such a store into the current folder
    try:
        registry, version = publish(uri, "champions", checkpoint, folder / "package")
    finally:
        os.chdir(cwd)
    registry.promote(version)
    process = start(
        folder, "serve", "--port", "0", "--every", "60", "--timeout", str(TIMEOUT),
        "--queue", str(WAITING), "--max-work", str(WORK),
        "-S", f"tracking.uri={uri}", "-S", "register.name=champions",
    )  # fmt: skip
    try:
        serving = Serving(process, address(process))
        wait_until(lambda: get(f"{serving.url}/ready")[0] == 200, "it is ready", 120)
        yield serving
    finally:
        process.send_signal(signal.SIGKILL)


@pytest.fixture
def printed(serving: Serving) -> Iterator[Any]:
    """A function that returns what the server printed during the test; no traceback."""
    before = len(serving.process.said())
    yield lambda: serving.process.said()[before:]
    assert "Traceback" not in serving.process.said()


@pytest.mark.parametrize("rest", [b"", request(b"{}"), b"\r\nnonsense"])
def test_drawing_stops_when_its_client_leaves(serving: Serving, printed: Any, rest: bytes) -> None:
    """That includes clients that sent something after their request."""
    connection = serving.send(LONG)
    wait_until(serving.is_busy, "the request is drawn")
    connection.sendall(rest)
    connection.close()
    started = time.monotonic()
    status, images = serving.ask(SHORT)
    assert (status, len(images)) == (200, 1)
    assert time.monotonic() - started < 20
    assert "a client left before its images were drawn" in printed()


def test_previews_stop_when_their_client_leaves(serving: Serving, printed: Any) -> None:
    body = json.dumps({"n": 256, "steps": 600, "previews": True}).encode()
    with contextlib.closing(serving.connect()) as connection:
        connection.sendall(request(body, path="/generate"))
        data = b""
        while b'"previews"' not in data:
            data += connection.recv(2**16)
    started = time.monotonic()
    status, images = serving.ask(SHORT)
    assert (status, len(images)) == (200, 1)
    assert time.monotonic() - started < 20
    assert printed() == ""


def test_the_queue_is_bounded_and_drops_clients_that_left(serving: Serving) -> None:
    (first, *waiting), refused = serving.fill()
    assert refused.startswith(b"HTTP/1.1 429 ")
    assert b"retry-after: 5\r\n" in refused.lower()
    assert len(waiting) == WAITING
    assert get(f"{serving.url}/health")[0] == get(f"{serving.url}/ready")[0] == 200
    for connection in waiting:
        connection.close()
    with contextlib.closing(serving.send(SHORT)) as last:
        assert not early(last)  # it is in the queue, and waits for the first
        first.close()
        assert last.recv(12) == b"HTTP/1.1 200"


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (
            [{"n": 256, "steps": 601}],
            "needs 9,846,784 images x pixels x evaluations; at most 9,830,400",
        ),
        ([{"n": 1}] * 257, "has 257 rows; at most 256 are allowed"),
        ([{"n": 128}, {"n": 129}], "asks for 257 images; 1 to 256 images of 64 pixels"),
        ([], "asks for 0 images"),
    ],
)
def test_the_size_of_a_request_is_limited(serving: Serving, rows: list[Any], expected: str) -> None:
    status, message = serving.ask({"inputs": rows})
    assert (status, expected in message) == (400, True), message


def test_half_sent_headers_do_not_lock_out_other_clients(serving: Serving, printed: Any) -> None:
    with contextlib.ExitStack() as stack:
        halves = []
        for _ in range(700):
            half = stack.enter_context(contextlib.closing(serving.connect()))
            half.sendall(b"POST /invocations HTTP/1.1\r\nHost: x\r\n")
            halves.append(half)
            if len(halves) == 400:
                assert get(f"{serving.url}/health")[0] == 200
        assert get(f"{serving.url}/health")[0] == 200
        assert serving.sockets() < MAX_CONNECTIONS + 20
        started = time.monotonic()
        answers = [answer(half) for half in halves]
        assert time.monotonic() - started < TIMEOUT + 5
        # The oldest made room for the others; these had their time, and got status 408.
        assert (
            len([one for one in answers if one.startswith(b"HTTP/1.1 408 ")])
            >= MAX_CONNECTIONS - 10
        )
    assert printed() == ""


def test_unfinished_bodies_cost_little_memory_and_one_log_line(
    serving: Serving, printed: Any
) -> None:
    head = request(b"x" * 2**18)[:-1]
    before = serving.memory()
    with contextlib.ExitStack() as stack:
        halves = [stack.enter_context(contextlib.closing(serving.connect())) for _ in range(200)]
        for half in halves:
            half.sendall(head)
        halves[0].close()
        wait_until(lambda: printed().count("\n") == 1, "the client that left is logged")
        assert serving.memory() - before < 150 * 2**20
        assert {answer(half)[:12] for half in halves[1:]} == {b"HTTP/1.1 408"}
    wait_until(lambda: printed().count("\n") == 200, "each unfinished body is logged")
    assert set(printed().splitlines()) == {"serve: a client left before its request was complete."}


@pytest.mark.parametrize("line", ["POST /invocations", "GET /health"])
def test_a_trickling_body_is_closed(serving: Serving, line: str) -> None:
    """That includes requests that got a response without their body."""
    with contextlib.closing(serving.connect()) as connection:
        connection.sendall(f"{line} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n".encode())
        started = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - started < 4 * TIMEOUT:
                connection.sendall(b" ")
                time.sleep(0.05)
        assert time.monotonic() - started < 3 * TIMEOUT


@pytest.mark.parametrize(("fields", "status"), [(15_000, 400), (50_000, 413)])
def test_unknown_fields_are_rejected_quickly(
    serving: Serving, printed: Any, fields: int, status: int
) -> None:
    row = {"n": 1, **{f"field{number}": 1 for number in range(fields)}}
    before = serving.seconds()
    actual, message = serving.ask({"dataframe_records": [row]})
    assert serving.seconds() - before < 0.5
    assert (actual, len(message) < 500) == (status, True), message[:600]
    assert printed() == ""


def test_a_request_with_two_lengths_is_rejected(serving: Serving) -> None:
    body = b'1e\r\n{"inputs":[{"n":1,"steps":1}]}\r\n0\r\n\r\n'
    with contextlib.closing(serving.connect()) as connection:
        connection.sendall(request(body, "Transfer-Encoding: chunked\r\n"))
        response = answer(connection)
    assert response.startswith(b"HTTP/1.1 400 ")
    assert b"both Transfer-Encoding and Content-Length" in response


async def large_answer(scope: Any, receive: Any, send: Any) -> None:
    """Respond with LARGE bytes times the number in the path."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"x" * LARGE * int(scope["path"][1:])})


@contextlib.contextmanager
def answering(timeout: float) -> Iterator[tuple[uvicorn.Server, socket.socket]]:
    """Yield a real server that uses Connection and large responses, and a client of it."""
    protocol: Any = partial(Connection, timeout=timeout)
    config = uvicorn.Config(large_answer, http=protocol, ws="none", lifespan="off")
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    try:
        with socket.create_connection(listener.getsockname(), timeout=30) as client:
            yield server, client
    finally:
        server.should_exit = True
        thread.join()


def get_large(client: socket.socket, times: int = 1) -> None:
    client.sendall(f"GET /{times} HTTP/1.1\r\nHost: x\r\n\r\n".encode())


def read_large(client: socket.socket, times: int = 1, pause: float = 0.0) -> None:
    """Read one response, which is larger than the kernel's buffers."""
    received = 0
    while received < LARGE * times:
        part = client.recv(2**20)
        assert part, "the server closed"
        received += len(part)
        time.sleep(pause)


def test_a_response_that_is_not_read_is_dropped() -> None:
    with answering(0.5) as (server, client):
        get_large(client)
        assert client.recv(8) == b"HTTP/1.1"
        wait_until(lambda: not server.server_state.connections, "it is closed", 10)
        assert len(answer(client)) < LARGE


def test_a_response_that_is_read_slowly_arrives() -> None:
    with answering(0.5) as (_, client):
        started = time.monotonic()
        get_large(client)
        read_large(client, pause=0.03)
        assert time.monotonic() - started > 0.5


def test_each_response_of_a_connection_has_a_new_deadline() -> None:
    with answering(2) as (_, client):
        started = time.monotonic()
        get_large(client)
        read_large(client)
        time.sleep(max(0.0, started + 1.5 - time.monotonic()))
        get_large(client, times=2)
        time.sleep(0.8)  # past the deadline of the first response
        read_large(client, times=2)


def test_sigterm_waits_only_for_complete_requests(serving: Serving) -> None:
    """This is the last test: it stops the server."""
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(
            contextlib.closing(serving.send({"inputs": [{"n": 64, "steps": 300}]}))
        )
        for part in (b"POST /inv", request(b"x" * 9)[:-1]):
            half = stack.enter_context(contextlib.closing(serving.connect()))
            half.sendall(part)
        wait_until(serving.is_busy, "the request is drawn")
        serving.process.send_signal(signal.SIGTERM)
        assert answer(connection).startswith(b"HTTP/1.1 200 ")
        output = serving.process.ended(TIMEOUT + 10)
        assert serving.process.returncode == 0
        assert "Traceback" not in output
