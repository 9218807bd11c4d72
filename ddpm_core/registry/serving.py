"""A loaded model that draws images for requests, in `ddpm serve` and in MLflow's server."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddpm_core.checkpoint import GUIDE, Checkpoint
from ddpm_core.diffusion.editing import Original
from ddpm_core.errors import Corrupt, UserError
from ddpm_core.registry.request import MAX_IMAGES, Task, check_size, parse, resolve
from ddpm_core.runtime.device import choose_device
from ddpm_core.sampling.images import Pixels, png
from ddpm_core.sampling.loading import load_guide, load_moments
from ddpm_core.sampling.noise import Origin
from ddpm_core.sampling.sampler import Conditions, ImageSampler, OnStep

# Limits of one batch, to bound the memory: images, and the pixels of all images.
BATCH = 64
BATCH_PIXELS = 2**18


@dataclass(frozen=True)
class Shot:
    """One image of a task."""

    task: Task
    position: int  # among the images of the task

    @property
    def origin(self) -> Origin:
        """Where the noise of the image comes from."""
        task = self.task
        if task.toward is None:
            return Origin(task.settings.seed, task.numbers[self.position])
        share = self.position / max(1, len(task.numbers) - 1)
        first = task.numbers[0]
        return Origin(task.settings.seed, first, (task.toward, first), share)


def shots_of(tasks: Sequence[Task]) -> list[Shot]:
    """Return the images of tasks, in order."""
    return [Shot(task, position) for task in tasks for position in range(len(task.numbers))]


class Served:
    """A model in memory: validates requests (see request.Request) and draws their images."""

    def __init__(self, folder: Path) -> None:
        """Load a checkpoint folder, which may be deleted afterwards. Raises Corrupt."""
        self.checkpoint = Checkpoint.open(folder)
        ema = self.checkpoint.params.sample.ema
        self._model = self.checkpoint.load(ema, choose_device("auto"))
        self._moments = load_moments(self.checkpoint)
        self._guide = load_guide(self.checkpoint, ema, choose_device("auto"))
        if self._guide is None and self.checkpoint.params.sample.guide is not None:
            raise Corrupt(f"{folder.name} is damaged: its settings require {GUIDE}.")
        self.pixels = self._model.config.image_size**2  # of an image

    @property
    def classes(self) -> list[str]:
        """The names of the classes."""
        return self.checkpoint.training_data.classes

    @property
    def batch_size(self) -> int:
        """The number of images in one batch, at most."""
        return max(1, min(BATCH, BATCH_PIXELS // self.pixels))

    def try_out(self) -> None:
        """Draw one image in one step, to fail now rather than at the first request."""
        prompt = "" if self._model.config.conditioning == "text" else None
        list(self.images(self.tasks([{"n": 1, "steps": 1, "prompt": prompt}])))

    def tasks(self, rows: Sequence[Mapping[str, Any]], max_work: int | None = None) -> list[Task]:
        """Validate a request. Raises UserError with the problems of the first invalid row."""
        if len(rows) > MAX_IMAGES:
            count = len(rows)
            raise UserError(f"The request has {count:,} rows; at most {MAX_IMAGES} are allowed.")
        tasks = [resolve(parse(row), self.checkpoint.params, self.classes) for row in rows]
        check_size(tasks, self.pixels, max_work)
        return tasks

    def images(self, tasks: Sequence[Task]) -> Iterator[dict[str, Any]]:
        """Draw the images of `tasks`; yield each one with its number and settings."""
        for task in tasks:
            shots = shots_of([task])
            for start in range(0, len(shots), self.batch_size):
                yield from self.draw(shots[start : start + self.batch_size])

    def draw(self, shots: Sequence[Shot], on_step: OnStep | None = None) -> list[dict[str, Any]]:
        """Draw images with the same recipe (see `Task`) in one batch; return them like `images`.

        `on_step` is as in `ImageSampler.batch`.
        """
        sampler = ImageSampler(
            self._model,
            self.checkpoint.training_data,
            shots[0].task.settings,
            self.checkpoint.params.diffusion,
            moments=self._moments,
            guide=self._guide,
        )
        condition = self._conditions(shots)
        drawn = sampler.batch([s.origin for s in shots], condition, _original(shots), on_step)
        return [
            _described(shot, _encode(pixels, shot.task.format), label)
            for shot, pixels, label in zip(shots, drawn, self._labels(condition), strict=False)
        ]

    def _labels(self, condition: Tensor | None) -> Iterable[str | None]:
        """Return the name of the class of each image, or None forever if there are no classes."""
        if condition is None or condition.dim() > 1:
            return repeat(None)
        return [self.classes[number] for number in condition.tolist()]

    def _conditions(self, shots: Sequence[Shot]) -> Tensor | None:
        """Return the class or text of each image, or None if the network has no condition."""
        found: list[Tensor] = []
        for _, group in groupby(shots, key=lambda shot: id(shot.task)):
            same = list(group)
            conditions = Conditions(
                self._model.config.conditioning,
                self.checkpoint.training_data,
                same[0].task.settings,
            )
            taken = conditions.take(torch.tensor([shot.origin.number for shot in same]))
            found += [] if taken is None else [taken]
        return torch.cat(found) if found else None


def _original(shots: Sequence[Shot]) -> Original | None:
    """Return the images that a batch starts from. Its recipe is the same for all of them."""
    found = [shot.task.original for shot in shots if shot.task.original is not None]
    if not found:
        return None
    masks = [one.redrawn for one in found if one.redrawn is not None]
    images = torch.cat([one.images for one in found])
    return replace(found[0], images=images, redrawn=torch.cat(masks) if masks else None)


def _described(shot: Shot, image: Any, label: str | None) -> dict[str, Any]:
    """Return an encoded image with what draws it again."""
    settings, origin = shot.task.settings, shot.origin
    toward = origin.toward and {"toward": origin.toward[0], "share": origin.share}
    return {
        "image": image,
        "number": origin.number,
        "seed": origin.seed,
        **(toward or {}),
        "class": label,
        "sampler": settings.sampler,
        "steps": settings.steps,
        "guidance": settings.guidance,
    }


def _encode(pixels: Pixels, kind: str) -> Any:
    """Return a PNG as base64 text, or the pixels as nested lists."""
    return base64.b64encode(png(pixels)).decode() if kind == "png" else pixels.tolist()
