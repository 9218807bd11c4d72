"""A loaded model that draws images for requests, in `ddpm serve` and in MLflow's server."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpm_core.checkpoint import GUIDE, Checkpoint
from ddpm_core.errors import Corrupt, UserError
from ddpm_core.registry.request import MAX_IMAGES, Task, check_size, parse, resolve
from ddpm_core.runtime.device import choose_device
from ddpm_core.sampling.images import Pixels, png
from ddpm_core.sampling.loading import load_guide, load_moments
from ddpm_core.sampling.sampler import Conditions, ImageSampler

# Limits of one batch, to bound the memory: images, and the pixels of all images.
BATCH = 64
BATCH_PIXELS = 2**18

OnStep = Callable[[int], None]


class Served:
    """A model in memory: validates requests (see request.Request) and draws their images."""

    def __init__(self, folder: Path) -> None:
        """Load a checkpoint folder, which may be deleted afterwards. Raises Corrupt."""
        self._checkpoint = Checkpoint.open(folder)
        ema = self._checkpoint.params.sample.ema
        self._model = self._checkpoint.load(ema, choose_device("auto"))
        self._classes = self._checkpoint.training_data.classes
        self._moments = load_moments(self._checkpoint)
        self._guide = load_guide(self._checkpoint, ema, choose_device("auto"))
        if self._guide is None and self._checkpoint.params.sample.guide is not None:
            raise Corrupt(f"{folder.name} is damaged: its settings require {GUIDE}.")
        self._pixels = self._model.config.image_size**2

    def try_out(self) -> None:
        """Draw one image in one step, to fail now rather than at the first request."""
        prompt = "" if self._model.config.conditioning == "text" else None
        list(self.images(self.tasks([{"n": 1, "steps": 1, "prompt": prompt}])))

    def tasks(self, rows: Sequence[Mapping[str, Any]], max_work: int | None = None) -> list[Task]:
        """Validate a request. Raises UserError with the problems of the first invalid row."""
        if len(rows) > MAX_IMAGES:
            count = len(rows)
            raise UserError(f"The request has {count:,} rows; at most {MAX_IMAGES} are allowed.")
        tasks = [resolve(parse(row), self._checkpoint.params, self._classes) for row in rows]
        check_size(tasks, self._pixels, max_work)
        return tasks

    def images(
        self, tasks: Sequence[Task], on_step: OnStep | None = None
    ) -> Iterator[dict[str, Any]]:
        """Draw the images; yield each one with its number and settings.

        Args:
            tasks: What `tasks` has returned.
            on_step: Called with the step's index after each step of a batch. It may raise an
                exception to stop the drawing.
        """
        for task in tasks:
            yield from self._images(task, on_step)

    def _images(self, task: Task, on_step: OnStep | None) -> Iterator[dict[str, Any]]:
        checkpoint, settings, numbers = self._checkpoint, task.settings, task.numbers
        data = checkpoint.training_data
        sampler = ImageSampler(
            self._model,
            data,
            settings,
            checkpoint.params.diffusion,
            moments=self._moments,
            guide=self._guide,
        )
        conditions = Conditions(self._model.config.conditioning, data, settings)
        labels = conditions.labels(numbers)
        size = max(1, min(BATCH, BATCH_PIXELS // self._pixels))
        for start in range(0, len(numbers), size):
            batch = numbers[start : start + size]
            for number, pixels in zip(batch, sampler.images(batch, on_step), strict=True):
                label = None if labels is None else self._classes[labels[number - numbers.start]]
                yield {
                    "image": _encode(pixels, task.format),
                    "number": number,
                    "seed": settings.seed,
                    "class": label,
                    "sampler": settings.sampler,
                    "steps": settings.steps,
                    "guidance": settings.guidance,
                }


def _encode(pixels: Pixels, kind: str) -> Any:
    """Return a PNG as base64 text, or the pixels as nested lists."""
    return base64.b64encode(png(pixels)).decode() if kind == "png" else pixels.tolist()
