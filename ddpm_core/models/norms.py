"""GroupNorm followed by SiLU, where most of the time that is not convolution goes.

Convolutions on CPUs are fastest with channels last in memory, where PyTorch's own GroupNorm takes
up to twenty times as long as with channels first. Here it is written as sums and products over
(B, H * W, C) in float32, whose kernels are also faster than those for bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def group_count(channels: int) -> int:
    """Groups of a GroupNorm: the largest divisor of `channels` up to min(32, channels / 4).

    A group of one channel would erase the time embedding, which is added just before a norm.
    Ho's 128 channels keep their 32 groups.
    """
    most = max(1, min(32, channels // 4))
    return next(groups for groups in range(most, 0, -1) if channels % groups == 0)


class Norm(nn.GroupNorm):
    """GroupNorm of `x + shift`, then SiLU where `active`; eps is 1e-6 as in Ho's networks."""

    def __init__(self, channels: int, active: bool = True) -> None:
        super().__init__(group_count(channels), channels, eps=1e-6)
        self.active = active

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        """(B, C, H, W), (B, C) or None -> (B, C, H, W)."""
        if x.device.type == "cpu" and x.is_contiguous(memory_format=torch.channels_last):
            batch, channels, height, width = x.shape
            pixels = x.permute(0, 2, 3, 1).view(batch, height * width, channels)
            options = self.num_groups, self.eps, self.active
            normed: Tensor = _ChannelsLast.apply(pixels, shift, self.weight, self.bias, options)
            return normed.view(batch, height, width, channels).permute(0, 3, 1, 2)
        if shift is not None:
            x = x + shift[:, :, None, None]
        x = functional.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
        return functional.silu(x) if self.active else x


class _ChannelsLast(torch.autograd.Function):
    """The same for `x` (B, N, C); keeps `x` alone and computes the rest again for the gradient.

    With m and r the mean and 1 / standard deviation of a group, the output is SiLU(a x + b),
    a = r weight, b = bias + (shift - m) a. What is one number a channel is held as (B, groups,
    channels of a group), what is one a group as (B, groups, 1).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        shift: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        options: tuple[int, float, bool],
    ) -> Tensor:
        (batch, pixels, channels), (groups, eps, active) = x.shape, options
        size = channels // groups
        wide = x.float()
        y = wide * wide
        total, squares = wide.sum(1).view(batch, groups, size), y.sum(1).view(batch, groups, size)
        moved, sums = None, total
        if shift is not None:
            moved = shift.float().reshape(batch, groups, size)
            sums = torch.add(total, moved, alpha=pixels)
            squares = squares.addcmul_(moved, total + sums)
        mean = sums.mean(2, keepdim=True).div_(pixels)
        rstd = squares.mean(2, keepdim=True).div_(pixels).addcmul_(mean, mean, value=-1)
        rstd = rstd.clamp_(min=0.0).add_(eps).rsqrt_()
        centre = -mean if moved is None else moved - mean
        scale = rstd * weight.view(groups, size)
        offset = torch.addcmul(bias.view(groups, size), centre, scale)
        torch.addcmul(_row(offset), wide, _row(scale), out=y)
        if active:
            functional.silu(y, inplace=True)
        ctx.save_for_backward(x, total, centre, rstd, scale, offset, weight)
        ctx.active, ctx.shift_type = active, None if shift is None else shift.dtype
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, total, centre, rstd, scale, offset, weight = ctx.saved_tensors
        pixels, grouped = x.shape[1], scale.shape
        wide, gradient = x.float(), gradients[0].float()
        work = torch.addcmul(_row(offset), wide, _row(scale))
        if ctx.active:
            gradient = torch.ops.aten.silu_backward(gradient, work)
        of_bias = gradient.sum(1).view(grouped)
        of_weight = torch.mul(gradient, wide, out=work).sum(1).view(grouped)
        of_weight = of_weight.addcmul_(centre, of_bias).mul_(rstd)
        weight = weight.view(grouped[1:]) / -pixels
        slope = (of_weight * weight).mean(2, keepdim=True).mul_(rstd * rstd)
        constant = (of_bias * weight).mean(2, keepdim=True).mul_(rstd)
        constant = torch.addcmul(constant, slope, centre).expand(grouped)
        torch.addcmul(_row(constant), wide, _row(slope.expand(grouped)), out=work)
        work.addcmul_(gradient, _row(scale))
        of_shift = None
        if ctx.shift_type is not None:
            of_shift = (scale * of_bias).addcmul_(slope, total).add_(constant, alpha=pixels)
            of_shift = of_shift.flatten(1).to(ctx.shift_type)
        return work.to(x.dtype), of_shift, of_weight.sum(0).view(-1), of_bias.sum(0).view(-1), None


def _row(values: Tensor) -> Tensor:
    """(B, groups, channels of a group) -> (B, 1, C)."""
    return values.reshape(len(values), 1, -1)
