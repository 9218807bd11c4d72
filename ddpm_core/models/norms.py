"""GroupNorm followed by SiLU, where most of the time that is not convolution goes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

CACHED = 2**19  # elements, 2 MB in float32; measured with caches of 1 MB a core and 32 MB for all


def group_count(channels: int) -> int:
    """Groups of a GroupNorm: the largest divisor of `channels` up to min(32, channels / 4).

    A group of one channel would erase the time embedding, which is added just before a norm.
    Ho's 128 channels keep their 32 groups.
    """
    most = max(1, min(32, channels // 4))
    return next(groups for groups in range(most, 0, -1) if channels % groups == 0)


class Norm(nn.GroupNorm):
    """GroupNorm of `x + shift`, then SiLU if `active`; an eps of 1e-6 as in Ho's networks."""

    def __init__(
        self, channels: int, active: bool = True, groups: int | None = None, eps: float = 1e-6
    ) -> None:
        super().__init__(groups or group_count(channels), channels, eps=eps)
        self.active = active

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        """(B, C, H, W), (B, C) or None -> (B, C, H, W)."""
        if _by_pixels(x):
            batch, channels, height, width = x.shape
            pixels = x.permute(0, 2, 3, 1).view(batch, height * width, channels)
            normed = self._pixels(pixels, shift)
            return normed.view(batch, height, width, channels).permute(0, 3, 1, 2)
        if shift is not None:
            x = x + shift[:, :, None, None]
        x = functional.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
        return functional.silu(x) if self.active else x

    def _pixels(self, x: Tensor, shift: Tensor | None) -> Tensor:
        """The same for (B, N, C), computed in float32; it has no gradient.

        Both times that the images are gone through, `wide` holds as many as stay near the
        processor; what is smaller than they are is computed once for all. 1.2 to 1.5 times as fast
        as a computation of its own for each handful, in new memory at each operation.
        """
        batch, pixels, channels = x.shape
        images = min(batch, max(1, CACHED // (pixels * channels)))
        wide = x.new_empty((images, pixels, channels), dtype=torch.float32)
        totals = x.new_empty((2, batch, channels), dtype=torch.float32)
        normed = torch.empty_like(x)
        # Squares of numbers far from 0 would leave no digits to their variance: a value of each
        # channel is taken off. Numbers of 16 bits have none to lose, and are copied to 32 instead.
        narrow = x.dtype != torch.float32
        pivot = torch.zeros_like(totals[0]) if narrow else x[:, 0]
        parts = [slice(first, first + images) for first in range(0, batch, images)]
        for part in parts:
            y = wide[: len(x[part])]
            if narrow:
                y.copy_(x[part])
            else:
                torch.sub(x[part], pivot[part, None], out=y)
            torch.sum(y, 1, out=totals[0, part])
            torch.sum(y.square_(), 1, out=totals[1, part])
        scale, offset = self._affine(totals, pivot, shift, pixels)
        for part in parts:
            y = wide[: len(x[part])].copy_(x[part]) if narrow else normed[part]
            torch.addcmul(offset[part], y if narrow else x[part], scale[part], out=y)
            if self.active:
                functional.silu(y, inplace=True)
            if narrow:
                normed[part] = y
        return normed

    def _affine(
        self, totals: Tensor, pivot: Tensor, shift: Tensor | None, pixels: int
    ) -> tuple[Tensor, Tensor]:
        """a and b, (B, 1, C), of the norm a x + b, from sums of x - pivot and of its squares.

        The sums are (2, B, C), `pivot` (B, C) is any value near x. With m and r the mean and
        1 / standard deviation of a group of x + shift, a = r weight and b = bias + (shift - m) a.
        Changes `totals`.
        """
        _, batch, channels = totals.shape
        grouped = self.num_groups, channels // self.num_groups
        sums, squares = totals.view(2, batch, *grouped)
        pivot = pivot.reshape(batch, *grouped)
        moved = pivot if shift is None else pivot + shift.float().view(batch, *grouped)
        # What a group has in common does not count: the sums become those of x - pivot + moved.
        moved = moved - moved[..., :1]
        squares.addcmul_(moved, 2 * sums + pixels * moved)
        sums.add_(moved, alpha=pixels)
        means = totals.view(2, batch, *grouped).sum(3, keepdim=True).div_(pixels * grouped[1])
        mean, variance = means[0], means[1].addcmul_(means[0], means[0], value=-1)
        scale = variance.clamp_(min=0.0).add_(self.eps).rsqrt_() * self.weight.view(grouped)
        offset = torch.addcmul(self.bias.view(grouped), moved - pivot - mean, scale)
        return scale.view(batch, 1, channels), offset.view(batch, 1, channels)


def _by_pixels(x: Tensor) -> bool:
    """Whether PyTorch's GroupNorm, slow on CPUs with channels last, is to be avoided."""
    if x.device.type != "cpu" or torch.is_grad_enabled():
        return False
    return x.is_contiguous(memory_format=torch.channels_last)
