"""Downloads over HTTP from a server that fails at first."""

from __future__ import annotations

import http.server
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from ddpm_core.errors import Corrupt
from ddpm_core.storage import web

Server = tuple[str, list[int]]


@pytest.fixture
def server() -> Iterator[Server]:
    """The address of a server, and the statuses of its next responses; then it sends 200."""
    statuses: list[int] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(statuses.pop(0) if statuses else 200)
            self.end_headers()
            self.wfile.write(b"content")

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}/", statuses
        running.shutdown()


def reader(address: str, found: list[bytes]) -> Callable[[], None]:
    def download() -> None:
        with urllib.request.urlopen(address) as response:
            found.append(response.read())

    return download


def test_a_download_is_repeated_after_a_server_error(server: Server) -> None:
    address, statuses = server
    statuses += [503]
    found: list[bytes] = []
    web.fetch(reader(address, found))
    assert found == [b"content"] and not statuses


def test_a_download_is_not_repeated_after_a_refusal(server: Server) -> None:
    address, statuses = server
    statuses += [404, 200]
    with pytest.raises(urllib.error.HTTPError, match="404"):
        web.fetch(reader(address, []))
    assert statuses == [200]


def test_a_corrupt_download_is_repeated_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "PAUSE", 0.01)
    calls = []

    def download() -> None:
        calls.append(len(calls))
        raise Corrupt("wrong checksum")

    with pytest.raises(Corrupt):
        web.fetch(download)
    assert calls == [0, 1, 2]
