"""An S3 server: that of AWS_ENDPOINT_URL, otherwise moto in this process.

`Gate` is a proxy with which a test can make the server unavailable or damage its responses.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from support.program import Program, start

MOTO = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
}
NAMES = ("AWS_ENDPOINT_URL", *MOTO)


@contextlib.contextmanager
def server() -> Iterator[dict[str, str]]:
    """Yield the environment variables with which boto3 finds the server."""
    if "AWS_ENDPOINT_URL" in os.environ:
        yield {name: os.environ[name] for name in NAMES}
        return
    from moto.server import ThreadedMotoServer

    moto = ThreadedMotoServer("127.0.0.1", port=0)
    moto.start()
    host, port = moto.get_host_and_port()
    try:
        yield {"AWS_ENDPOINT_URL": f"http://{host}:{port}", **MOTO}
    finally:
        moto.stop()


class Bucket:
    """A new bucket, and the environment for processes that use it."""

    def __init__(self, environment: dict[str, str]) -> None:
        import boto3

        self.environment = environment
        self.client = boto3.client(
            "s3",
            endpoint_url=environment["AWS_ENDPOINT_URL"],
            aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
            region_name=environment["AWS_DEFAULT_REGION"],
        )
        self.name = f"runs-{uuid.uuid4().hex[:12]}"
        self.client.create_bucket(Bucket=self.name)

    def uri(self, prefix: str) -> str:
        return f"s3://{self.name}/{prefix}"

    def keys(self, prefix: str = "") -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.name, Prefix=prefix
        )
        return [item["Key"] for page in pages for item in page.get("Contents", ())]

    def read(self, key: str) -> bytes:
        return bytes(self.client.get_object(Bucket=self.name, Key=key)["Body"].read())

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=key, Body=data)

    def delete(self, key: str) -> None:
        self.client.delete_object(Bucket=self.name, Key=key)

    def enter(self, monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
        """Let this process use the server, with its local copies below `place`."""
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(tempfile, "tempdir", str(place))

    def start(self, folder: Path, *arguments: str, place: Path, **changed: str) -> Program:
        """Start `ddpm ARGUMENTS` with this server and its local copies below `place`."""
        place.mkdir(parents=True, exist_ok=True)
        environment = {**self.environment, **changed, "TMPDIR": str(place)}
        return start(folder, *arguments, **environment)

    def ddpm(self, folder: Path, *arguments: str, place: Path, status: int = 0) -> str:
        process = self.start(folder, *arguments, place=place)
        said = process.ended()
        assert process.returncode == status, said
        return said


class Gate:
    """A proxy to a server. When it is shut, connections break and new ones are refused."""

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        self._target = (parts.hostname or "", parts.port or 80)
        self._open: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self._port = 0
        self._spoiled, self._times = "", 0
        self._flipped, self.flips = b"", 0
        self.open()
        self.endpoint = f"http://127.0.0.1:{self._port}"

    def open(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self._port))
        listener.listen()
        self._listener, self._port = listener, listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def shut(self) -> None:
        listener, self._listener = self._listener, None
        for one in [listener, *self._open]:
            if one is not None:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                one.close()
        self._open.clear()

    def spoil(self, how: str, times: int) -> None:
        """Spoil the next `times` responses: `drop` them, `cut` their bodies, or let them `hang`."""
        self._spoiled, self._times = how, times

    def flip(self, content: bytes, times: int) -> None:
        """Flip a bit in the next `times` responses with `content`; `flips` counts down."""
        self._flipped, self.flips = content, times

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(self._target)
                self._open |= {near, far}
                for answers, pair in enumerate([(near, far), (far, near)]):
                    arguments = (*pair, bool(answers))
                    threading.Thread(target=self._pass, args=arguments, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                if answers and self._times:
                    self._times -= 1
                    if self._spoiled == "hang":
                        return
                    if self._spoiled == "cut":
                        target.sendall(data[: data.find(b"\r\n\r\n") + 5])
                    break
                if answers and self.flips and self._flipped in data:
                    self.flips -= 1
                    changed = bytes([self._flipped[0] ^ 1]) + self._flipped[1:]
                    data = data.replace(self._flipped, changed)
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
