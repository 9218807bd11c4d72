"""The queue of validated requests, and the single thread that draws their images."""

from __future__ import annotations

import json
import threading
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddpm_core.registry.request import Task

if TYPE_CHECKING:
    from ddpm_core.registry.serving import Served


class Full(Exception):
    """The queue has no room for another request."""


class Abandoned(Exception):
    """The client of a request has left."""


@dataclass(eq=False)
class Job:
    """A validated request, and the model that was the champion when it arrived."""

    served: Served
    tasks: list[Task]
    response: Future[bytes] = field(default_factory=Future)  # JSON
    abandoned: bool = False

    def run(self) -> None:
        """Draw and encode the images. `response` gets the result or the error."""
        if not self.response.set_running_or_notify_cancel():
            return
        try:
            # Encode each image at once: as Python objects, pixels take many times more memory.
            images = self.served.images(self.tasks, self._check)
            encoded = [json.dumps(image).encode() for image in images]
            self.response.set_result(b'{"predictions": [' + b", ".join(encoded) + b"]}")
        except BaseException as error:  # the thread must survive every request
            # The frames of a traceback would keep the model in memory.
            self.response.set_exception(error.with_traceback(None))

    def _check(self, step: int) -> None:
        if self.abandoned:
            raise Abandoned


class DrawingQueue:
    """Draws one job at a time, to bound the memory, and limits how many jobs wait."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[Job] = deque()
        self._busy = False
        self._changed = threading.Condition()
        threading.Thread(target=self._draw_all, name="drawing", daemon=True).start()

    def add(self, job: Job) -> None:
        """Queue a job. Raises Full if `limit` jobs are waiting besides the one being drawn."""
        with self._changed:
            if len(self._waiting) + self._busy > self._limit:  # _busy is 0 or 1
                raise Full
            self._waiting.append(job)
            self._changed.notify()

    def abandon(self, job: Job) -> None:
        """Drop a waiting job, or stop drawing it after the current step."""
        with self._changed:
            job.abandoned = True
            with suppress(ValueError):
                self._waiting.remove(job)

    def _draw_all(self) -> None:
        while True:
            # No local variable keeps the job, so that the last job of a model frees its memory.
            self._next().run()

    def _next(self) -> Job:
        with self._changed:
            self._busy = False
            self._changed.wait_for(lambda: self._waiting)
            self._busy = True
            return self._waiting.popleft()
