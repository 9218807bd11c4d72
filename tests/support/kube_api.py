"""A small API server over HTTP: a namespace with at most one job and its pod."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from ddpm_kube.backends import BACKENDS, Backend

ROUND = 0.2  # seconds of a watch
CREATED = "2026-01-01T00:00:00Z"
Plain = dict[str, Any]


class Api(ThreadingHTTPServer):
    """`job` is the created job, `asked` counts the requests by kind, such as "watch pods".

    `status(request, number)` returns the HTTP status for the n-th request of a kind; 0: the server
    breaks the connection. `backend` is the kind of jobs that the server has, `state` the state of
    the job, `conditions` are those of its pod; `slow` is how many seconds it takes to create a job.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.backend: Backend = BACKENDS["pytorchjob"]
        self.job: Plain | None = None
        self.state, self.message, self.slow = "Running", "It runs.", 0.0
        self.conditions: list[Plain] = []
        self.asked: Counter[str] = Counter()
        self.status: Callable[[str, int], int] = lambda request, number: 200

    def handle_error(self, *_: object) -> None:
        """Ignore clients that have disconnected."""

    def make(self, job: Plain) -> Plain:
        job["metadata"] |= {"uid": "u-1", "resourceVersion": "1", "creationTimestamp": CREATED}
        self.job = job
        return job

    def listed(self, kind: str) -> list[Plain]:
        if self.job is None or kind == "events":
            return []
        self.job["status"] = job_status(self.backend.name, self.state, self.message)
        if kind == self.backend.plural:
            return [self.job]
        return [worker(self.backend, self.job["metadata"]["name"], self.conditions)]


def job_status(backend: str, state: str, message: str) -> Plain:
    """Return the status of a job as its controller writes it."""
    if backend == "pytorchjob":
        return {"conditions": [{"type": state, "status": "True", "message": message}]}
    status: Plain = {"jobsStatus": [{"name": "node", "ready": int(state == "Running")}]}
    if state in ("Succeeded", "Failed"):  # a TrainJob that runs has no condition
        kind = {"Succeeded": "Complete"}.get(state, state)
        moment = {"lastTransitionTime": CREATED}
        status["conditions"] = [{"type": kind, "status": "True", "message": message, **moment}]
    return status


def worker(backend: Backend, job: str, conditions: list[Plain]) -> Plain:
    """Return a running pod; with conditions, one that is pending."""
    name = f"{job}-worker-0" if backend.name == "pytorchjob" else f"{job}-node-0-0-x7k2p"
    status = {"name": backend.container, "state": {"running": {}}}
    waiting = {"phase": "Pending", "conditions": conditions}
    return {
        "metadata": {"name": name, "uid": "p-1", "resourceVersion": "1"},
        "spec": {"containers": [{"name": backend.container, "image": "ddpm:dev"}]},
        "status": waiting if conditions else {"phase": "Running", "containerStatuses": [status]},
    }


class _Handler(BaseHTTPRequestHandler):
    server: Api
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def do_POST(self) -> None:
        body = json.loads(self._body())
        self.server.asked["making"] += 1
        time.sleep(self.server.slow)
        if not self._allowed("create"):
            return
        if self.server.job:
            self._answer(409, {"message": "exists"})
        else:
            self._answer(201, self.server.make(body))

    def do_DELETE(self) -> None:
        self._body()
        if self._allowed("delete"):
            self.server.job = None
            self._answer(200, {})

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        backend = self.server.backend
        if path.startswith("/apis/") and path.count("/") == 3:  # which resources a group has
            there = path == f"/apis/{backend.group}/{backend.version}"
            resources = [{"name": backend.plural}]
            self._answer(200, {"resources": resources}) if there else self._answer(404, {})
            return
        kind = next(k for k in (backend.plural, "pods", "events") if f"/{k}" in path)
        if not path.endswith(kind):
            if self._allowed(f"get {kind}"):
                missing = {"message": f"{kind} not found"}
                self._answer(200 if self.server.job else 404, self.server.job or missing)
        elif "watch=True" in query:
            if self._allowed(f"watch {kind}"):
                self._watched(kind)
        elif self._allowed(f"list {kind}"):
            listed = {"metadata": {"resourceVersion": "1"}, "items": self.server.listed(kind)}
            self._answer(200, listed)

    def _allowed(self, request: str) -> bool:
        self.server.asked[request] += 1
        status = self.server.status(request, self.server.asked[request])
        if status == 0:
            self.close_connection = True
        elif status != 200:
            self._answer(status, {"message": f"{request}: no"})
        return status == 200

    def _watched(self, kind: str) -> None:
        """Answer a watch, which sends the present state at its end."""
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        time.sleep(ROUND)
        for thing in self.server.listed(kind):
            line = json.dumps({"type": "MODIFIED", "object": thing}).encode() + b"\n"
            self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        self.wfile.write(b"0\r\n\r\n")

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, status: int, document: Plain) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def api_server(kubeconfig: Path) -> Iterator[Api]:
    """Run the server, and write a kubeconfig for it."""
    with Api() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        context = {"cluster": "here", "user": "me", "namespace": "ddpm"}
        url = f"http://127.0.0.1:{server.server_address[1]}"
        settings = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "mine",
            "contexts": [{"name": "mine", "context": context}],
            "clusters": [{"name": "here", "cluster": {"server": url}}],
            "users": [{"name": "me", "user": {}}],
        }
        kubeconfig.write_text(yaml.safe_dump(settings), encoding="utf-8")
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
