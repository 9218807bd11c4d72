"""How a network is laid out on a device, decided by measurement.

CPU (2 cores with AVX-512 bfloat16, Ho's network and that of the digits, which PyTorch's kernels for
bfloat16 make 1.8 times as fast as float32): channels last makes sampling up to 1.1 times as fast,
with the norms of norms.py, and training 0.85 to 1 times, as the gradient of a norm is slow with
it. Rounding the weights once takes a tenth off an evaluation of Ho's network on 8 images. CUDA:
channels last pays together with torch.compile, which is how networks are trained there.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from ddpm_core.models import cpu as onednn
from ddpm_core.models.layers import Derived, Upsample
from ddpm_core.models.uninitialized import Conv2d

Network = TypeVar("Network", bound=nn.Module)


def layout(device: torch.device) -> torch.memory_format:
    """The order of activations in memory: channels last on CUDA and, without gradients, on CPUs."""
    last = device.type == "cuda" or (device.type == "cpu" and not torch.is_grad_enabled())
    return torch.channels_last if last else torch.contiguous_format


def prepare_model(
    model: Network, device: torch.device, precision: str, training: bool = False
) -> Network:
    """Move the network to the device and lay out its weights there; changes it in place.

    For sampling in "bf16" or "fp16", under autocast, the weights of convolutions and linear layers
    are rounded here, instead of at each evaluation: the output is the same to the last bit. On CPUs
    the products of weights that layers compute with are made here, too, and for bfloat16 the order
    in memory that oneDNN wants; it then rounds the sum that ends a residual block once, not twice.
    """
    model = model.to(device)
    if device.type == "cuda" or (device.type == "cpu" and not training):
        model = model.to(memory_format=torch.channels_last)
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    if half is not None and not training:
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.to(half)
    if device.type == "cpu" and not training:
        packs = half is torch.bfloat16 and onednn.available()
        for module in model.modules():
            if isinstance(module, Derived):
                module.fix()
            if packs and isinstance(module, Conv2d | Upsample):
                module.pack()
    return model
