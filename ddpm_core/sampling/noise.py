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

    With `toward`, another seed and number, it is a share of the way to the noise of that.
    """

    seed: int
    number: int
    toward: tuple[int, int] | None = None
    share: float = 0.0  # 0..1


class BatchNoise:
    """The noise of images (n, *shape); row i depends on the origin of image i alone."""

    def __init__(
        self, origins: Sequence[Origin], shape: Sequence[int], device: torch.device
    ) -> None:
        self._shape, self._device = shape, device
        self._start = self._address([(one.seed, one.number) for one in origins])
        self._end: tuple[Key, Tensor] | None = None
        if any(one.toward for one in origins):
            self._end = self._address([one.toward or (one.seed, one.number) for one in origins])
            shares = torch.tensor([one.share for one in origins], device=device)
            self._angle = (shares * (math.pi / 2)).view(-1, *[1] * len(shape))

    def __call__(self, step: int, stream: int = 0, /) -> Tensor:
        """Return standard normal numbers (n, *shape); `step` and `stream` are those of `rng.bits`.

        Between two origins they are cos(a) n + sin(a) n', with the noise n and n' of both and
        a = share pi / 2: standard normal for every share, and exactly n at 0.
        """
        key, index = self._start
        noise = rng.normal(key, index, self._shape, step, stream)
        if self._end is None:
            return noise
        key, index = self._end
        end = rng.normal(key, index, self._shape, step, stream)
        return self._angle.cos() * noise + self._angle.sin() * end

    def _address(self, places: Sequence[tuple[int, int]]) -> tuple[Key, Tensor]:
        """Return the keys and the indices of seeds and numbers."""
        seeds = [seed for seed, _ in places]
        index = torch.tensor([number for _, number in places], device=self._device)
        if len(set(seeds)) == 1:
            return rng.key(Purpose.SAMPLE, seeds[0]), index
        return rng.keys(Purpose.SAMPLE, seeds, self._device), index
