"""Load what draws images: the network, the moments of the training images, and the guide."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ddpm_core.checkpoint import GUIDE, MOMENTS, Checkpoint
from ddpm_core.config import Sample
from ddpm_core.diffusion.moments import Moments
from ddpm_core.errors import Corrupt
from ddpm_core.models.config import UNetConfig
from ddpm_core.models.unet import UNet
from ddpm_core.sampling.sampler import ImageSampler
from ddpm_core.storage.files import read_tensors


def load_sampler(
    checkpoint: Checkpoint, settings: Sample, device: torch.device, compiled: bool = False
) -> ImageSampler:
    """Return the sampler of a checkpoint whose weights are on this machine.

    Raises:
        Corrupt: Weights and settings do not match.
        UserError: The network cannot draw with these settings.
    """
    return ImageSampler(
        checkpoint.load(settings.ema, device),
        checkpoint.training_data,
        settings,
        checkpoint.params.diffusion,
        compiled=compiled,
        moments=load_moments(checkpoint),
        guide=load_guide(checkpoint, settings.ema, device),
    )


def load_guide(checkpoint: Checkpoint, ema: float | str, device: torch.device) -> UNet | None:
    """Return the network that guidance leads away from; None if there is none.

    It is that of the checkpoint's `guide`, or in a registered model that of the file GUIDE. `ema`
    is as in `Checkpoint.weights_name`. Raises Corrupt if weights and settings do not match.
    """
    if checkpoint.guide is not None:
        return checkpoint.guide.load(ema, device)
    return checkpoint.load_file(GUIDE, device) if GUIDE in checkpoint.checksums else None


def load_moments(checkpoint: Checkpoint) -> Moments | None:
    """Return the moments of the training images, or None if the prediction uses none.

    Raises Corrupt if they are missing or invalid.
    """
    if not checkpoint.params.diffusion.uses_moments:
        return None
    name = checkpoint.folder.name
    if MOMENTS not in checkpoint.checksums:
        raise Corrupt(f"{name} is damaged: its manifest does not list {MOMENTS}.")
    tensors = read_tensors(checkpoint.folder / MOMENTS)
    return read_moments(tensors, checkpoint.network, f"{name}/{MOMENTS}")


def read_moments(tensors: Mapping[str, Tensor], network: UNetConfig, name: str) -> Moments:
    """Return the moments in a file for the images of a network. Raises Corrupt."""
    try:
        return Moments.from_tensors(tensors, network.in_channels, network.image_size)
    except ValueError as error:
        raise Corrupt(f"{name} is damaged: {error}.") from error
