"""The parts of the U-Net: norm, residual block, attention, and the two changes of resolution."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

Dropout = Callable[[Tensor, int], Tensor]  # (activations, number of the residual block)


def group_count(channels: int) -> int:
    """Groups of a GroupNorm: the largest divisor of `channels` up to min(32, channels / 4).

    A group of one channel would erase the time embedding, which is added just before a norm.
    Ho's 128 channels keep their 32 groups.
    """
    most = max(1, min(32, channels // 4))
    return next(groups for groups in range(most, 0, -1) if channels % groups == 0)


def norm(channels: int) -> nn.GroupNorm:
    """GroupNorm as in Ho's networks, eps 1e-6."""
    return nn.GroupNorm(group_count(channels), channels, eps=1e-6)


class JoinedLinear(nn.Linear):
    """Linear layers of one input and `sizes` outputs, as one matrix product."""

    def __init__(self, inputs: int, sizes: Sequence[int]) -> None:
        super().__init__(inputs, sum(sizes))
        self.sizes = list(sizes)


class TimeEmbedding(nn.Module):
    """Timesteps as sines and cosines, then two linear layers (Ho et al. 2020, appendix B)."""

    frequencies: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.linear1 = nn.Linear(channels, 4 * channels)
        self.linear2 = nn.Linear(4 * channels, 4 * channels)

    def set_frequencies(self) -> None:
        """(channels // 2,) frequencies from 1 down to 1e-4; apart, for they are no weights."""
        half = self.channels // 2
        with torch.device("cpu"):
            exponent = torch.arange(half, dtype=torch.float32) / max(1, half - 1)
            frequencies = torch.exp(-math.log(10_000.0) * exponent)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, t: Tensor) -> Tensor:
        """(B,) int64 -> (B, 4 * channels)."""
        angles = t[:, None].float() * self.frequencies
        waves = torch.cat([angles.sin(), angles.cos()], dim=1)
        if self.channels % 2:
            waves = functional.pad(waves, (0, 1))
        hidden: Tensor = self.linear2(functional.silu(self.linear1(waves)))
        return hidden


class ResidualBlock(nn.Module):
    """norm, SiLU, convolution, + time, norm, SiLU, dropout, convolution, + input.

    `number` is its place in the network: that of its time vector and of its dropout.
    """

    def __init__(self, inputs: int, outputs: int, number: int) -> None:
        super().__init__()
        self.number = number
        self.norm1 = norm(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, times: Sequence[Tensor], dropout: Dropout | None) -> Tensor:
        """(B, inputs, H, W) -> (B, outputs, H, W); `times[number]` is (B, outputs)."""
        h = self.conv1(functional.silu(self.norm1(x)))
        h = h + times[self.number][:, :, None, None]
        h = functional.silu(self.norm2(h))
        if dropout is not None:
            h = dropout(h, self.number)
        added: Tensor = self.shortcut(x) + self.conv2(h)
        return added


class Attention(nn.Module):
    """Self-attention over the pixels, added to its input."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = norm(channels)
        self.qkv = JoinedLinear(channels, [channels] * 3)
        self.out = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W)."""
        pixels = self.norm(x).flatten(2).transpose(1, 2)
        mixed = self.out(attend(self.qkv(pixels), self.heads))
        added: Tensor = x + mixed.transpose(1, 2).reshape(x.shape)
        return added


def attend(qkv: Tensor, heads: int, visible: Tensor | None = None) -> Tensor:
    """Scaled dot-product attention of (B, N, 3 * C) -> (B, N, C).

    `visible` is bool (B, N), False where a position is padding.
    """
    batch, length, width = qkv.shape
    split = qkv.view(batch, length, 3, heads, width // 3 // heads)
    query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
    mask = None if visible is None else visible[:, None, None, :]
    mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return mixed.transpose(1, 2).reshape(batch, length, width // 3)


class Stage(nn.Module):
    """A residual block, at some resolutions followed by attention."""

    def __init__(self, block: ResidualBlock, attention: Attention | None) -> None:
        super().__init__()
        self.block = block
        self.attention = attention

    def forward(self, x: Tensor, times: Sequence[Tensor], dropout: Dropout | None) -> Tensor:
        x = self.block(x, times, dropout)
        return x if self.attention is None else self.attention(x)


class Downsample(nn.Module):
    """Half the resolution by a strided convolution, padded right and below as in Ho's code."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H / 2, W / 2)."""
        halved: Tensor = self.conv(functional.pad(x, (0, 1, 0, 1)))
        return halved


class Upsample(nn.Module):
    """Twice the resolution: nearest neighbours, then a convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, 2 * H, 2 * W)."""
        doubled: Tensor = self.conv(functional.interpolate(x, scale_factor=2.0, mode="nearest"))
        return doubled
