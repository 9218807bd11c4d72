"""A worker's share of the batch of a step: read, and brought to its device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from ddpm_core.config import Config
from ddpm_core.data.dataset import PackedDataset
from ddpm_core.data.order import batch_indices
from ddpm_core.runtime.distributed import World


@dataclass(frozen=True)
class Batch:
    """A worker's share of the global batch, on its device.

    pixels (b, H, W, C) uint8; condition (b,) int64, (b, 64) uint8 or None; index (b,) int64, the
    places in the global batch, by which every random number is keyed.
    """

    pixels: Tensor
    condition: Tensor | None
    index: Tensor


def next_batch(config: Config, data: PackedDataset, world: World, step: int) -> Batch:
    """This worker's share of the batch that follows step number `step`."""
    size, device = config.train.batch_size, world.device
    share = world.share(size)
    everyone = batch_indices(config.seed, len(data), step, size)
    mine = everyone[share.start : share.stop]
    condition = None
    if config.model.conditioning == "class":
        condition = sent(data.labels[mine], device)
    elif config.model.conditioning == "text" and data.captions is not None:
        condition = sent(data.captions[mine], device)
    pixels = sent(data.take(mine), device)
    return Batch(pixels, condition, torch.arange(share.start, share.stop, device=device))


def sent(array: NDArray[Any], device: torch.device) -> Tensor:
    """A copy on the device. A GPU fetches it from pinned memory while it still works."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
