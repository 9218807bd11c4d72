"""How a network is carried out on a device, decided by measurement.

CPU (2 cores, bfloat16, Ho's network and the digits'): channels last makes convolutions up to a
tenth faster; in sampling, where norms are computed as in norms.py, 1.0 to 1.1 times the speed; in
training 0.85 to 1.0, as the gradient of a norm is slow with it. CUDA: channels last pays together
with torch.compile (1.5 times), which is how it is trained there.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

Network = TypeVar("Network", bound=nn.Module)


def layout(device: torch.device) -> torch.memory_format:
    """The order of activations in memory: channels last on CUDA and, without gradients, on CPUs."""
    last = device.type == "cuda" or (device.type == "cpu" and not torch.is_grad_enabled())
    return torch.channels_last if last else torch.contiguous_format


def fast_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 faster than float32."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    checks = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    supported = [getattr(torch.cpu, check, lambda: False)() for check in checks]
    return device.type == "cpu" and any(supported)


def prepare_model(
    model: Network, device: torch.device, precision: str, training: bool = False
) -> Network:
    """Move the network to the device and lay out its weights there; changes it in place.

    For sampling in "bf16" or "fp16" under autocast the weights of convolutions and linear layers
    are rounded once, instead of at each evaluation: the output is the same to the last bit.
    """
    model = model.to(device)
    if device.type == "cuda" or (device.type == "cpu" and not training):
        model = model.to(memory_format=torch.channels_last)
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    if half is not None and not training:
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.to(half)
    return model
