"""Prepare a network for a device: memory layout, precision and, on CPUs, faster layers.

The choices follow measurements. CPU (2 cores with AVX-512 bfloat16; Ho's network and that of the
digits): PyTorch's kernels for bfloat16 are 1.8 times as fast as those for float32. Channels last
makes sampling up to 1.1 times as fast, with the norms of cpu.py, but training 0.85 to 1 times,
because the gradient of a norm is slow with it. Rounding the weights once takes a tenth off an
evaluation of Ho's network on 8 images. CUDA: channels last pays together with torch.compile, which
is how networks are trained there.
"""

from __future__ import annotations

import torch
from torch import nn

from ddpm_core.models import cpu
from ddpm_core.models.unet import UNet

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def prepare_model(
    model: UNet, device: torch.device, precision: str, training: bool = False
) -> UNet:
    """Move a network to a device and prepare it there for training or sampling, in place.

    Weights, names and results stay the same, except that faster layers round differently. For
    sampling in "bf16" or "fp16", under autocast, the weights of convolutions and linear layers are
    rounded here, instead of at each evaluation: the output is the same to the last bit.
    """
    model = model.to(device)
    on_cpu, on_cuda = device.type == "cpu", device.type == "cuda"
    if on_cuda or (on_cpu and not training):
        model.memory_format = torch.channels_last
        model = model.to(memory_format=torch.channels_last)
    if precision in HALVES and not training:
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.to(HALVES[precision])
    if on_cpu:
        cpu.optimize(model, training)
    return model
