"""`ddpm watch`: serve a live page of a run, which only reads the workspace.

GET /               the page
GET /live           its content as JSON, which the page fetches every two seconds
GET /grid/STEP.png  the samples of a milestone
GET /health         200 as soon as the process is up
"""

from __future__ import annotations

import threading
from pathlib import Path

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ddpm_core.console import say
from ddpm_core.errors import UserError
from ddpm_core.evaluation.pages import LIVE_SCRIPT, environment
from ddpm_core.runtime.http import (
    PAGE_HEADERS,
    SingleLength,
    error_response,
    listen,
    page_routes,
    run_server,
)
from ddpm_core.storage.workspace import Workspace
from ddpm_core.text import masked
from ddpm_core.watch.live import Live

TIMEOUT = 30.0  # seconds for a client to send a request
_FOLDER = Path(__file__).parent
KEPT = {"Cache-Control": "max-age=86400"}  # a complete snapshot does not change


def watch(workspace: Workspace, host: str, port: int) -> None:
    """Serve the page until SIGTERM or Ctrl-C. Raises UserError if the address is unavailable."""
    listener = listen(host, port)
    name = f"[{host}]" if ":" in host else host
    say(f"watch: open http://{name}:{listener.getsockname()[1]}/")
    run_server(application(workspace), listener, TIMEOUT)


def application(workspace: Workspace) -> Starlette:
    """Return the web application of a workspace."""
    app = Starlette(
        routes=[
            *page_routes(_page, LIVE_SCRIPT, _FOLDER / "watch.js"),
            Route("/live", live),
            Route("/grid/{step:int}.png", grid),
            Route("/health", health),
        ],
        middleware=[Middleware(SingleLength)],
    )
    app.state.live = Live(workspace)
    app.state.lock = threading.Lock()
    return app


def _page() -> str:
    return str(environment(_FOLDER).get_template("page.html.j2").render())


async def health(request: Request) -> Response:
    return JSONResponse({"message": "The server is up."})


async def live(request: Request) -> Response:
    """Return the view of the workspace; 503 while it is unavailable."""

    def read() -> dict[str, object]:
        with request.app.state.lock:  # many open pages cause one look at the workspace
            found: dict[str, object] = request.app.state.live.view()
            return found

    try:
        return JSONResponse(await run_in_threadpool(read), headers=PAGE_HEADERS)
    except (OSError, UserError) as error:
        return error_response(503, "TEMPORARILY_UNAVAILABLE", masked(str(error)))


async def grid(request: Request) -> Response:
    """Return a grid as a PNG; 404 if the milestone has none."""
    try:
        data = await run_in_threadpool(request.app.state.live.grid, request.path_params["step"])
    except (OSError, UserError):
        return error_response(404, "NOT_FOUND", "There are no samples of this step.")
    return Response(data, media_type="image/png", headers={**PAGE_HEADERS, **KEPT})
