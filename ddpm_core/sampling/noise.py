"""The noise of a batch whose images may have different seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddpm_core import rng
from ddpm_core.rng import Key, Purpose


@dataclass(frozen=True)
class Origin:
    """Where the noise of an image comes from: a seed and a number.

    With a second seed `toward`, the noise is the given share of the way from one to the other.
    """

    seed: int
    number: int
    toward: int | None = None
    share: float = 0.0  # 0..1


class BatchNoise:
    """Draws the noise of images; row i depends on the origin of image i alone."""

    def __init__(self, origins: Sequence[Origin], device: torch.device) -> None:
        self._index = torch.tensor([one.number for one in origins], device=device)
        self._from = _key([one.seed for one in origins], device)
        self._toward: Key | None = None
        if any(one.toward is not None for one in origins):
            ends = [one.seed if one.toward is None else one.toward for one in origins]
            self._toward = _key(ends, device)
            shares = torch.tensor([one.share for one in origins], device=device)
            self._angle = shares.mul_(math.pi / 2)

    def __len__(self) -> int:
        return len(self._index)

    def draw(self, shape: Sequence[int], step: int, stream: int = 0) -> Tensor:
        """Return standard normal numbers (n, *shape); `step` and `stream` are those of `rng.bits`.

        Between two seeds they are cos(a) n + sin(a) n', with the noise n and n' of the seeds and
        a = share pi / 2: standard normal for every share, and exactly n at 0.
        """
        noise = rng.normal(self._from, self._index, shape, step, stream)
        if self._toward is None:
            return noise
        end = rng.normal(self._toward, self._index, shape, step, stream)
        angle = self._angle.view(-1, *[1] * len(shape))
        return angle.cos() * noise + angle.sin() * end


def _key(seeds: Sequence[int], device: torch.device) -> Key:
    if len(set(seeds)) == 1:
        return rng.key(Purpose.SAMPLE, seeds[0])
    return rng.keys(Purpose.SAMPLE, seeds, device)
