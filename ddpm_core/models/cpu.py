"""Convolutions in bfloat16 on CPUs, their weights laid out once as oneDNN reads them.

PyTorch lays weights out anew at each evaluation. For those that change no more these are the
operations that torch.compile uses. Packed convolutions take 4 to 6 % off an evaluation of Ho's
network; sums within them and packed doubling another 5 to 6 %, of those for digits too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

_OPERATIONS = (
    "_convolution_pointwise",
    "_convolution_transpose_pointwise",
    "_reorder_convolution_weight",
    "_reorder_convolution_transpose_weight",
)


class Convolution(Protocol):
    """Of images; `onto`, of the shape of what comes out, is added to it."""

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor: ...


def available() -> bool:
    """Whether this PyTorch and this processor have the operations."""
    operations = torch.ops.mkldnn
    known = all(hasattr(operations, name) for name in _OPERATIONS)
    return known and bool(operations._is_mkldnn_bf16_supported())


@torch.no_grad()
def packed(layer: nn.Conv2d) -> Convolution:
    """What a layer with bfloat16 weights does, to the last bit; a sum with it is rounded once."""
    place = layer.padding, layer.stride, layer.dilation, layer.groups
    weight = torch.ops.mkldnn._reorder_convolution_weight(layer.weight, *place, None)
    convolve = torch.ops.mkldnn._convolution_pointwise

    def run(x: Tensor, onto: Tensor | None = None) -> Tensor:
        x, others = x.bfloat16(), (weight, layer.bias, *place)
        if onto is None:
            convolved: Tensor = convolve(x, *others, "none", [], "")
        else:
            convolved = convolve.binary(x, onto.bfloat16(), *others, "add", 1.0, None, [], None)
        return convolved

    return run


@torch.no_grad()
def packed_transposed(
    weight: Tensor, bias: Tensor | None, stride: int, padding: int
) -> Callable[[Tensor], Tensor]:
    """What conv_transpose2d does with bfloat16 weights, (in, out, height, width)."""
    place = (padding,) * 2, (0, 0), (stride,) * 2, (1, 1), 1
    weight = torch.ops.mkldnn._reorder_convolution_transpose_weight(weight, *place, None)

    def run(x: Tensor) -> Tensor:
        convolve = torch.ops.mkldnn._convolution_transpose_pointwise
        convolved: Tensor = convolve(x.bfloat16(), weight, bias, *place, "none", [], "")
        return convolved

    return run
