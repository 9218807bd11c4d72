"""`ddpm serve`: the champion over HTTP, with the requests and answers of `mlflow models serve`.

POST /invocations   images, or 400 and a sentence
GET  /health, /ping 200 as soon as the process lives
GET  /ready         200 once a champion answers; before that 503, with what is waited for
GET  /version       which version answers, its score and the evidence for it
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ddpm_core.config import Config
from ddpm_core.console import say
from ddpm_core.errors import UserError
from ddpm_core.registry.current import Current, Loaded

LARGEST_BODY = 2**20  # bytes
GRACE = 20.0  # seconds that requests under way have to end after SIGTERM
LONGEST = 500  # characters of a message that is not ours
JSON = "application/json"
RETRY_AFTER = "5"  # seconds


def serve(config: Config, host: str, port: int, every: float) -> None:
    """Serve until SIGTERM or Ctrl-C. Raises UserError where the address cannot be had.

    Requests that are under way then are answered first; without any it ends at once.
    """
    # It advises at each request with a mistake in its columns, for the program's author.
    logging.getLogger("mlflow.pyfunc.scoring_server").setLevel(logging.ERROR)
    current = Current(config)
    listener = listen(host, port)
    threading.Thread(target=current.keep_looking, args=(every,), daemon=True).start()
    # uvicorn raises the signal again when it is done: an end that was asked for is no failure.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    say(f"serve: listening on {host}, port {listener.getsockname()[1]}.")
    settings = uvicorn.Config(
        application(current), log_level="warning", access_log=False, lifespan="off"
    )
    _Server(settings).run(sockets=[listener])


def listen(host: str, port: int) -> socket.socket:
    """A socket at an address, IPv4 or IPv6. Raises UserError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        told = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"--host {host} --port {port} cannot be listened on: {told}. Choose another one."
        ) from error


def application(current: Current) -> Starlette:
    """The routes; requests find the model in `app.state.current`."""
    routes = [
        Route("/invocations", invocations, methods=["POST"]),
        Route("/ping", health),
        Route("/health", health),
        Route("/ready", ready),
        Route("/version", version),
    ]
    app = Starlette(routes=routes)
    app.state.current = current
    return app


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
    current: Current = request.app.state.current
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > LARGEST_BODY:
            told = f"The request is larger than {LARGEST_BODY:,} bytes."
            return refusal(413, "REQUEST_LIMIT_EXCEEDED", told)
    loaded = current.loaded
    if loaded is None:
        return not_yet(current)
    kind = request.headers.get("content-type", "").lower()
    return await run_in_threadpool(answer, loaded, bytes(body), kind)


def answer(loaded: Loaded, body: bytes, kind: str) -> Response:
    """What MLflow's own server answers, with its messages cut to the sentence."""
    from mlflow.exceptions import MlflowException
    from mlflow.pyfunc import scoring_server

    if kind.partition(";")[0].strip() != JSON:
        return refusal(415, "BAD_REQUEST", f"Content-Type: {JSON} is needed.")
    try:
        json.loads(body)
        schema = loaded.model.metadata.get_input_schema()
        result = scoring_server.invocations(body, kind, loaded.model, schema)
    except (ValueError, RecursionError) as error:
        return refusal(400, "BAD_REQUEST", f"The request is no JSON: {error}.")
    except MlflowException as error:
        return refusal(error.get_http_status_code(), error.error_code, sentence(error))
    return Response(result.response, result.status, media_type=result.mimetype)


def sentence(error: Any) -> str:
    """What is wrong, without the request and the schema that MLflow puts before it."""
    if isinstance(error.__cause__, UserError):
        return str(error.__cause__)
    return str(error.message).rpartition("Error: ")[2].strip()[:LONGEST]


def not_yet(current: Current) -> Response:
    return refusal(503, "TEMPORARILY_UNAVAILABLE", current.trouble, {"Retry-After": RETRY_AFTER})


def refusal(
    status: int, code: str, message: str, headers: dict[str, str] | None = None
) -> Response:
    """In the form of MLflow's: {"error_code": ..., "message": ...}."""
    return JSONResponse({"error_code": code, "message": message}, status, headers)


class _Server(uvicorn.Server):
    """Ends at a signal, if need be without the answers that take longer than GRACE."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        limit = threading.Timer(GRACE, os._exit, (0,))
        limit.daemon = True
        limit.start()
        super().handle_exit(sig, frame)
