"""Set the weights a network starts from, as a function of named uniform numbers.

Each weight depends on its name alone, so the start is the same whatever the order of construction,
the number of threads or the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ddpm_core.models.layers import JoinedLinear
from ddpm_core.models.unet import Attention, CrossAttention, ResidualBlock, UNet

Uniform = Callable[[str, tuple[int, ...]], Tensor]  # (name, shape) -> float32 in [0, 1)


@torch.no_grad()
def initialise(network: UNet, uniform: Uniform) -> None:
    """Set every weight as Ho's code does, from `uniform(name, shape)`.

    Weights are uniform with variance 1 / mean of fan-in and fan-out, norms 1, biases 0. The last
    layer of each residual branch and of the network starts at 0 (1e-10 in Ho's code), so that the
    untrained network predicts 0 and each block is the identity. Embeddings have variance 1.
    """
    last = _last_layers(network)
    for prefix, module in network.named_modules():
        for name, weight in module.named_parameters(prefix, recurse=False):
            if isinstance(module, nn.GroupNorm | nn.LayerNorm):
                weight.fill_(1.0 if name.endswith("weight") else 0.0)
            elif module in last or name.endswith("bias"):
                weight.zero_()
            else:
                limit = _limit(module).to(weight.device)
                numbers = uniform(name, tuple(weight.shape)).to(weight.device)
                weight.copy_((2.0 * numbers - 1.0) * limit)


def _last_layers(network: UNet) -> set[nn.Module]:
    last: set[nn.Module] = {network.conv_out}
    for module in network.modules():
        if isinstance(module, ResidualBlock):
            last.add(module.conv2)
        elif isinstance(module, Attention | CrossAttention):
            last.add(module.out)
    return last


def _limit(module: nn.Module) -> Tensor:
    """Return sqrt(3 variance), the largest weight: a number, or (rows, 1) for joined layers."""
    if isinstance(module, nn.Conv2d):
        area = module.kernel_size[0] * module.kernel_size[1]
        return torch.tensor(math.sqrt(6 / (area * (module.in_channels + module.out_channels))))
    if isinstance(module, nn.Linear):
        sizes = module.sizes if isinstance(module, JoinedLinear) else [module.out_features]
        outputs = torch.tensor([float(size) for size in sizes for _ in range(size)])
        return (6 / (module.in_features + outputs)).sqrt()[:, None]
    return torch.tensor(math.sqrt(3.0))
