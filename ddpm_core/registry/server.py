"""`ddpm serve`: the champion over HTTP, with the requests and answers of `mlflow models serve`.

POST /invocations   images, or a JSON error
GET  /health, /ping 200 as soon as the process is up
GET  /ready         200 once a champion is loaded; before that 503 and the reason
GET  /version       the loaded version, its score and the evidence for it
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ddpm_core.config import Config
from ddpm_core.console import say, warn
from ddpm_core.errors import UserError
from ddpm_core.registry.connection import MOST, Connection
from ddpm_core.registry.current import Current
from ddpm_core.registry.drawing import DrawingQueue, Full, Job
from ddpm_core.registry.request import rows_of
from ddpm_core.tracking.errors import reason

LARGEST_BODY = 2**18  # bytes
GRACE = 20.0  # seconds that requests under way have to end after SIGTERM
JSON = "application/json"
RETRY_AFTER = {"Retry-After": "5"}  # seconds


@dataclass(frozen=True)
class Limits:
    """What one client may take of the server."""

    work: int  # images x pixels x steps of a request
    waiting: int  # requests in the queue
    timeout: float  # seconds for a client to send a header, or a body


def serve(config: Config, host: str, port: int, every: float, limits: Limits) -> None:
    """Serve until SIGTERM or Ctrl-C. Raises UserError if the address is unavailable.

    Requests that are under way then are answered first; without any it ends at once.
    """
    current = Current(config)
    listener = listen(host, port)
    threading.Thread(target=current.keep_looking, args=(every,), daemon=True).start()
    # uvicorn raises the signal again when it is done: an end that was asked for is no failure.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    say(f"serve: listening on {host}, port {listener.getsockname()[1]}.")
    protocol: Any = partial(Connection, timeout=limits.timeout)
    settings = uvicorn.Config(
        application(current, limits),
        http=protocol,
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        backlog=MOST,  # also how many connections asyncio accepts before it looks at them
    )
    _Server(settings).run(sockets=[listener])


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address, IPv4 or IPv6. Raises UserError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        told = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"--host {host} --port {port} cannot be listened on: {told}. Choose another one."
        ) from error


def application(current: Current, limits: Limits) -> Starlette:
    """Return the routes; handlers find the model and the queue in `app.state`."""
    routes = [
        Route("/invocations", invocations, methods=["POST"]),
        Route("/ping", health),
        Route("/health", health),
        Route("/ready", ready),
        Route("/version", version),
    ]
    app = Starlette(routes=routes, middleware=[Middleware(OneLength)])
    app.state.current = current
    app.state.limits = limits
    app.state.queue = DrawingQueue(limits.waiting)
    return app


class OneLength:
    """Refuses requests whose length is given twice: proxies and servers may read it differently."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
            message = "The request has both Transfer-Encoding and Content-Length. Send one of them."
            app = refusal(400, "BAD_REQUEST", message, {"Connection": "close"})
        await app(scope, receive, send)


async def health(request: Request) -> Response:
    return JSONResponse({"message": "It lives."})


async def ready(request: Request) -> Response:
    current: Current = request.app.state.current
    loaded = current.loaded
    if loaded is None:
        return not_yet(current)
    return JSONResponse({"version": loaded.facts["version"], "message": current.trouble})


async def version(request: Request) -> Response:
    current: Current = request.app.state.current
    loaded = current.loaded
    return not_yet(current) if loaded is None else JSONResponse(loaded.facts)


async def invocations(request: Request) -> Response:
    try:
        body = await read_body(request)
    except ClientDisconnect:
        say("serve: a client left before its request was complete.")
        return Response(status_code=400)  # goes nowhere
    if body is None:
        told = f"The request is larger than {LARGEST_BODY:,} bytes. Send fewer rows at once."
        return refusal(413, "REQUEST_LIMIT_EXCEEDED", told)
    current: Current = request.app.state.current
    loaded = current.loaded
    if loaded is None:
        return not_yet(current)
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
        return refusal(415, "BAD_REQUEST", f"Content-Type must be {JSON}.")
    try:
        payload = json.loads(body)
    except (ValueError, RecursionError) as error:
        return refusal(400, "BAD_REQUEST", f"The request is not valid JSON: {error}.")
    limits: Limits = request.app.state.limits
    try:
        tasks = loaded.served.tasks(rows_of(payload), limits.work)
    except UserError as error:
        return refusal(400, "INVALID_PARAMETER_VALUE", str(error))
    return await drawn(request, Job(loaded.served, tasks))


async def read_body(request: Request) -> bytes | None:
    """Return the body, or None if it is too large. Raises ClientDisconnect.

    A body that is too large is read to its end, since a client that still sends reads no answer;
    the connection's deadline bounds that.
    """
    body, size = bytearray(), 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= LARGEST_BODY:
            body += chunk
    return bytes(body) if size <= LARGEST_BODY else None


async def drawn(request: Request, job: Job) -> Response:
    """Queue a job and return its answer; abandon it when the client leaves."""
    queue: DrawingQueue = request.app.state.queue
    try:
        queue.add(job)
    except Full:
        told = "The queue of requests is full. Try again in a few seconds."
        return refusal(429, "RESOURCE_EXHAUSTED", told, RETRY_AFTER)
    answer: asyncio.Future[Any] = asyncio.wrap_future(job.answer)
    leaving: asyncio.Future[Any] = asyncio.ensure_future(left(request))
    try:
        await asyncio.wait({answer, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            say("serve: a client left before its images were drawn.")
            return Response(status_code=400)  # goes nowhere
        return Response(answer.result(), media_type=JSON)
    except UserError as error:
        return refusal(400, "INVALID_PARAMETER_VALUE", str(error))
    except Exception as error:  # no memory, or a mistake of this program
        warn(f"serve: drawing failed: {reason(error)}")
        return refusal(500, "INTERNAL_ERROR", "Drawing failed. The server's log has the reason.")
    finally:
        queue.abandon(job)
        leaving.cancel()
        answer.cancel()


async def left(request: Request) -> None:
    """Return when the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def not_yet(current: Current) -> Response:
    return refusal(503, "TEMPORARILY_UNAVAILABLE", current.trouble, RETRY_AFTER)


def refusal(
    status: int, code: str, message: str, headers: dict[str, str] | None = None
) -> Response:
    """Return an error in MLflow's form: {"error_code": ..., "message": ...}."""
    return JSONResponse({"error_code": code, "message": message}, status, headers)


class _Server(uvicorn.Server):
    """Ends at a signal, if need be without the answers that take longer than GRACE."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        limit = threading.Timer(GRACE, os._exit, (0,))
        limit.daemon = True
        limit.start()
        super().handle_exit(sig, frame)
