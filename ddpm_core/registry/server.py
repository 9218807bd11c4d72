"""`ddpm serve`: serve the champion over HTTP, in the protocol of `mlflow models serve`, and a page.

GET  /              the page to draw images
POST /generate      images, in the protocol of the page (see /openapi.json)
POST /invocations   images, in MLflow's protocol
GET  /health, /ping 200 as soon as the process is up
GET  /ready         200 once a champion is loaded; before that 503 and the reason
GET  /version       the loaded version, its score and the evidence for it
"""

from __future__ import annotations

import threading

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ddpm_core.config import Config
from ddpm_core.console import say
from ddpm_core.registry import page
from ddpm_core.registry.answering import (
    JSON,
    Limits,
    Refused,
    finished,
    loaded_of,
    parsed,
    queued,
    read_body,
)
from ddpm_core.registry.current import CurrentChampion
from ddpm_core.registry.drawing import DrawingQueue
from ddpm_core.registry.generate import generate, openapi
from ddpm_core.registry.request import rows_of
from ddpm_core.runtime.http import SingleLength, listen, run_server

MAX_BODY = 2**18  # bytes


def serve(config: Config, host: str, port: int, every: float, limits: Limits) -> None:
    """Serve until SIGTERM or Ctrl-C, and then finish the running requests.

    Raises:
        UserError: the address is unavailable, or tracking.uri is empty.
    """
    champion = CurrentChampion(config)
    listener = listen(host, port)
    threading.Thread(target=champion.refresh_forever, args=(every,), daemon=True).start()
    say(f"serve: listening on {host}, port {listener.getsockname()[1]}.")
    run_server(application(champion, limits), listener, limits.timeout)


def application(champion: CurrentChampion, limits: Limits) -> Starlette:
    """Return the web application. Its handlers find the model and the queue in `app.state`."""
    app = Starlette(
        routes=[
            Route("/invocations", invocations, methods=["POST"]),
            Route("/generate", generate, methods=["POST"]),
            Route("/openapi.json", openapi),
            *page.routes(),
            Route("/ping", health),
            Route("/health", health),
            Route("/ready", ready),
            Route("/version", version),
        ],
        middleware=[Middleware(SingleLength)],
        exception_handlers={Refused: Refused.answer},
    )
    app.state.champion = champion
    app.state.limits = limits
    app.state.queue = DrawingQueue(limits.waiting)
    return app


async def health(request: Request) -> Response:
    return JSONResponse({"message": "The server is up."})


async def ready(request: Request) -> Response:
    version = loaded_of(request).facts["version"]
    return JSONResponse({"version": version, "message": request.app.state.champion.trouble})


async def version(request: Request) -> Response:
    return JSONResponse(loaded_of(request).facts)


async def invocations(request: Request) -> Response:
    """Validate a request and draw its images. Status 400 is for invalid requests only."""
    body = await read_body(request, MAX_BODY)
    served = loaded_of(request).served
    limits: Limits = request.app.state.limits
    tasks = parsed(body, lambda payload: served.tasks(rows_of(payload), limits.work))
    images = await finished(request, queued(request, served, tasks))
    return Response(b'{"predictions": [' + b", ".join(images) + b"]}", media_type=JSON)
