"""GroupNorm followed by SiLU, where most of the time that is not convolution goes."""

from __future__ import annotations

from itertools import repeat

import torch
from torch import Tensor, nn
from torch.nn import functional

CACHED = 2**18  # elements, 1 MB in float32; measured with 1 MB of second-level cache a core


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
        if _by_pixels(x):
            batch, channels, height, width = x.shape
            pixels = x.permute(0, 2, 3, 1).view(batch, height * width, channels)
            normed = self._in_cache(pixels, shift)
            return normed.view(batch, height, width, channels).permute(0, 3, 1, 2)
        if shift is not None:
            x = x + shift[:, :, None, None]
        x = functional.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
        return functional.silu(x) if self.active else x

    def _in_cache(self, x: Tensor, shift: Tensor | None) -> Tensor:
        """`_pixels` on as many images at a time as keep what it computes near the processor."""
        images = max(1, CACHED // (x.shape[1] * x.shape[2]))
        if images >= len(x):
            return self._pixels(x, shift)
        shifts = repeat(None) if shift is None else torch.split(shift, images)
        normed = torch.empty_like(x)
        for part, given, moved in zip(
            torch.split(normed, images), torch.split(x, images), shifts, strict=False
        ):
            part.copy_(self._pixels(given, moved))
        return normed

    def _pixels(self, x: Tensor, shift: Tensor | None) -> Tensor:
        """The same for (B, N, C), as sums and products in float32; it has no gradient.

        With m and r the mean and 1 / standard deviation of a group, the result is SiLU(a x + b),
        a = r weight, b = bias + (shift - m) a.
        """
        batch, pixels, channels = x.shape
        grouped = batch, self.num_groups, channels // self.num_groups
        wide = x.float()
        y = wide * wide
        sums, squares = wide.sum(1).view(grouped), y.sum(1).view(grouped)
        if shift is not None:
            shift = shift.float().reshape(grouped)
            moved = torch.add(sums, shift, alpha=pixels)
            sums, squares = moved, squares.addcmul_(shift, sums + moved)
        mean = sums.mean(2, keepdim=True).div_(pixels)
        variance = squares.mean(2, keepdim=True).div_(pixels).addcmul_(mean, mean, value=-1)
        scale = variance.clamp_(min=0.0).add_(self.eps).rsqrt_() * self.weight.view(grouped[1:])
        centre = -mean if shift is None else shift - mean
        offset = torch.addcmul(self.bias.view(grouped[1:]), centre, scale)
        torch.addcmul(offset.view(batch, 1, -1), wide, scale.view(batch, 1, -1), out=y)
        return (functional.silu(y, inplace=True) if self.active else y).to(x.dtype)


def _by_pixels(x: Tensor) -> bool:
    """Whether PyTorch's GroupNorm, slow on CPUs with channels last, is to be avoided."""
    if x.device.type != "cpu" or torch.is_grad_enabled():
        return False
    return x.is_contiguous(memory_format=torch.channels_last)
