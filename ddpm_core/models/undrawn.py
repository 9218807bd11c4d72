"""Layers that draw no first weights: what is to be overwritten costs no time and no randomness."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Conv2d(nn.Conv2d):
    """A convolution whose weights are undefined until they are set."""

    packed: Tensor | None = None

    def reset_parameters(self) -> None:
        """Leave the memory as it is."""

    @torch.no_grad()
    def pack(self) -> None:
        """Lay bfloat16 weights out as oneDNN reads them; otherwise it does so at each evaluation.

        The output is the same to the last bit; it takes 4 to 6 % off an evaluation of Ho's network
        on 4 images. For weights that change no more, by the operations that torch.compile uses;
        where they are lacking all stays as it is.
        """
        operations = torch.ops.mkldnn
        if hasattr(operations, "_convolution_pointwise") and operations._is_mkldnn_bf16_supported():
            self.packed = operations._reorder_convolution_weight(
                self.weight, self.padding, self.stride, self.dilation, self.groups, None
            )

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is None:
            return super().forward(x)
        x = x.to(self.weight.dtype)
        place = self.padding, self.stride, self.dilation, self.groups
        convolved: Tensor = torch.ops.mkldnn._convolution_pointwise(
            x, self.packed, self.bias, *place, "none", [], ""
        )
        return convolved


class Linear(nn.Linear):
    """A linear layer whose weights are undefined until they are set."""

    def reset_parameters(self) -> None:
        """Leave the memory as it is."""


class Embedding(nn.Embedding):
    """An embedding whose vectors are undefined until they are set."""

    def reset_parameters(self) -> None:
        """Leave the memory as it is."""
