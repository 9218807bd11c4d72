"""What a training run will take, before it starts and before its data are prepared: --dry-run."""

from __future__ import annotations

from dataclasses import dataclass

import yaml

from ddpm_core.config import Config
from ddpm_core.data.dataset import PackedDataset, open_dataset
from ddpm_core.errors import UserError
from ddpm_core.interop.unet2d import from_unet
from ddpm_core.models.unet import UNet
from ddpm_core.runtime.device import choose_device
from ddpm_core.storage.workspace import DATA, Workspace
from ddpm_core.text import counted
from ddpm_core.training import budget
from ddpm_core.training.init import check_data_fits, check_init_stays, network_config
from ddpm_core.training.optim import Execution
from ddpm_core.training.warm_start import check_origin, open_origin

# Sources that are known before they are prepared: channels, and how many classes they have.
KNOWN = {"digits": (1, 10), "cifar10": (3, 10), "dtd": (3, 47)}
ASSUMED = (3, 10)  # of other sources


@dataclass(frozen=True)
class Expected:
    """The pictures that `ddpm prepare` will make, as far as the settings say."""

    image_size: int
    channels: int
    classes: list[str]
    assumed: str  # what they do not say, in words


def describe(config: Config, workspace: Workspace, processes: int) -> str:
    """The resolved settings, and the steps, disk, memory and devices that they need."""
    data = None
    if workspace.storage.names(DATA):
        data = open_dataset(workspace)
        check_data_fits(config, data)
    origin = None
    if config.train.init is not None:
        check_init_stays(config, workspace)
        origin = open_origin(config)
    pictures = data or expected(config, origin.network.in_channels if origin else ASSUMED[0])
    network = network_config(config, pictures)
    begins = ""
    if origin:
        network = network.with_details(origin.network)
        note = check_origin(origin, network, config)
        begins = f", starts with the weights of {config.train.init}. {note}".rstrip()
    device = choose_device(config.device)
    execution = Execution.choose(config.train, device)
    parameters = budget.count_parameters(config, pictures)
    lines = [
        yaml.safe_dump(config.record(), sort_keys=False).rstrip(),
        "---",
        f"data        {_pictures(pictures)}",
        f"network     {parameters:,} parameters{begins}",
        f"diffusers   {exportable(UNet(network, device='meta'))}",
        f"steps       {config.train.steps} of {config.train.batch_size} images, "
        f"{_epochs(config, data)}",
        *budget.lines(config, workspace, parameters, processes, device),
        f"devices     {processes} x {device.type}, precision {execution.precision}, "
        f"compile {'on' if execution.compile else 'off'}",
    ]
    return "\n".join(lines)


def expected(config: Config, channels: int = ASSUMED[0]) -> Expected:
    """What the settings say of the pictures to come; `channels` is assumed where they don't."""
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
    return Expected(prepare.image_size, channels, names, " and ".join(assumed))


def exportable(network: UNet) -> str:
    """Whether diffusers will take the trained network, or why not."""
    try:
        from_unet(network)
    except UserError as error:
        return str(error)
    return "This network can be exported."


def _pictures(found: PackedDataset | Expected) -> str:
    shape = f"images of {found.image_size}x{found.image_size}x{found.channels}"
    if isinstance(found, PackedDataset):
        return f"{len(found)} {shape}, fingerprint {found.fingerprint}"
    assumed = f", if they have {found.assumed}" if found.assumed else ""
    return f"waits for `ddpm prepare`; below is for {shape}{assumed}"


def _epochs(config: Config, data: PackedDataset | None) -> str:
    if data is None:
        return "how many epochs waits for `ddpm prepare`"
    return f"{config.train.steps * config.train.batch_size / len(data):,.1f} epochs"
