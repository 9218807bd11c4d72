"""What a training run will take: printed before it starts, and by --dry-run."""

from __future__ import annotations

import math

import torch
import yaml

from ddpm_core.config import Config
from ddpm_core.data.dataset import PackedDataset, open_dataset
from ddpm_core.devices import choose_device
from ddpm_core.models.unet import UNet
from ddpm_core.training.execution import Execution
from ddpm_core.training.initial import network_config
from ddpm_core.workspace import Workspace


def disk_needed(config: Config, parameters: int) -> tuple[int, int]:
    """Bytes of one whole snapshot, and of all that are kept at the end."""
    weights = 4 * parameters * (1 + len(config.train.ema))
    whole = weights + 8 * parameters
    train = config.train
    milestones = math.ceil(train.steps / train.milestone_every)
    every = min(train.snapshot_steps or 1, train.milestone_every)  # a time: any number of steps
    kept = min(train.keep, math.ceil(train.steps / every))
    # One more while it is being written beside the others.
    return whole, (kept + 1) * whole + max(0, milestones - kept) * weights


def memory_needed(config: Config, parameters: int, processes: int) -> tuple[int, int]:
    """Bytes that a worker takes on its device, activations apart, and the first on the host.

    On the device: weights, gradients, optimizer and averages, the network of the preview, and the
    sums of all workers' gradients; on the host a snapshot while it is being written.
    """
    train = config.train
    copies = 4 + len(train.ema) + (1 if train.grid else 0)
    if train.reduction == "exact":
        copies += 3  # whole numbers of 64 bits, and what is added to them
    elif processes > 1:
        copies += 1
    return 4 * parameters * copies, disk_needed(config, parameters)[0]


def describe(config: Config, workspace: Workspace, processes: int) -> str:
    """The resolved settings, and the steps, disk, memory and devices that they need."""
    data = open_dataset(workspace)
    device = choose_device(config.device)
    execution = Execution.choose(config.train, device)
    parameters = count_parameters(config, data)
    whole, kept = disk_needed(config, parameters)
    train = config.train
    lines = [
        yaml.safe_dump(config.dump(), sort_keys=False).rstrip(),
        "---",
        f"data        {len(data)} images of {data.image_size}x{data.image_size}x{data.channels}, "
        f"fingerprint {data.fingerprint}",
        f"network     {parameters:,} parameters",
        f"steps       {train.steps} of {train.batch_size} images, "
        f"{train.steps * train.batch_size / len(data):,.1f} epochs",
        f"disk        {_size(whole)} a snapshot, at most {_size(kept)} in {workspace.uri}",
        f"memory      {_memory(memory_needed(config, parameters, processes), device)}",
        f"devices     {processes} x {device.type}, precision {execution.precision}, "
        f"compile {'on' if execution.compile else 'off'}",
    ]
    return "\n".join(lines)


def _memory(needed: tuple[int, int], device: torch.device) -> str:
    on_device, on_host = needed
    if device.type == "cpu":
        return f"{_size(on_device + on_host)}, and the activations of a batch; of each worker"
    return (
        f"{_size(on_device)} of each device, and the activations of a batch; {_size(on_host)} of "
        "the host"
    )


def count_parameters(config: Config, data: PackedDataset) -> int:
    model = UNet(network_config(config, data), device="meta")
    return sum(p.numel() for p in model.parameters())


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
