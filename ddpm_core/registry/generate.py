"""POST /generate: what the page asks for, and its documentation in OpenAPI.

A request is one JSON object. The response is one too, or with `previews` a line of JSON for each
event: a preview, finished images, or an error.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ddpm_core.config import Config
from ddpm_core.console import warn
from ddpm_core.errors import Problem, got, invalid
from ddpm_core.registry import request as asked
from ddpm_core.registry.answering import (
    FAILED,
    JSON,
    Limits,
    finished,
    loaded_of,
    parsed,
    queued,
    read_body,
    refusing,
    too_late,
)
from ddpm_core.registry.drawing import Event
from ddpm_core.registry.request import Integer, Task, Text, check_size, parse_as, resolve
from ddpm_core.tracking.errors import reason

if TYPE_CHECKING:
    from ddpm_core.checkpoint import Checkpoint
    from ddpm_core.diffusion.editing import Original
    from ddpm_core.registry.serving import Served

MAX_BODY = 2**20  # bytes
LINES = "application/x-ndjson"
# One at a time, beside the event loop: decoding an image takes memory and time.
_reader = ThreadPoolExecutor(1, "reading")

Encoded = Annotated[Text, Field(description="PNG, JPEG or WebP, as base64 or a data: URI")]


class Generate(asked.Request):
    """Images to draw. Omitted fields take the model's own settings."""

    n: Annotated[Integer, Field(ge=1, le=asked.MAX_IMAGES)] = 1
    toward: Annotated[Integer, Field(ge=0, lt=2**63)] | None = Field(
        None, description="a second seed: n images from image `first` of `seed` to that of `toward`"
    )
    every_class: bool = Field(False, description="draw each image once for every class")
    image: Encoded | None = Field(None, description="an image to start from")
    strength: Annotated[float, Field(ge=0.0, le=1.0)] | None = Field(
        None,
        description="the share of the time up to which noise is added to `image`; 0: unchanged, "
        "1: no trace of it. Default: 0.6; with a mask 1",
    )
    mask: Encoded | None = Field(
        None, description="white where `image` is redrawn, black where it is kept"
    )
    previews: bool = Field(
        False, description="respond with lines of JSON: previews, then finished images"
    )


class Image(BaseModel):
    """A drawn image, with what draws it again."""

    image: str | list[Any] = Field(description="a PNG in base64, or rows of pixels")
    number: int
    seed: int
    toward: int | None = None
    share: float | None = Field(None, description="of the way from `seed` to `toward`")
    class_: str | None = Field(alias="class")
    sampler: str
    steps: int
    guidance: float


class Images(BaseModel):
    """The response of /generate."""

    version: str = Field(description="the version of the model that drew the images")
    images: list[Image]


class Line(BaseModel):
    """A line of the response with `previews`. Each has some of these fields."""

    version: str | None = Field(None, description="in the first line")
    count: int | None = Field(None, description="images of the request, in the first line")
    at: list[int] | None = Field(None, description="positions of the images of this line")
    step: int | None = Field(None, description="the step after which a preview was made")
    steps: int | None = None
    previews: list[str] | None = Field(
        None, description="PNGs in base64 of the predicted images, at most 64 pixels a side"
    )
    images: list[Image] | None = None
    error: str | None = Field(None, description="why there are no more images")


class Problematic(BaseModel):
    """An error."""

    error_code: str
    message: str


async def generate(request: Request) -> Response:
    """Draw the images of a request; see `Generate`."""
    body = await read_body(request, MAX_BODY)
    loaded, limits = loaded_of(request), request.app.state.limits
    served, version = loaded.served, str(loaded.facts["version"])
    wanted = parsed(body, partial(wanted_of, served.checkpoint.params))
    original = None
    if wanted.image is not None:
        read = partial(refusing, partial(original_of, served.checkpoint, wanted))
        original = await asyncio.get_running_loop().run_in_executor(_reader, read)
    tasks = refusing(lambda: tasks_of(served, wanted, original, limits.work))
    if wanted.previews:
        return stream(request, served, tasks, version)
    images = await finished(request, queued(request, served, tasks))
    head = json.dumps({"version": version}).encode()[:-1]
    return Response(head + b', "images": [' + b", ".join(images) + b"]}", media_type=JSON)


def stream(request: Request, served: Served, tasks: list[Task], version: str) -> Response:
    """Queue a request, and respond with its events while it is drawn."""
    limits: Limits = request.app.state.limits
    loop, events = asyncio.get_running_loop(), asyncio.Queue[Event | None]()

    def listener(event: Event | None) -> None:
        with suppress(RuntimeError):  # the server has stopped
            loop.call_soon_threadsafe(events.put_nowait, event)

    job = queued(request, served, tasks, listener)
    job.response.add_done_callback(lambda _: listener(None))

    async def lines() -> AsyncIterator[str]:
        deadline = loop.time() + limits.seconds
        yield _line({"version": version, "count": len(job.shots)})
        try:
            while event := await asyncio.wait_for(events.get(), deadline - loop.time()):
                yield _line(event)
            job.response.result()
        except TimeoutError:
            yield _line({"error": too_late(limits)})
        except Exception as error:  # a UserError too: the request was valid
            warn(f"serve: drawing failed: {reason(error)}")
            yield _line({"error": FAILED})

    return _Lines(lines(), lambda: request.app.state.queue.abandon(job))


class _Lines(StreamingResponse):
    """Lines of JSON. `finish` is called at the end, also when the client leaves before."""

    def __init__(self, lines: AsyncIterator[str], finish: Callable[[], None]) -> None:
        super().__init__(lines, media_type=LINES, headers={"Cache-Control": "no-store"})
        self._finish = finish

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._finish()


def _line(event: Event) -> str:
    return json.dumps(event) + "\n"


def wanted_of(config: Config, payload: Any) -> Generate:
    """Return a valid request to a model. Raises UserError with every invalid field."""
    if not isinstance(payload, dict):
        raise invalid([Problem("", got(payload), "must be an object")], "the request")
    wanted = parse_as(Generate, payload)
    if problems := _problems(wanted, config):
        raise invalid(problems, "the request")
    return wanted


def tasks_of(
    served: Served, wanted: Generate, original: Original | None, max_work: int
) -> list[Task]:
    """Return the tasks of a request. Raises UserError if the model cannot draw them."""
    config, classes = served.checkpoint.params, served.classes
    each = classes if wanted.every_class else [wanted.class_]
    tasks = [resolve(wanted.model_copy(update={"class_": c}), config, classes) for c in each]
    tasks = [replace(task, toward=wanted.toward, original=original) for task in tasks]
    check_size(tasks, served.pixels, max_work)
    return tasks


def _problems(wanted: Generate, config: Config) -> list[Problem]:
    """Return the problems of fields that do not go together."""
    problems = []
    if wanted.every_class and config.model.conditioning != "class":
        hint = f"model.conditioning is {config.model.conditioning}"
        problems.append(Problem("every_class", got(True), "requires a model with classes", hint))
    if wanted.every_class and wanted.class_ is not None:
        problems.append(Problem("class", got(wanted.class_), "not possible with every_class"))
    if wanted.image is None:
        given = {"strength": wanted.strength, "mask": wanted.mask}
        problems += [
            Problem(name, got(value), "requires image")
            for name, value in given.items()
            if value is not None
        ]
    return problems


def original_of(checkpoint: Checkpoint, wanted: Generate) -> Original:
    """Decode what the images start from. Raises UserError for an unusable file."""
    from ddpm_core.registry.uploads import read_upload

    assert wanted.image is not None
    return read_upload(checkpoint, wanted.image, wanted.mask, wanted.strength)


async def openapi(request: Request) -> Response:
    """Return the documentation of /generate in OpenAPI 3.1."""
    return JSONResponse(document())


def document() -> dict[str, Any]:
    """Return the documentation of the API, from the models of this module."""
    schemas: dict[str, Any] = {}

    def schema(model: type[BaseModel]) -> dict[str, str]:
        found = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(found.pop("$defs", {}))
        schemas[model.__name__] = found
        return {"$ref": f"#/components/schemas/{model.__name__}"}

    def content(kind: str, model: type[BaseModel]) -> dict[str, Any]:
        return {kind: {"schema": schema(model)}}

    errors = {
        400: "A field is invalid, and the message names it.",
        413: f"The body has more than {MAX_BODY:,} bytes.",
        415: f"The body is not {JSON}.",
        429: "The queue is full.",
        500: "Drawing failed.",
        503: "There is no champion yet.",
        504: "Drawing took too long.",
    }
    success = {
        "description": "The images; with `previews` a line of JSON for each event.",
        "content": {**content(JSON, Images), **content(LINES, Line)},
    }
    responses = {"200": success} | {
        str(status): {"description": text, "content": content(JSON, Problematic)}
        for status, text in errors.items()
    }
    operation = {
        "operationId": "generate",
        "summary": "Draw images with the champion",
        "requestBody": {"required": True, "content": content(JSON, Generate)},
        "responses": responses,
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "ddpm serve", "version": "1"},
        "paths": {"/generate": {"post": operation}},
        "components": {"schemas": schemas},
    }
