"""The disk and memory that a training run will take."""

from __future__ import annotations

import torch

from ddpm_core.config import Config, Train
from ddpm_core.models.unet import UNet
from ddpm_core.storage.workspace import Workspace
from ddpm_core.training.init import Pictures, network_config

PROGRAM = 750e6  # bytes of a worker on CPUs beside its network: Python, PyTorch (2.15), libraries


def disk_needed(config: Config, parameters: int) -> tuple[int, int]:
    """Bytes of one whole snapshot, and of all that are kept at the end."""
    weights = 4 * parameters * (1 + len(config.train.ema))
    whole = weights + 8 * parameters
    kept, milestones = kept_at_the_end(config.train)
    # One more while it is being written beside the others.
    return whole, (kept + 1) * whole + milestones * weights


def kept_at_the_end(train: Train) -> tuple[int, int]:
    """How many snapshots stay whole, and how many older milestones as weights alone."""
    every = train.snapshot_steps or 1  # a time: any number of steps
    kept, oldest = 1, train.steps
    while kept < train.keep and oldest > min(every, train.milestone_every):
        oldest = max((oldest - 1) // each * each for each in (every, train.milestone_every))
        kept += 1
    return kept, (oldest - 1) // train.milestone_every


def memory_needed(config: Config, parameters: int, processes: int) -> tuple[int, int]:
    """Bytes that a worker takes on its device, activations apart, and the first on the host.

    On the device: weights, gradients, optimizer and averages, the network of the preview, and the
    sums of all workers' gradients; on the host a snapshot while it is being written.
    """
    train = config.train
    copies = 4 + len(train.ema) + (1 if train.grid else 0)
    if train.reduction == "exact":
        copies += 3  # whole numbers of 64 bits, and a sample's gradients or their mean
    elif processes > 1:
        copies += 1
    return 4 * parameters * copies, disk_needed(config, parameters)[0]


def lines(
    config: Config, workspace: Workspace, parameters: int, processes: int, device: torch.device
) -> list[str]:
    """Disk and memory, for people."""
    whole, kept = disk_needed(config, parameters)
    return [
        f"disk        {_size(whole)} a snapshot, at most {_size(kept)} in {workspace.uri}",
        f"memory      {_memory(memory_needed(config, parameters, processes), device)}",
    ]


def _memory(needed: tuple[int, int], device: torch.device) -> str:
    on_device, on_host = needed
    if device.type == "cpu":
        return (
            f"{_size(on_device + on_host)}, {_size(PROGRAM)} for the program itself, and the "
            "activations of a batch; of each worker"
        )
    return (
        f"{_size(on_device)} of each device, and the activations of a batch; {_size(on_host)} of "
        "the host"
    )


def count_parameters(config: Config, data: Pictures) -> int:
    model = UNet(network_config(config, data), device="meta")
    return sum(p.numel() for p in model.parameters())


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
