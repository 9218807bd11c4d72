"""Which class or text each image of a sampling run has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddpm_core import rng
from ddpm_core.config import Sample
from ddpm_core.data.captions import encode
from ddpm_core.errors import UserError
from ddpm_core.rng import Purpose


class Conditions:
    """A table of conditions, and the row that image i takes.

    Those asked for (`sample.classes`, `sample.prompts`) are taken in turn; otherwise an image
    draws its own, as often as they occur in `data`, a checkpoint's record of what it was trained
    on. What image i takes depends on the seed and i alone.
    """

    def __init__(self, conditioning: str, data: dict[str, Any], settings: Sample) -> None:
        self._key = rng.key(Purpose.SAMPLE_CONDITION, settings.seed)
        self._counts: list[int] | None = None
        self._table: Tensor | None = None
        if conditioning == "class":
            names = [str(name) for name in data["classes"]]
            self._counts = None if settings.classes else data["class_counts"]
            self._table = torch.tensor(_rows(names, settings.classes or tuple(names)))
        elif conditioning == "text":
            texts = settings.prompts or [text for text, _ in data["captions"]]
            if not texts:
                raise UserError("sample.prompts: none given, and the checkpoint knows no captions.")
            self._counts = None if settings.prompts else [count for _, count in data["captions"]]
            self._table = torch.from_numpy(encode(list(texts)))

    def take(self, index: Tensor) -> Tensor | None:
        """The conditions of images (n,) int64: labels (n,) int64, or texts (n, 64) uint8."""
        return None if self._table is None else self._table[self._row(index)]

    def labels(self, indices: Sequence[int]) -> NDArray[np.int64] | None:
        """The class of each image, where there are classes."""
        if self._table is None or self._table.dim() > 1:
            return None
        taken: NDArray[np.int64] = self._table[self._row(torch.as_tensor(indices))].numpy()
        return taken

    def _row(self, index: Tensor) -> Tensor:
        if self._counts is None:
            return index % len(self._table if self._table is not None else index)
        edges = torch.cumsum(torch.tensor(self._counts, dtype=torch.float64), 0)
        drawn = rng.uniform(self._key, index, ()).double() * edges[-1]
        return torch.searchsorted(edges, drawn, right=True).clamp(max=len(edges) - 1)


def _rows(names: list[str], wanted: Sequence[str]) -> list[int]:
    unknown = [name for name in wanted if name not in names]
    if unknown:
        raise UserError(
            f"sample.classes: {unknown[0]!r} given; the model knows {', '.join(names)}."
        )
    return [names.index(name) for name in wanted]
