"""Sampling that starts from given images, or keeps part of them.

SDEdit (Meng et al. 2022, "SDEdit: guided image synthesis and editing with stochastic differential
equations", algorithm 1) adds noise up to a share of the time and denoises from there. RePaint
(Lugmayr et al. 2022, "RePaint: inpainting using denoising diffusion probabilistic models",
algorithm 1) redraws the pixels under a mask. Both work with every sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from ddpm_core.diffusion.predictions import Prediction
from ddpm_core.diffusion.process import Schedule, q_sample, scales
from ddpm_core.diffusion.samplers import (
    CLEAN,
    Denoise,
    Level,
    Previous,
    Rule,
    SamplerSettings,
    prepare,
    run,
)

# The streams of noise. The first is that of `samplers.sample`, so that an image which is redrawn
# completely is the one that `sample` draws.
SAMPLER, KNOWN, RETURN = 0, 1, 2
STREAMS = 3


class Noise(Protocol):
    """The noise of update i, 1..steps, for one of STREAMS uses, (B, C, H, W); 0 is the start."""

    def __call__(self, step: int, stream: int = 0, /) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Original:
    """Images to start from, and what to keep of them.

    Attributes:
        images: Float (B, C, H, W) in [-1, 1].
        strength: The share of the time up to which noise is added, 0..1. 0 returns the images; with
            1 sampling starts from noise alone.
        redrawn: Bool (B, 1, H, W), True where pixels are drawn and False where they are kept. None:
            all are drawn.
        passes: How often each stretch of `length` updates is drawn, at least 1 (the r of RePaint).
            Used with `redrawn`.
        length: Updates that a new pass goes back, at least 1 (the j of RePaint). None: a 25th of
            all, as in the paper.
    """

    images: Tensor
    strength: float = 1.0
    redrawn: Tensor | None = None
    passes: int = 5
    length: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.strength <= 1.0:
            raise ValueError(f"strength: got {self.strength}; must be from 0 to 1.")
        for name, value in (("passes", self.passes), ("length", self.length)):
            if value is not None and value < 1:
                raise ValueError(f"{name}: got {value}; must be at least 1.")

    def take(self, rows: Tensor) -> Original:
        """Return the originals of some rows, int64 (n,), on the device of `rows`."""
        masks = self.redrawn if self.redrawn is None else self.redrawn.to(rows.device)[rows]
        return replace(self, images=self.images.to(rows.device)[rows], redrawn=masks)


def edit(
    network: Callable[[Tensor, Tensor], Tensor],
    schedule: Schedule,
    prediction: Prediction,
    settings: SamplerSettings,
    noise: Noise,
    original: Original,
    on_step: Callable[[int], None] | None = None,
) -> Tensor:
    """Draw images x0 from given ones, (B, C, H, W), in the dtype of the noise.

    The updates of the settings, but not more than there are timesteps, are spread over the time
    that `strength` leaves. Pixels that are not redrawn are exactly those of the original.

    Args:
        network: As in `samplers.sample`, and so are `prediction` and `on_step`.
        noise: Row b must depend on image b alone if results are not to depend on the batch.

    Raises:
        ValueError: A setting is invalid or does not fit the process.
    """
    start = noise(0, SAMPLER)
    images = original.images.to(start.dtype)
    timesteps = timesteps_of(original.strength, schedule.timesteps)
    if timesteps == 0:
        return images
    if original.strength < 1.0:
        settings = replace(settings, steps=min(settings.steps, timesteps))
    levels, rule, denoise = prepare(network, schedule.first(timesteps), prediction, settings)
    if original.strength < 1.0:
        start = q_sample(images, start, levels[0].alpha_bar)
    if original.redrawn is None:
        return run(rule, denoise, start, levels, noise, on_step)
    kept = replace(original, images=images)
    return _repaint(rule, denoise, start, levels, noise, kept, original.redrawn, on_step)


def timesteps_of(strength: float, timesteps: int) -> int:
    """Return how many of T timesteps a strength keeps: 0 for 0, otherwise 2..T."""
    return 0 if strength == 0.0 else max(2, round(strength * timesteps))


def route(levels: int, original: Original) -> list[int]:
    """Return the positions that a mask visits, from 0 (the noisiest level) to `levels` (clean).

    A step to the next position is an update, and a step back adds noise again. Counting from the
    last noisy level, every `length` positions lead back `passes` - 1 times. Lugmayr et al. (2022),
    appendix B, go back one position at a time, which has the same distribution.
    """
    length = original.length or max(1, round(levels / 25))
    left = dict.fromkeys(range(levels - 1, length - 1, -length), original.passes - 1)
    position, visited = 0, [0]
    while position < levels:
        if left.get(position, 0):
            left[position] -= 1
            position -= length
        else:
            position += 1
        visited.append(position)
    return visited


@torch.no_grad()
def _repaint(
    rule: Rule,
    denoise: Denoise,
    x: Tensor,
    levels: Sequence[Level],
    noise: Noise,
    original: Original,
    redrawn: Tensor,
    on_step: Callable[[int], None] | None,
) -> Tensor:
    """Apply a rule along `route`. After each update, kept pixels become the given ones."""
    ladder, count = [*levels, CLEAN], 0
    previous: Previous = None
    for at, to in pairwise(route(len(levels), original)):
        level, target = ladder[at], ladder[to]
        if to < at:
            x = _noisier(x, level, target, noise(count, RETURN))
            previous = None  # a second-order rule must not continue from a less noisy level
            continue
        count += 1
        x, previous = rule(denoise, x, level, target, previous, partial(noise, count, SAMPLER))
        known = q_sample(original.images, noise(count, KNOWN), target.alpha_bar)
        x = torch.where(redrawn, x, known)
        if on_step is not None:
            on_step(count)
    return x


def _noisier(x: Tensor, level: Level, target: Level, noise: Tensor) -> Tensor:
    """Return x_t at the noisier `target`, from q(x_t | x) of the forward process."""
    signal, sigma = scales(target.alpha_bar / level.alpha_bar, x)
    return signal * x + sigma * noise
