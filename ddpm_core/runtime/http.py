"""Serve a web application: an address, a server with deadlines, and errors as JSON."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ddpm_core.errors import UserError
from ddpm_core.runtime.connection import MAX_CONNECTIONS, Connection

GRACE = 20.0  # seconds to finish running requests after SIGTERM
PAGE_HEADERS = {
    # Only this server's own script runs, and the page shows nothing from elsewhere.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address, IPv4 or IPv6. Raises UserError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        cause = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"Cannot listen on --host {host} --port {port}: {cause}. Choose a different address."
        ) from error


def run_server(app: ASGIApp, listener: socket.socket, timeout: float) -> None:
    """Serve until SIGTERM or Ctrl-C, and then finish the running requests.

    A client has `timeout` seconds to send a header, and as many to send a body.
    """
    # uvicorn raises the signal again when it is done; an orderly stop must end with status 0.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    protocol: Any = partial(Connection, timeout=timeout)
    settings = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        backlog=MAX_CONNECTIONS,  # also how many connections asyncio accepts in one go
    )
    _Server(settings).run(sockets=[listener])


class _Server(uvicorn.Server):
    """Ends at a signal, and drops the requests that take longer than GRACE after it."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        limit = threading.Timer(GRACE, os._exit, (0,))
        limit.daemon = True
        limit.start()
        super().handle_exit(sig, frame)


class SingleLength:
    """Rejects requests that state their length twice.

    A proxy and this server could read different lengths, which allows request smuggling.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
            message = "The request has both Transfer-Encoding and Content-Length. Send one of them."
            app = error_response(400, "BAD_REQUEST", message, {"Connection": "close"})
        await app(scope, receive, send)


def page_routes(render: Callable[[], str], *scripts: Path) -> list[Route]:
    """Return the routes of a page, GET /, and of its scripts, each under its name."""

    async def page(request: Request) -> Response:
        return HTMLResponse(await run_in_threadpool(render), headers=PAGE_HEADERS)

    async def script(request: Request) -> Response:
        path = named[request.url.path.rpartition("/")[2]]
        return FileResponse(path, media_type="text/javascript", headers=PAGE_HEADERS)

    named = {path.name: path for path in scripts}
    return [Route("/", page), *(Route(f"/{name}", script) for name in named)]


def error_response(
    status: int, code: str, message: str, headers: dict[str, str] | None = None
) -> Response:
    """Return an error in MLflow's form: {"error_code": ..., "message": ...}."""
    return JSONResponse({"error_code": code, "message": message}, status, headers)
