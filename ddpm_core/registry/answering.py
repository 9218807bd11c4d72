"""What all requests for images have in common: reading, validating, queueing and waiting."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ddpm_core.console import say, warn
from ddpm_core.errors import UserError
from ddpm_core.registry.current import CurrentChampion, Loaded
from ddpm_core.registry.drawing import DrawingQueue, Event, Full, Job
from ddpm_core.registry.request import Task
from ddpm_core.runtime.http import error_response
from ddpm_core.tracking.errors import reason

if TYPE_CHECKING:
    from ddpm_core.registry.serving import Served

JSON = "application/json"
RETRY_AFTER = {"Retry-After": "5"}  # seconds
FAILED = "Drawing failed. The server's log has the reason."

T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """Limits for one client."""

    work: int  # images x pixels x evaluations of a request
    waiting: int  # requests in the queue
    timeout: float  # seconds for a client to send a header, or a body
    seconds: float  # from the arrival of a request to its last image


class Refused(Exception):
    """A request that gets no images, and the response that says why."""

    def __init__(self, response: Response) -> None:
        super().__init__()
        self.response = response

    @staticmethod
    def answer(request: Request, error: Exception) -> Response:
        """Return the response: a handler of exceptions for Starlette."""
        assert isinstance(error, Refused)
        return error.response

    @classmethod
    def of(
        cls, status: int, code: str, message: str, headers: dict[str, str] | None = None
    ) -> Refused:
        """Return the exception for an error in MLflow's form."""
        return cls(error_response(status, code, message, headers))


def loaded_of(request: Request) -> Loaded:
    """Return the champion. Raises Refused, status 503, if there is none yet."""
    champion: CurrentChampion = request.app.state.champion
    if champion.loaded is None:
        raise Refused.of(503, "TEMPORARILY_UNAVAILABLE", champion.trouble, RETRY_AFTER)
    return champion.loaded


async def read_body(request: Request, most: int) -> bytes:
    """Return a body of JSON. Raises Refused if it is too large, of another type, or incomplete.

    A body that is too large is read to its end, because most clients read no response while they
    still send. The connection's deadline bounds that.
    """
    body, size = bytearray(), 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size <= most:
                body += chunk
    except ClientDisconnect:
        say("serve: a client left before its request was complete.")
        raise Refused(Response(status_code=400)) from None
    if size > most:
        message = f"The request is larger than {most:,} bytes. Send fewer rows or a smaller image."
        raise Refused.of(413, "REQUEST_LIMIT_EXCEEDED", message)
    loaded_of(request)  # a client without a champion learns that first
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
        raise Refused.of(415, "BAD_REQUEST", f"Content-Type must be {JSON}.")
    return bytes(body)


def parsed(body: bytes, validate: Callable[[Any], T]) -> T:
    """Return what `validate` makes of the JSON. Raises Refused, status 400, if it is invalid."""
    try:
        payload = json.loads(body)
    except (ValueError, RecursionError) as error:
        message = f"The request is not valid JSON: {error}."
        raise Refused.of(400, "BAD_REQUEST", message) from None
    return refusing(lambda: validate(payload))


def refusing(work: Callable[[], T]) -> T:
    """Return `work()`. Raises Refused, status 400, for a UserError."""
    try:
        return work()
    except UserError as error:
        raise Refused.of(400, "INVALID_PARAMETER_VALUE", str(error)) from None


def queued(
    request: Request,
    served: Served,
    tasks: Sequence[Task],
    listener: Callable[[Event], None] | None = None,
) -> Job:
    """Queue a request. Raises Refused, status 429, if the queue is full."""
    from ddpm_core.registry.serving import shots_of

    queue: DrawingQueue = request.app.state.queue
    job = Job(served, shots_of(tasks), listener)
    try:
        queue.add(job)
    except Full:
        message = "The queue of requests is full. Try again in a few seconds."
        raise Refused.of(429, "RESOURCE_EXHAUSTED", message, RETRY_AFTER) from None
    return job


async def finished(request: Request, job: Job) -> list[bytes]:
    """Return the images of a queued job as JSON. Abandons it when the client leaves.

    Raises Refused if drawing fails or takes too long.
    """
    limits: Limits = request.app.state.limits
    response: asyncio.Future[list[bytes]] = asyncio.wrap_future(job.response)
    leaving: asyncio.Future[Any] = asyncio.ensure_future(disconnected(request))
    try:
        done, _ = await asyncio.wait(
            {response, leaving}, timeout=limits.seconds, return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            raise Refused.of(504, "DEADLINE_EXCEEDED", too_late(limits))
        if response not in done:
            say("serve: a client left before its images were drawn.")
            raise Refused(Response(status_code=400))
        return response.result()
    except Refused:
        raise
    except Exception as error:  # a UserError too: the request was valid
        warn(f"serve: drawing failed: {reason(error)}")
        raise Refused.of(500, "INTERNAL_ERROR", FAILED) from None
    finally:
        request.app.state.queue.abandon(job)
        leaving.cancel()
        response.cancel()


def too_late(limits: Limits) -> str:
    """Return the message for a request that takes too long."""
    return (
        f"The images were not finished within {limits.seconds:g} seconds. Ask for fewer images or "
        "steps, or try again later."
    )


async def disconnected(request: Request) -> None:
    """Wait until the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
