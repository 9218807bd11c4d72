"""What is served, by MLflow or `ddpm serve`: rows of requests in, one row an image out."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE

from ddpm_core.checkpoint import Checkpoint
from ddpm_core.devices import choose_device
from ddpm_core.errors import UserError
from ddpm_core.generate.conditions import Conditions
from ddpm_core.generate.images import ImageSampler
from ddpm_core.images import Pixels, png
from ddpm_core.registry.request import LARGEST, Request, read

BATCH = 64  # images at once, for memory


class Served:
    """Answers requests (see request.FIELDS) with images, their numbers and their settings."""

    def __init__(self, folder: Path) -> None:
        """Read a checkpoint folder, which is not needed afterwards. Raises Corrupt."""
        self._checkpoint = Checkpoint.open(folder)
        ema = self._checkpoint.params.sample.ema
        self._model = self._checkpoint.load(ema, choose_device("auto"))

    def try_out(self) -> None:
        """Draw one image in one step. Raises what a request would."""
        texts = self._model.config.conditioning == "text"
        self.answer([{"n": 1, "steps": 1, "prompt": "" if texts else None}])

    def answer(self, given: Any) -> list[dict[str, Any]]:
        """One dict an image. A mistake in the request is status 400 with a sentence."""
        checkpoint = self._checkpoint
        classes = [str(name) for name in checkpoint.data["classes"]]
        try:
            requests = [read(row, checkpoint.params, classes) for row in _rows(given)]
            total = sum(len(request.numbers) for request in requests)
            if not 1 <= total <= LARGEST:
                raise UserError(f"{total} images are asked for; 1 to {LARGEST} are allowed.")
            return [image for request in requests for image in self._images(request, classes)]
        except UserError as error:
            raise MlflowException(str(error), error_code=INVALID_PARAMETER_VALUE) from error

    def _images(self, request: Request, classes: list[str]) -> Iterable[dict[str, Any]]:
        checkpoint, settings, numbers = self._checkpoint, request.settings, request.numbers
        sampler = ImageSampler(self._model, checkpoint.data, settings, checkpoint.params.diffusion)
        conditions = Conditions(self._model.config.conditioning, checkpoint.data, settings)
        labels = conditions.labels(numbers)
        for start in range(0, len(numbers), BATCH):
            for number, pixels in zip(
                numbers[start:], sampler.images(numbers[start : start + BATCH]), strict=False
            ):
                yield {
                    "image": _encode(pixels, request.format),
                    "number": number,
                    "seed": settings.seed,
                    "class": None if labels is None else classes[labels[number - numbers.start]],
                    "sampler": settings.sampler,
                    "steps": settings.steps,
                    "guidance": settings.guidance,
                }


def _encode(pixels: Pixels, form: str) -> Any:
    return base64.b64encode(png(pixels)).decode() if form == "png" else pixels.tolist()


def _rows(given: Any) -> list[dict[str, Any]]:
    """A table, a dict or a list of dicts as a list of dicts of plain values."""
    if hasattr(given, "to_dict"):
        given = given.to_dict("records")
    if isinstance(given, dict):
        given = [given]
    if not isinstance(given, list) or not all(isinstance(row, dict) for row in given):
        raise UserError("A table or a list of requests is needed, such as [{'n': 4, 'seed': 1}].")
    return [{str(key): _plain(value) for key, value in row.items()} for row in given]


def _plain(value: Any) -> Any:
    """A NumPy number as Python's, an array as a list."""
    return value.tolist() if hasattr(value, "tolist") else value
