"""The U-Net of Ho et al. (2020), appendix B: 35.7M weights for CIFAR-10, other sizes on request.

From top to bottom: the network, then its parts. Everything here is written for reading; cpu.py
replaces some of the parts by faster ones that compute the same.

B is the batch size, C a number of channels, H and W the image size in pixels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddpm_core.models.conditioning import TEXT_BYTES, ClassEmbedding, TextEncoder, Tokens
from ddpm_core.models.config import UNetConfig, group_count
from ddpm_core.models.layers import Conv2d, JoinedLinear, Linear, attend

Dropout = Callable[[Tensor, int], Tensor]  # (activations, number of the residual block)
MakeNorm = Callable[..., "Norm"]  # (channels, active) -> Norm, with the groups and eps of a network


class UNet(nn.Module):
    """Map noisy images and their timesteps to the diffusion's prediction.

    Constructing draws no random numbers and leaves the weights undefined: `init.initialise` or
    `load_state_dict` sets them. On `device` "meta" the network has shapes alone and takes no
    memory. It holds no random generator either: dropout is passed to `forward` as a function.
    """

    # The order of activations in memory; `execution.prepare_model` sets the faster one.
    memory_format = torch.contiguous_format

    def __init__(self, config: UNetConfig, device: str = "cpu") -> None:
        super().__init__()
        self.config = config
        with torch.device(device):
            self._build(config)
        self.time_embedding.set_frequencies()

    def _build(self, config: UNetConfig) -> None:
        channels = config.channels
        self.time_embedding = TimeEmbedding(channels, config.flip_sin_to_cos, config.freq_shift)
        self.condition = _condition(config)
        self.augmentation = (
            Linear(config.augmentation, 4 * channels, bias=False) if config.augmentation else None
        )
        self.conv_in = Conv2d(config.in_channels, channels, 3, padding=1)
        self.time_sizes: list[int] = []  # the width of each residual block's time vector
        skips = [channels]
        self.down = self._down(config, skips)
        self.middle = self._middle(config)
        self.up = self._up(config, skips)
        # One matrix product computes the time vectors of all residual blocks.
        self.time_projection = JoinedLinear(4 * channels, self.time_sizes)
        self.norm_out = self._norm(self.time_sizes[-1])
        self.conv_out = Conv2d(self.time_sizes[-1], config.in_channels, 3, padding=1)

    def _down(self, config: UNetConfig, skips: list[int]) -> nn.ModuleList:
        """Return the levels from the largest images to the smallest.

        Appends the width of every layer's output to `skips`.
        """
        layers = nn.ModuleList()
        for level, width in enumerate(config.widths):
            for _ in range(config.blocks):
                layers.append(self._stage(skips[-1], width, config.attends[0][level]))
                skips.append(width)
            if level < len(config.widths) - 1:
                layers.append(Downsample(width, config.downsample_padding))
                skips.append(width)
        return layers

    def _middle(self, config: UNetConfig) -> nn.ModuleList:
        width = config.widths[-1]
        stages = [self._stage(width, width, attends) for attends in (True, False)]
        return nn.ModuleList(stages)

    def _up(self, config: UNetConfig, skips: list[int]) -> nn.ModuleList:
        """Return the levels back to the largest images. Each stage also reads one of `skips`."""
        layers = nn.ModuleList()
        for level, width in reversed(list(enumerate(config.widths))):
            for _ in range(config.blocks + 1):
                inputs = self.time_sizes[-1] + skips.pop()
                layers.append(self._stage(inputs, width, config.attends[1][level]))
            if level > 0:
                layers.append(Upsample(width))
        return layers

    def _stage(self, inputs: int, outputs: int, attends: bool) -> Stage:
        self.time_sizes.append(outputs)
        block = ResidualBlock(inputs, outputs, len(self.time_sizes) - 1, self._norm)
        if not attends:
            return Stage(block, None)
        heads = self.config.heads_of(outputs)
        attention = Attention(outputs, heads, self._norm)
        if not self.config.cross_attention:
            return Stage(block, attention)
        width = TextEncoder.width(self.config.channels)
        return Stage(block, attention, CrossAttention(outputs, width, heads, self._norm))

    @property
    def _norm(self) -> MakeNorm:
        config = self.config
        return functools.partial(Norm, groups=config.norm_num_groups, eps=config.norm_eps)

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        condition: Tensor | None = None,
        drop: Tensor | None = None,
        dropout: Dropout | None = None,
        augmentation: Tensor | None = None,
    ) -> Tensor:
        """Return the prediction for noisy images, in the shape and dtype of `x`.

        Args:
            x: float32 (B, C, H, W), the noisy images.
            t: int64 (B,), their timesteps.
            condition: Class numbers, int64 (B,), or texts, uint8 (B, 64), UTF-8 padded with
                zeros. None: the images have no condition.
            drop: bool (B,), True where `condition` is ignored.
            dropout: Maps activations and the number of their residual block to activations. None:
                no dropout.
            augmentation: float32 (B, config.augmentation), parameters of how the images were
                changed. None: the images were not changed, as if all were 0.

        Raises:
            ValueError: The sizes of `x` or the kind of `condition` do not match the network.
        """
        self._check(x, condition)
        times, tokens = self._conditions(t, condition, drop, augmentation)
        # Down: keep every output, so that the way up at the same resolution can read it.
        h = self.conv_in(x).contiguous(memory_format=self.memory_format)
        skips = [h]
        for layer in self.down:
            h = layer(h, times, dropout, tokens) if isinstance(layer, Stage) else layer(h)
            skips.append(h)
        for layer in self.middle:
            h = layer(h, times, dropout, tokens)
        for layer in self.up:
            if isinstance(layer, Stage):
                h = layer(torch.cat([h, skips.pop()], dim=1), times, dropout, tokens)
            else:
                h = layer(h)
        output: Tensor = self.conv_out(self.norm_out(h))
        return output.to(x.dtype)

    def _conditions(
        self,
        t: Tensor,
        condition: Tensor | None,
        drop: Tensor | None,
        augmentation: Tensor | None,
    ) -> tuple[Sequence[Tensor], Tokens | None]:
        """Return the time vector of each residual block, (B, time_sizes[number]), and the tokens.

        The vectors also contain the condition and the augmentation.
        """
        embedding, tokens = self.time_embedding(t), None
        if self.condition is not None:
            vector, tokens = self.condition(condition, drop, t.shape[0])
            embedding = embedding + vector
        if self.augmentation is not None and augmentation is not None:
            embedding = embedding + self.augmentation(augmentation)
        projected: Tensor = self.time_projection(functional.silu(embedding))
        return torch.split(projected, self.time_sizes, dim=1), tokens

    def _check(self, x: Tensor, condition: Tensor | None) -> None:
        multiple = 2 ** (len(self.config.multipliers) - 1)
        channels = self.config.in_channels
        if x.ndim != 4 or x.shape[1] != channels or x.shape[2] % multiple or x.shape[3] % multiple:
            raise ValueError(
                f"x: got shape {tuple(x.shape)}; must be (batch, {channels}, height, width), "
                f"height and width both multiples of {multiple}."
            )
        if condition is None:
            return
        kind = self.config.conditioning
        batch = x.shape[0]  # `len` would make an exported batch size a constant
        expected = {"class": (batch,), "text": (batch, TEXT_BYTES)}.get(kind)
        if tuple(condition.shape) != expected:
            raise ValueError(
                f"condition: got shape {tuple(condition.shape)}; this network's conditioning is "
                f"{kind}, which requires {expected}."
            )


def _condition(config: UNetConfig) -> ClassEmbedding | TextEncoder | None:
    if config.conditioning == "class":
        return ClassEmbedding(config.classes, 4 * config.channels)
    if config.conditioning == "text":
        return TextEncoder(config.channels, config.cross_attention)
    return None


class TimeEmbedding(nn.Module):
    """Embed timesteps as sines and cosines, then two linear layers (Ho et al. 2020, appendix B)."""

    frequencies: Tensor

    def __init__(self, channels: int, cosine_first: bool = False, shift: float = 1) -> None:
        super().__init__()
        self.channels = channels
        self.cosine_first = cosine_first
        self.shift = shift
        self.linear1 = Linear(channels, 4 * channels)
        self.linear2 = Linear(4 * channels, 4 * channels)

    def set_frequencies(self) -> None:
        """Set the (channels // 2,) frequencies, which fall from 1 to 1e-4 with a shift of 1.

        They are not weights, so they are set on the CPU even in a network on device "meta".
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


class Stage(nn.Module):
    """A residual block, followed by attention at the levels that have it.

    In a network with `cross_attention`, the pixels then attend to the tokens of the text, too.
    """

    def __init__(
        self,
        block: ResidualBlock,
        attention: Attention | None,
        cross: CrossAttention | None = None,
    ) -> None:
        super().__init__()
        self.block = block
        self.attention = attention
        self.cross = cross

    def forward(
        self,
        x: Tensor,
        times: Sequence[Tensor],
        dropout: Dropout | None,
        tokens: Tokens | None = None,
    ) -> Tensor:
        """(B, inputs, H, W) -> (B, outputs, H, W)."""
        x = self.block(x, times, dropout)
        if self.attention is not None:
            x = self.attention(x)
        return x if self.cross is None else self.cross(x, tokens)


class Norm(nn.GroupNorm):
    """GroupNorm (Wu and He 2018), then SiLU if `active`; an eps of 1e-6 as in Ho's networks."""

    def __init__(
        self, channels: int, active: bool = True, groups: int | None = None, eps: float = 1e-6
    ) -> None:
        super().__init__(groups or group_count(channels), channels, eps=eps)
        self.active = active

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W), the norm of `x + shift`; `shift` is (B, C) or None."""
        if shift is not None:
            x = x + shift[:, :, None, None]
        x = functional.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
        return functional.silu(x) if self.active else x


class ResidualBlock(nn.Module):
    """norm, SiLU, convolution, + time, norm, SiLU, dropout, convolution, + input.

    `number` is the block's place in the network, which selects its time vector and its dropout.
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
        added: Tensor = self.shortcut(x) + self.conv2(h)
        return added


class Attention(nn.Module):
    """Self-attention between the pixels, added to its input."""

    def __init__(self, channels: int, heads: int, norm: MakeNorm = Norm) -> None:
        super().__init__()
        self.heads = heads
        self.norm = norm(channels, active=False)
        self.qkv = JoinedLinear(channels, [channels] * 3)
        self.out = Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W)."""
        pixels = self.norm(x).flatten(2).transpose(1, 2)
        return x + self.mix(pixels).transpose(1, 2).reshape(x.shape)

    def mix(self, pixels: Tensor) -> Tensor:
        """(B, H * W, C) -> (B, H * W, C)."""
        mixed: Tensor = self.out(attend(self.qkv(pixels).chunk(3, 2), self.heads))
        return mixed


class CrossAttention(nn.Module):
    """Attention of the pixels to the tokens of a text, added to its input.

    Rombach et al. (2022), "High-resolution image synthesis with latent diffusion models", section
    3.3, without their feed-forward layer.
    """

    def __init__(self, channels: int, width: int, heads: int, norm: MakeNorm = Norm) -> None:
        super().__init__()
        self.heads = heads
        self.norm = norm(channels, active=False)
        self.query = Linear(channels, channels)
        self.key_value = JoinedLinear(width, [channels] * 2)
        self.out = Linear(channels, channels)

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W)."""
        pixels = self.norm(x).flatten(2).transpose(1, 2)
        return x + self.mix(pixels, tokens).transpose(1, 2).reshape(x.shape)

    def mix(self, pixels: Tensor, tokens: Tokens) -> Tensor:
        """(B, H * W, C) -> (B, H * W, C)."""
        mixed: Tensor = self.out(attend(self.parts(pixels, tokens), self.heads, tokens.visible))
        return mixed

    def parts(self, pixels: Tensor, tokens: Tokens) -> list[Tensor]:
        """Return the queries (B, H * W, C) of pixels, and the keys and values of tokens."""
        return [self.query(pixels), *self.key_value(tokens.values).chunk(2, 2)]


class Downsample(nn.Module):
    """Halve the resolution by a strided convolution.

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


class Upsample(nn.Module):
    """Double the resolution by repeating pixels, then convolve."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, 2 * H, 2 * W)."""
        doubled: Tensor = self.conv(functional.interpolate(x, scale_factor=2.0))
        return doubled
