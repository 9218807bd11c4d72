"""`ddpm serve`: serve the champion over HTTP, in the protocol of `mlflow models serve`.

POST /invocations   images, or a JSON error
GET  /health, /ping 200 as soon as the process is up
GET  /ready         200 once a champion is loaded; before that 503 and the reason
GET  /version       the loaded version, its score and the evidence for it
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ddpm_core.config import Config
from ddpm_core.console import say, warn
from ddpm_core.errors import UserError
from ddpm_core.registry.drawing import DrawingQueue, Full, Job
from ddpm_core.registry.models import Registry, fetch_to, mlflow_errors, row_of
from ddpm_core.registry.request import rows_of
from ddpm_core.runtime.http import SingleLength, error_response, listen, run_server
from ddpm_core.text import masked
from ddpm_core.tracking.errors import reason

if TYPE_CHECKING:
    from ddpm_core.registry.serving import Served

MAX_BODY = 2**18  # bytes
JSON = "application/json"
RETRY_AFTER = {"Retry-After": "5"}  # seconds


@dataclass(frozen=True)
class Limits:
    """Limits for one client."""

    work: int  # images x pixels x steps of a request
    waiting: int  # requests in the queue
    timeout: float  # seconds for a client to send a header, or a body


@dataclass(frozen=True)
class Loaded:
    """A version in memory, and what /version reports about it."""

    key: tuple[str, Any]  # the creation time, too: a deleted registry starts at version 1 again
    served: Served
    facts: dict[str, Any]


class CurrentChampion:
    """The newest champion that could be loaded. It stays if a later one cannot be loaded.

    One thread calls `refresh`. The others read `loaded`, which is None until the first champion is
    loaded, and `trouble`, the reason why it is not the newest. A request keeps the version that it
    started with; the last request of a version frees its memory.

    Only the checkpoint of a version is downloaded (safetensors and JSON), so no code from the
    registry runs here. Use `mlflow models serve` for a model that needs its own code.
    """

    def __init__(self, config: Config) -> None:
        if not config.tracking.uri:
            raise UserError("tracking.uri is empty, but the champion is stored in MLflow.")
        self._config = config
        self._reported = ""
        self.loaded: Loaded | None = None
        self.trouble = f"MLflow at {masked(config.tracking.uri)} was not asked yet."

    def refresh_forever(self, interval: float) -> None:
        """Call `refresh` every `interval` seconds."""
        pause = threading.Event()
        while True:
            self.refresh()
            pause.wait(interval)

    def refresh(self) -> None:
        """Ask MLflow once for the champion, and load it if it is new. Never raises."""
        kind = "MLflow"
        try:
            registry = Registry(self._config)
            version = registry.champion()
            kind = "champion"
            if version is None:
                raise UserError(
                    f"{registry.name} has no version with the alias {registry.alias!r} at "
                    f"{masked(registry.uri)}. `ddpm register` sets it."
                )
            kind = f"version {version.version}"
            if self.loaded is None or self.loaded.key != _key(version):
                self.loaded = self._load(registry, version)
                say(f"serve: serving {registry.name} version {version.version}.")
        except UserError as error:
            self._report(kind, str(error))
        except Exception as error:  # such as a lack of memory or disk space
            self._report(kind, f"The champion, {kind}, cannot be loaded: {reason(error)}")
        else:
            self.trouble = self._reported = ""

    def _load(self, registry: Registry, version: Any) -> Loaded:
        """Download a version, load it and draw one image with it. Deletes the files again."""
        # Imported here because PyTorch takes seconds, for which /health does not wait.
        from ddpm_core.registry.serving import Served

        with tempfile.TemporaryDirectory(prefix="ddpm-champion-") as target:
            with mlflow_errors(registry.uri):
                folder = fetch_to(f"models:/{registry.name}/{version.version}", target)
            served = Served(folder)
        served.try_out()
        row = row_of(version, "rescored") or row_of(version, "row")
        return Loaded(
            key=_key(version),
            served=served,
            facts={
                "name": registry.name,
                "alias": registry.alias,
                "version": str(version.version),
                "step": row and row.step,
                "score_name": row and row.score_name,
                "score": row and row.score,
                "evidence": row and row.evidence.plain(),
            },
        )

    def _report(self, kind: str, trouble: str) -> None:
        """Set `trouble`; print it if the last one was of a different kind."""
        self.trouble = trouble
        if kind != self._reported:
            serving = self.loaded and f"Still serving version {self.loaded.facts['version']}."
            warn(f"serve: {trouble} {serving or 'Waiting.'}")
        self._reported = kind


def _key(version: Any) -> tuple[str, Any]:
    return str(version.version), version.creation_timestamp


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
    routes = [
        Route("/invocations", invocations, methods=["POST"]),
        Route("/ping", health),
        Route("/health", health),
        Route("/ready", ready),
        Route("/version", version),
    ]
    app = Starlette(routes=routes, middleware=[Middleware(SingleLength)])
    app.state.champion = champion
    app.state.limits = limits
    app.state.queue = DrawingQueue(limits.waiting)
    return app


async def health(request: Request) -> Response:
    return JSONResponse({"message": "The server is up."})


async def ready(request: Request) -> Response:
    champion: CurrentChampion = request.app.state.champion
    loaded = champion.loaded
    if loaded is None:
        return not_ready(champion)
    return JSONResponse({"version": loaded.facts["version"], "message": champion.trouble})


async def version(request: Request) -> Response:
    champion: CurrentChampion = request.app.state.champion
    loaded = champion.loaded
    return not_ready(champion) if loaded is None else JSONResponse(loaded.facts)


async def invocations(request: Request) -> Response:
    """Validate a request and draw its images. Status 400 is for invalid requests only."""
    try:
        body = await read_body(request)
    except ClientDisconnect:
        say("serve: a client left before its request was complete.")
        return Response(status_code=400)  # the client has left
    if body is None:
        message = f"The request is larger than {MAX_BODY:,} bytes. Send fewer rows at once."
        return error_response(413, "REQUEST_LIMIT_EXCEEDED", message)
    champion: CurrentChampion = request.app.state.champion
    loaded = champion.loaded
    if loaded is None:
        return not_ready(champion)
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
        return error_response(415, "BAD_REQUEST", f"Content-Type must be {JSON}.")
    try:
        payload = json.loads(body)
    except (ValueError, RecursionError) as error:
        return error_response(400, "BAD_REQUEST", f"The request is not valid JSON: {error}.")
    limits: Limits = request.app.state.limits
    try:
        tasks = loaded.served.tasks(rows_of(payload), limits.work)
    except UserError as error:
        return error_response(400, "INVALID_PARAMETER_VALUE", str(error))
    return await draw(request, Job(loaded.served, tasks))


async def read_body(request: Request) -> bytes | None:
    """Return the body, or None if it is too large. Raises ClientDisconnect.

    A body that is too large is read to its end, because most clients read no response while they
    still send. The connection's deadline bounds that.
    """
    body, size = bytearray(), 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= MAX_BODY:
            body += chunk
    return bytes(body) if size <= MAX_BODY else None


async def draw(request: Request, job: Job) -> Response:
    """Queue a job and return its images; abandon the job when the client leaves."""
    queue: DrawingQueue = request.app.state.queue
    try:
        queue.add(job)
    except Full:
        message = "The queue of requests is full. Try again in a few seconds."
        return error_response(429, "RESOURCE_EXHAUSTED", message, RETRY_AFTER)
    response: asyncio.Future[Any] = asyncio.wrap_future(job.response)
    leaving: asyncio.Future[Any] = asyncio.ensure_future(disconnected(request))
    try:
        await asyncio.wait({response, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not response.done():
            say("serve: a client left before its images were drawn.")
            return Response(status_code=400)  # the client has left
        return Response(response.result(), media_type=JSON)
    except Exception as error:  # a UserError too: the request was valid
        warn(f"serve: drawing failed: {reason(error)}")
        message = "Drawing failed. The server's log has the reason."
        return error_response(500, "INTERNAL_ERROR", message)
    finally:
        queue.abandon(job)
        leaving.cancel()
        response.cancel()


async def disconnected(request: Request) -> None:
    """Wait until the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def not_ready(champion: CurrentChampion) -> Response:
    return error_response(503, "TEMPORARILY_UNAVAILABLE", champion.trouble, RETRY_AFTER)
