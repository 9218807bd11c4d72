"""The queue of validated requests, and the single thread that draws their images.

Images of several requests are drawn in one batch if their settings agree, because one batch of many
images takes much less time than many batches of one. The noise of each image has its own key, so a
batch changes no image by more than rounding.
"""

from __future__ import annotations

import base64
import json
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from ddpm_core.sampling.images import Pixels, png

if TYPE_CHECKING:
    from torch import Tensor

    from ddpm_core.registry.serving import Served, Shot

PREVIEWS = 8  # of an image
PREVIEW_SIDE = 64  # pixels of a preview, at most

Event = dict[str, Any]


class Full(Exception):
    """The queue has no room for another request."""


class Abandoned(Exception):
    """The clients of all images in a batch have left."""


@dataclass(eq=False)
class Job:
    """A validated request, and the model that was the champion when it arrived.

    `listener` gets the events of the request, in the threads that draw: previews {"step", "steps",
    "at", "previews"} and finished images {"at", "images"}, where `at` are positions in the request.
    """

    served: Served
    shots: Sequence[Shot]
    listener: Callable[[Event], None] | None = None
    response: Future[list[bytes]] = field(default_factory=Future)  # each image as JSON
    abandoned: bool = False
    drawn: list[bytes] = field(default_factory=list)

    @property
    def waiting(self) -> Sequence[Shot]:
        """The images that are not drawn yet."""
        return self.shots[len(self.drawn) :]

    @property
    def ended(self) -> bool:
        """Whether nothing more has to be drawn."""
        return self.abandoned or self.response.done()

    def next(self, recipe: object, most: int) -> Sequence[Shot]:
        """Return the next images for a batch: those with its recipe, and at most so many."""
        return list(takewhile(lambda shot: shot.task.recipe == recipe, self.waiting[:most]))

    def add(self, images: list[dict[str, Any]]) -> None:
        """Store the next images; the last ones complete the response."""
        if self.listener is not None:
            start = len(self.drawn)
            self.listener({"at": list(range(start, start + len(images))), "images": images})
        # Encode each image at once: as Python objects, pixels take many times more memory.
        self.drawn += [json.dumps(image).encode() for image in images]
        if not self.waiting:
            with suppress(InvalidStateError):  # the client left
                self.response.set_result(self.drawn)

    def fail(self, error: BaseException) -> None:
        """End the request with an error."""
        with suppress(InvalidStateError):  # the client left
            # The frames of a traceback would keep the model in memory.
            self.response.set_exception(error.with_traceback(None))


Part = tuple[Job, Sequence["Shot"]]  # a job, and the next of its images


class DrawingQueue:
    """Draws one batch at a time, to bound the memory, and limits how many jobs wait."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[Job] = deque()
        self._busy = False
        self._changed = threading.Condition()
        threading.Thread(target=self._draw_all, name="drawing", daemon=True).start()

    def add(self, job: Job) -> None:
        """Queue a job. Raises Full if `limit` jobs are waiting besides those being drawn."""
        with self._changed:
            if len(self._waiting) + self._busy > self._limit:  # _busy is 0 or 1
                raise Full
            self._waiting.append(job)
            self._changed.notify()

    def abandon(self, job: Job) -> None:
        """Drop a job. A batch that others have images in is finished."""
        with self._changed:
            job.abandoned = True
            with suppress(ValueError):
                self._waiting.remove(job)

    def _draw_all(self) -> None:
        while True:
            # No local variable keeps a job, so that the last job of a model frees its memory.
            self._return(_draw(self._next()))

    def _next(self) -> list[Part]:
        """Wait for a job and return a batch: its next images, and those of others that fit."""
        with self._changed:
            self._busy = False
            self._changed.wait_for(lambda: self._waiting)
            self._busy = True
            first = self._waiting[0]
            recipe, left = first.waiting[0].task.recipe, first.served.batch_size
            parts: list[Part] = []
            for job in self._waiting:
                shots = job.next(recipe, left) if job.served is first.served else ()
                if shots:
                    parts.append((job, shots))
                    left -= len(shots)
            for job, _ in parts:
                self._waiting.remove(job)
            return parts

    def _return(self, jobs: Sequence[Job]) -> None:
        """Queue jobs that have images left behind all others, so that no large one blocks them."""
        with self._changed:
            self._waiting += [job for job in jobs if not job.ended]


def _draw(parts: Sequence[Part]) -> list[Job]:
    """Draw a batch, and return its jobs. If it fails, draw the images of each job separately."""
    served = parts[0][0].served
    try:
        images = served.draw([s for _, shots in parts for s in shots], partial(_on_step, parts))
    except Abandoned:
        pass
    except BaseException as error:  # the thread must survive every request
        if len(parts) == 1:
            parts[0][0].fail(error)
        else:
            for part in parts:
                _draw([part])
    else:
        for job, shots in parts:
            job.add(images[: len(shots)])
            images = images[len(shots) :]
    return [job for job, _ in parts]


def _on_step(parts: Sequence[Part], step: int, rows: Tensor, preview: Callable[[], Pixels]) -> None:
    """Send previews of the images `rows` of a batch. Raises Abandoned if all clients have left."""
    if all(job.abandoned for job, _ in parts):
        raise Abandoned
    task = parts[0][1][0].task
    steps = task.settings.steps * task.passes
    is_shown = step < steps and step % -(-steps // (PREVIEWS + 1)) == 0
    if not is_shown or all(job.listener is None for job, _ in parts):
        return
    small = preview()
    stride = -(-small.shape[1] // PREVIEW_SIDE)
    shown = dict(zip(rows.tolist(), small[:, ::stride, ::stride], strict=True))
    start = 0
    for job, shots in parts:
        mine = range(start, start + len(shots))
        start += len(shots)
        found = [row for row in mine if row in shown]
        if job.listener is not None and not job.abandoned and found:
            encoded = [base64.b64encode(png(shown[row])).decode() for row in found]
            at = [len(job.drawn) + row - mine.start for row in found]
            job.listener({"step": step, "steps": steps, "at": at, "previews": encoded})
