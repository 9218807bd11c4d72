"""The plan of a training run, before it starts and before its data is prepared: --dry-run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import yaml

from ddpm_core.config import Config, Train
from ddpm_core.data.dataset import PackedDataset, open_dataset
from ddpm_core.interop.diffusers import refusal
from ddpm_core.models.config import UNetConfig
from ddpm_core.models.unet import UNet
from ddpm_core.runtime.device import choose_device
from ddpm_core.storage.workspace import DATA, Workspace
from ddpm_core.text import counted
from ddpm_core.training.init import (
    ImageShape,
    check_data_fits,
    check_init_stays,
    check_origin,
    network_config,
    open_origin,
)
from ddpm_core.training.optim import Execution

# Channels and number of classes of the sources whose images are known before they are prepared.
KNOWN = {"digits": (1, 10), "cifar10": (3, 10), "dtd": (3, 47)}
ASSUMED = (3, 10)  # for all other sources

PROGRAM = 750e6  # bytes of a CPU worker without its network: Python, PyTorch 2.15 and libraries


@dataclass(frozen=True)
class ExpectedImages:
    """The images that `ddpm prepare` will make, as far as the settings determine them."""

    image_size: int
    channels: int
    classes: list[str]
    assumed: str  # which properties are assumed, in words; "" if none


def describe(config: Config, workspace: Workspace, processes: int) -> str:
    """Return the resolved settings, and the steps, disk, memory and devices that they need."""
    data = None
    if workspace.storage.names(DATA):
        data = open_dataset(workspace)
        check_data_fits(config, data)
    origin = None
    if config.train.init is not None:
        check_init_stays(config, workspace)
        origin = open_origin(config)
    images = data or expected_images(config, origin.network.in_channels if origin else ASSUMED[0])
    network = network_config(config, images)
    warm_start = ""
    if origin:
        network = network.with_details(origin.network)
        note = check_origin(origin, network, config)
        warm_start = f", starts with the weights of {config.train.init}. {note}".rstrip()
    device = choose_device(config.device)
    execution = Execution.choose(config.train, device)
    parameters = count_parameters(config, images)
    snapshot, kept = disk_needed(config, parameters)
    lines = [
        yaml.safe_dump(config.record(), sort_keys=False).rstrip(),
        "---",
        f"data        {_described(images)}",
        f"network     {parameters:,} parameters{warm_start}",
        f"diffusers   {exportable(config, network)}",
        f"steps       {config.train.steps} of {config.train.batch_size} images, "
        f"{_epochs(config, data)}",
        f"disk        {_size(snapshot)} per snapshot, up to {_size(kept)} in {workspace.uri}",
        f"memory      {_memory(memory_needed(config, parameters, processes), device)}",
        f"devices     {processes} x {device.type}, precision {execution.precision}, "
        f"compile {'on' if execution.compile else 'off'}",
    ]
    return "\n".join(lines)


def expected_images(config: Config, channels: int = ASSUMED[0]) -> ExpectedImages:
    """Return what the settings say about the images; assumes `channels` if they do not."""
    prepare, assumed = config.prepare, []
    known = KNOWN.get(prepare.source)
    channels, count = known or (channels, ASSUMED[1])
    if prepare.channels != "auto":
        channels = prepare.channels
    elif known is None:
        assumed.append(f"{channels} channels")
    if prepare.classes is not None:
        count = len(prepare.classes)
    elif known is None and config.model.conditioning == "class":
        assumed.append(counted(count, "class"))
    names = [str(number) for number in range(count)]
    return ExpectedImages(prepare.image_size, channels, names, " and ".join(assumed))


def exportable(config: Config, network: UNetConfig) -> str:
    """Return whether diffusers supports the network and its process, or why not."""
    why_not = refusal(network, config.diffusion, config.sample.variance)
    return why_not or "This network can be exported."


def count_parameters(config: Config, data: ImageShape) -> int:
    """Return the number of weights of the network, without allocating them."""
    model = UNet(network_config(config, data), device="meta")
    return sum(p.numel() for p in model.parameters())


def disk_needed(config: Config, parameters: int) -> tuple[int, int]:
    """Return the bytes of one full snapshot, and of all that a run keeps at most."""
    weights = 4 * parameters * (1 + len(config.train.ema))
    full = weights + 8 * parameters
    kept, milestones = kept_at_the_end(config.train)
    # One more than `kept`, since a new snapshot is written before an old one is removed.
    return full, (kept + 1) * full + milestones * weights


def kept_at_the_end(train: Train) -> tuple[int, int]:
    """Return how many full snapshots remain, and how many older milestones with weights only."""
    every = train.snapshot_steps or 1  # snapshot_every may be a time, which is any number of steps
    kept, oldest = 1, train.steps
    while kept < train.keep and oldest > min(every, train.milestone_every):
        oldest = max((oldest - 1) // each * each for each in (every, train.milestone_every))
        kept += 1
    return kept, (oldest - 1) // train.milestone_every


def memory_needed(config: Config, parameters: int, processes: int) -> tuple[int, int]:
    """Return the bytes of a worker on its device without activations, and of rank 0 on the host.

    The device holds the weights, gradients, optimizer state and averages, the network of the grid,
    and the summed gradients of all workers. The host holds a snapshot while it is written.
    """
    train = config.train
    # Weights, gradients and Adam's two averages; the averages of the weights; the grid's network.
    copies = 4 + len(train.ema) + (1 if train.grid else 0)
    if train.reduction == "exact":
        copies += 3  # 64-bit sums (2), and one sample's gradients or their mean (1)
    elif processes > 1:
        copies += 1
    return 4 * parameters * copies, disk_needed(config, parameters)[0]


def _described(images: PackedDataset | ExpectedImages) -> str:
    shape = f"images of {images.image_size}x{images.image_size}x{images.channels}"
    if isinstance(images, PackedDataset):
        return f"{len(images)} {shape}, fingerprint {images.fingerprint}"
    assumed = f", assuming {images.assumed}" if images.assumed else ""
    return f"waits for `ddpm prepare`; the lines below are for {shape}{assumed}"


def _epochs(config: Config, data: PackedDataset | None) -> str:
    if data is None:
        return "number of epochs known after `ddpm prepare`"
    return f"{config.train.steps * config.train.batch_size / len(data):,.1f} epochs"


def _memory(needed: tuple[int, int], device: torch.device) -> str:
    on_device, on_host = needed
    if device.type == "cpu":
        return (
            f"per worker {_size(on_device + on_host)}, {_size(PROGRAM)} for the program itself, "
            "and the activations of a batch"
        )
    return (
        f"{_size(on_device)} and the activations of a batch per device; {_size(on_host)} on the "
        "host"
    )


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
