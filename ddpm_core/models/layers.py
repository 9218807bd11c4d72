"""The parts of the U-Net: norm, residual block, attention, and the two changes of resolution."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddpm_core.models import cpu as onednn
from ddpm_core.models.norms import Norm
from ddpm_core.models.uninitialized import Conv2d, Linear

EXPLICIT_LENGTH = 1024  # on CPUs attention written out is twice as fast, but takes length^2 memory

Dropout = Callable[[Tensor, int], Tensor]  # (activations, number of the residual block)
MakeNorm = Callable[..., Norm]  # (channels, active) -> Norm, with the groups and eps of a network


class Derived(nn.Module):
    """A layer that computes with products of its weights, made at each evaluation until `fix`."""

    fixed: tuple[Tensor, ...] | None = None

    def derive(self) -> tuple[Tensor, ...]:
        """What `forward` computes with."""
        raise NotImplementedError

    @torch.no_grad()
    def fix(self) -> None:
        """Make it once: the weights change no more."""
        self.fixed = self.derive()

    def derived(self) -> tuple[Tensor, ...]:
        return self.fixed or self.derive()


class JoinedLinear(Linear):
    """Linear layers of one input and `sizes` outputs, as one matrix product."""

    def __init__(self, inputs: int, sizes: Sequence[int]) -> None:
        super().__init__(inputs, sum(sizes))
        self.sizes = list(sizes)


class TimeEmbedding(nn.Module):
    """Timesteps as sines and cosines, then two linear layers (Ho et al. 2020, appendix B)."""

    frequencies: Tensor

    def __init__(self, channels: int, cosine_first: bool = False, shift: float = 1) -> None:
        super().__init__()
        self.channels = channels
        self.cosine_first = cosine_first
        self.shift = shift
        self.linear1 = Linear(channels, 4 * channels)
        self.linear2 = Linear(4 * channels, 4 * channels)

    def set_frequencies(self) -> None:
        """Set the (channels // 2,) frequencies, from 1 down to 1e-4 at a shift of 1.

        They are not weights, so they are set on the CPU even where the network has no memory.
        """
        half = self.channels // 2
        with torch.device("cpu"):
            # A shift of 1 in a network with one frequency would divide 0 by 0.
            exponent = torch.arange(half, dtype=torch.float32) / ((half - self.shift) or 1)
            frequencies = torch.exp(-math.log(10_000.0) * exponent)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, t: Tensor) -> Tensor:
        """(B,) int64 -> (B, 4 * channels)."""
        angles = t[:, None].float() * self.frequencies
        parts = [angles.sin(), angles.cos()]
        waves = torch.cat(parts[::-1] if self.cosine_first else parts, dim=1)
        if self.channels % 2:
            waves = functional.pad(waves, (0, 1))
        hidden: Tensor = self.linear2(functional.silu(self.linear1(waves)))
        return hidden


class ResidualBlock(nn.Module):
    """norm, SiLU, convolution, + time, norm, SiLU, dropout, convolution, + input.

    `number` is its place in the network: that of its time vector and of its dropout.
    """

    def __init__(self, inputs: int, outputs: int, number: int, norm: MakeNorm = Norm) -> None:
        super().__init__()
        self.number = number
        self.norm1 = norm(inputs)
        self.conv1 = Conv2d(inputs, outputs, 3, padding=1)
        self.norm2 = norm(outputs)
        self.conv2 = Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, times: Sequence[Tensor], dropout: Dropout | None) -> Tensor:
        """(B, inputs, H, W) -> (B, outputs, H, W); `times[number]` is (B, outputs)."""
        h = self.conv1(self.norm1(x))
        h = self.norm2(h, times[self.number])
        if dropout is not None:
            h = dropout(h, self.number)
        added: Tensor = self.conv2(h, onto=self.shortcut(x))
        return added


class Attention(Derived):
    """Self-attention over the pixels, added to its input."""

    def __init__(self, channels: int, heads: int, norm: MakeNorm = Norm) -> None:
        super().__init__()
        self.heads = heads
        self.norm = norm(channels, active=False)
        self.qkv = JoinedLinear(channels, [channels] * 3)
        self.out = Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W)."""
        pixels = self.norm(x).flatten(2).transpose(1, 2)
        if self.heads == 1 and _written_out(pixels):
            mixed = self._one_head(pixels)
        else:
            mixed = self.out(attend(self.qkv(pixels), self.heads))
        added: Tensor = x + mixed.transpose(1, 2).reshape(x.shape)
        return added

    def _one_head(self, x: Tensor) -> Tensor:
        """The same with half the products over pixels: query joins key, and value the output.

        (x Q + q)(x K + k)^T is (x Q K^T + q K^T) x^T but for terms that are one number for each
        row, which a softmax ignores; and rows of a softmax sum to 1, so biases pass through it.
        """
        weight, bias = self.derived()
        queries, values = functional.linear(x, weight, bias).chunk(2, dim=2)
        scores = (queries * x.shape[2] ** -0.5) @ x.transpose(1, 2)
        mixed: Tensor = scores.softmax(-1).to(values.dtype) @ values
        return mixed

    def derive(self) -> tuple[Tensor, Tensor]:
        """Weight and bias that give the joined queries and values."""
        query, key, value = self.qkv.weight.chunk(3)  # transposed, as in nn.Linear
        of_query, _, of_value = self.qkv.bias.chunk(3)
        through = functional.linear(of_value, self.out.weight, self.out.bias)
        return (
            torch.cat([key.T @ query, self.out.weight @ value]),
            torch.cat([functional.linear(of_query, key.T), through]),
        )


def _written_out(tokens: Tensor) -> bool:
    return tokens.device.type == "cpu" and tokens.shape[1] <= EXPLICIT_LENGTH


def attend(qkv: Tensor, heads: int, visible: Tensor | None = None) -> Tensor:
    """Scaled dot-product attention of (B, N, 3 * C) -> (B, N, C).

    `visible` is bool (B, N), False where a position is padding.
    """
    batch, length, width = qkv.shape
    split = qkv.view(batch, length, 3, heads, width // 3 // heads)
    query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
    mask = None if visible is None else visible[:, None, None, :]
    if not _written_out(qkv):
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    else:
        scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        mixed = scores.softmax(-1).to(value.dtype) @ value
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
    """Half the resolution by a strided convolution.

    With a `padding` of 0 the image is padded right and below, as in Ho's code; with 1, on all
    sides.
    """

    def __init__(self, channels: int, padding: int = 0) -> None:
        super().__init__()
        self.conv = Conv2d(channels, channels, 3, stride=2, padding=padding)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H / 2, W / 2)."""
        if self.conv.padding == (0, 0):
            x = functional.pad(x, (0, 1, 0, 1))
        halved: Tensor = self.conv(x)
        return halved


class Upsample(Derived):
    """Twice the resolution: nearest neighbours, then a convolution."""

    packed: Callable[[Tensor], Tensor] | None = None

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, 2 * H, 2 * W)."""
        if self.packed is not None:
            return self.packed(x)
        if x.device.type != "cpu":
            doubled: Tensor = self.conv(functional.interpolate(x, scale_factor=2.0))
            return doubled
        (doubling,) = self.derived()
        return functional.conv_transpose2d(x, doubling, self.conv.bias, stride=2, padding=1)

    def derive(self) -> tuple[Tensor]:
        return (_doubling(self.conv.weight),)

    def pack(self) -> None:
        """Lay bfloat16 weights out for good: they change no more."""
        (doubling,) = self.derived()
        self.packed = onednn.packed_transposed(doubling, self.conv.bias, stride=2, padding=1)


def _doubling(weight: Tensor) -> Tensor:
    """The transposed convolution, (in, out, 4, 4), that doubles and convolves in one.

    Each pixel of the doubled image sees only 2 x 2 different ones under its 3 x 3 weights: 4 / 9 of
    the multiplications. Along each axis the four new weights are w2, w2 + w1, w1 + w0, w0.
    """
    axis = weight.new_tensor([[0, 0, 1], [0, 1, 1], [1, 1, 0], [1, 0, 0]])
    both = torch.kron(axis, axis).T.contiguous()
    swapped = weight.transpose(0, 1).flatten(2)
    return (swapped @ both).view(*swapped.shape[:2], 4, 4)
