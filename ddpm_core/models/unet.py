"""The U-Net of Ho et al. (2020), appendix B: 35.7M weights for CIFAR-10, any size asked for."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddpm_core.models.conditioning import TEXT_BYTES, ClassEmbedding, TextEncoder
from ddpm_core.models.execution import layout
from ddpm_core.models.init import Uniform, initialise
from ddpm_core.models.layers import (
    Attention,
    Downsample,
    Dropout,
    JoinedLinear,
    MakeNorm,
    ResidualBlock,
    Stage,
    TimeEmbedding,
    Upsample,
)
from ddpm_core.models.norms import Norm
from ddpm_core.models.uninitialized import Conv2d

# Fields of UNetConfig that no setting has. Networks of diffusers and of earlier versions differ in
# them, and keep their own when they are trained further.
DETAILS = (
    "downsample_padding",
    "flip_sin_to_cos",
    "freq_shift",
    "norm_eps",
    "norm_num_groups",
    "attention_head_dim",
    "attention_up",
)


@dataclass(frozen=True)
class UNetConfig:
    """What a network is built from. Raises ValueError where the numbers don't fit together.

    `downsample_padding` to `attention_head_dim` are fields of diffusers' UNet2DModel. Without
    `norm_num_groups` each norm has norms.group_count of its channels, as in the first versions of
    this program. `attention_head_dim` is the width of a head, if their number is not `heads` at all
    levels. `attention_up` has the levels, from 0, with attention on the way up, if they differ from
    those of the way down.
    """

    image_size: int
    in_channels: int
    channels: int
    multipliers: tuple[int | float, ...]
    blocks: int
    attention: tuple[int, ...]
    heads: int = 1
    dropout: float = 0.0
    conditioning: str = "none"
    classes: int = 0
    downsample_padding: int = 0
    flip_sin_to_cos: bool = False
    freq_shift: float = 1
    norm_eps: float = 1e-6
    norm_num_groups: int | None = None
    attention_head_dim: int | None = None
    attention_up: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("multipliers", "attention", "attention_up"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else tuple(value))
        mistakes = [*self._number_mistakes(), *self._condition_mistakes()]
        mistakes = mistakes or [*self._size_mistakes()]
        if mistakes:
            raise ValueError(" ".join(mistakes))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The inverse of `dataclasses.asdict`, also after JSON. Raises ValueError."""
        unknown = sorted(values.keys() - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(f"A network's config has no {', '.join(unknown)}.")
        return cls(**values)

    def with_details(self, other: UNetConfig) -> Self:
        """Return this config with the DETAILS of another network."""
        return replace(self, **{name: getattr(other, name) for name in DETAILS})

    def heads_of(self, width: int) -> int:
        """Return the number of attention heads at a level of `width` channels."""
        return width // self.attention_head_dim if self.attention_head_dim else self.heads

    def with_equal_heads(self) -> Self:
        """Return this config with `heads` for `attention_head_dim`, if both mean the same."""
        heads = {self.heads_of(width) for width in self.attention_widths}
        if len(heads) > 1 or any(width % max(heads) for width in self.widths):
            return self
        return replace(self, heads=max(heads), attention_head_dim=None)

    @property
    def attends(self) -> tuple[list[bool], list[bool]]:
        """Whether each level has attention, on the way down and on the way up."""
        down = [size in self.attention for size in self.sizes]
        up = self.attention_up
        return down, down if up is None else [level in up for level in range(len(down))]

    @property
    def attention_widths(self) -> list[int]:
        """The channels of all levels that have attention; the middle always has it."""
        attending = zip(self.widths, *self.attends, strict=True)
        widths = {width for width, down, up in attending if down or up}
        return sorted({*widths, self.widths[-1]})

    @property
    def sizes(self) -> list[int]:
        """The image size at each level."""
        return [self.image_size // 2**level for level in range(len(self.multipliers))]

    @property
    def widths(self) -> list[int]:
        """The number of channels at each level."""
        return [round(self.channels * multiplier) for multiplier in self.multipliers]

    def _number_mistakes(self) -> list[str]:
        numbers = {
            name: getattr(self, name) for name in ("image_size", "in_channels", "blocks", "heads")
        }
        wrong = [
            f"{name} is {number}; it must be at least 1."
            for name, number in numbers.items()
            if number < 1
        ]
        if self.channels < 2:
            wrong.append(f"channels is {self.channels}; the time embedding needs at least 2.")
        if not self.multipliers or min(self.widths) < 1:
            wrong.append(
                f"multipliers is {list(self.multipliers)}; one number a level, above 0 each."
            )
        elif any(
            abs(self.channels * m - round(self.channels * m)) > 1e-6 for m in self.multipliers
        ):
            wrong.append(
                f"multipliers is {list(self.multipliers)}; times channels, {self.channels}, each "
                "must be a whole number."
            )
        if not 0.0 <= self.dropout < 1.0:
            wrong.append(f"dropout is {self.dropout}; it must be at least 0 and below 1.")
        return wrong + self._detail_mistakes()

    def _detail_mistakes(self) -> list[str]:
        allowed = {
            "downsample_padding": (self.downsample_padding in (0, 1), "0 or 1"),
            "freq_shift": (
                self.freq_shift == 1 or self.freq_shift < self.channels // 2,
                "1, or less than half of channels",
            ),
            "norm_eps": (0.0 < self.norm_eps < 1.0, "above 0 and below 1"),
            "norm_num_groups": (self.norm_num_groups != 0, "at least 1"),
            "attention_head_dim": (self.attention_head_dim != 0, "at least 1"),
        }
        return [
            f"{name} is {getattr(self, name)}; it must be {wanted}."
            for name, (holds, wanted) in allowed.items()
            if not holds
        ]

    def _condition_mistakes(self) -> list[str]:
        if self.conditioning not in ("none", "class", "text"):
            return [f"conditioning is {self.conditioning!r}; it may be none, class or text."]
        if self.conditioning == "class" and self.classes < 1:
            return [f"classes is {self.classes}; conditioning by class needs at least 1."]
        return []

    def _size_mistakes(self) -> list[str]:
        halvings = len(self.multipliers) - 1
        if self.image_size % 2**halvings:
            return [
                f"image_size is {self.image_size}; {len(self.multipliers)} levels halve it "
                f"{halvings} times, so it must be a multiple of {2**halvings}."
            ]
        wrong = [
            f"attention is asked for at size {size}; the levels have sizes {self.sizes}."
            for size in self.attention
            if size not in self.sizes
        ]
        if any(width % self.heads for width in self.widths):
            wrong.append(
                f"heads is {self.heads}; it must divide the levels' channels, {self.widths}."
            )
        if any(width % (self.attention_head_dim or 1) for width in self.attention_widths):
            wrong.append(
                f"attention_head_dim is {self.attention_head_dim}; it must divide the channels of "
                f"the levels with attention, {self.attention_widths}."
            )
        if math.gcd(self.channels, *self.widths) % (self.norm_num_groups or 1):
            wrong.append(
                f"norm_num_groups is {self.norm_num_groups}; it must divide the levels' channels, "
                f"{self.widths}."
            )
        return wrong


class UNet(nn.Module):
    """Noisy images and their timesteps in, the diffusion's prediction out.

    Constructing draws no random numbers and leaves the weights undefined: `initialise` or
    `load_state_dict` sets them; on `device` meta it has shapes alone, and takes no memory. It
    holds no generator either: dropout comes as a function.
    """

    def __init__(self, config: UNetConfig, device: str = "cpu") -> None:
        super().__init__()
        self.config = config
        with torch.device(device):
            self._build(config)
        self.time_embedding.set_frequencies()

    def _build(self, config: UNetConfig) -> None:
        channels = config.channels
        self.time_embedding = TimeEmbedding(channels, config.flip_sin_to_cos, config.freq_shift)
        self.condition = _conditioning(config)
        self.conv_in = Conv2d(config.in_channels, channels, 3, padding=1)
        self.time_sizes: list[int] = []  # of each residual block's time vector
        skips = [channels]
        self.down = self._down(config, skips)
        self.middle = self._middle(config)
        self.up = self._up(config, skips)
        self.time_projection = JoinedLinear(4 * channels, self.time_sizes)
        self.norm_out = self._norm(self.time_sizes[-1])
        self.conv_out = Conv2d(self.time_sizes[-1], config.in_channels, 3, padding=1)

    def _down(self, config: UNetConfig, skips: list[int]) -> nn.ModuleList:
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
        heads = self.config.heads_of(outputs)
        return Stage(block, Attention(outputs, heads, self._norm) if attends else None)

    @property
    def _norm(self) -> MakeNorm:
        config = self.config
        return functools.partial(Norm, groups=config.norm_num_groups, eps=config.norm_eps)

    @torch.no_grad()
    def initialise(self, uniform: Uniform) -> None:
        """Set every weight from `uniform(name, shape)`, float32 in [0, 1) (see initial.py)."""
        initialise(self, uniform)

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        condition: Tensor | None = None,
        drop: Tensor | None = None,
        dropout: Dropout | None = None,
    ) -> Tensor:
        """The prediction for `x` (B, C, H, W) at timesteps `t` (B,) int64, float32 as `x`.

        `condition` is int64 (B,), class numbers, or uint8 (B, 64), UTF-8 padded by zeros; `drop`
        is bool (B,), True where it is to be ignored, as it is everywhere without `condition`.
        `dropout` maps activations and the number of the residual block to activations; None: no
        dropout. Raises ValueError for sizes or a condition that the network is not made for.
        """
        self._check(x, condition)
        times = self._times(t, condition, drop)
        h = self.conv_in(x).contiguous(memory_format=layout(x.device))
        skips = [h]
        for layer in self.down:
            h = layer(h, times, dropout) if isinstance(layer, Stage) else layer(h)
            skips.append(h)
        for layer in self.middle:
            h = layer(h, times, dropout)
        for layer in self.up:
            if isinstance(layer, Stage):
                h = layer(torch.cat([h, skips.pop()], dim=1), times, dropout)
            else:
                h = layer(h)
        output: Tensor = self.conv_out(self.norm_out(h))
        return output.to(x.dtype)

    def _times(self, t: Tensor, condition: Tensor | None, drop: Tensor | None) -> Sequence[Tensor]:
        """Each residual block's time vector, from one matrix product for all."""
        embedding = self.time_embedding(t)
        if self.condition is not None:
            embedding = embedding + self.condition(condition, drop, len(t))
        projected: Tensor = self.time_projection(functional.silu(embedding))
        return torch.split(projected, self.time_sizes, dim=1)

    def _check(self, x: Tensor, condition: Tensor | None) -> None:
        halvings = 2 ** (len(self.config.multipliers) - 1)
        if (
            x.ndim != 4
            or x.shape[1] != self.config.in_channels
            or x.shape[2] % halvings
            or x.shape[3] % halvings
        ):
            raise ValueError(
                f"Images of shape {tuple(x.shape)} were given; the network takes (batch, "
                f"{self.config.in_channels}, height, width), both multiples of {halvings}."
            )
        if condition is None:
            return
        expected = {"class": (len(x),), "text": (len(x), TEXT_BYTES)}.get(self.config.conditioning)
        if tuple(condition.shape) != expected:
            raise ValueError(
                f"A condition of shape {tuple(condition.shape)} was given; the network's "
                f"conditioning is {self.config.conditioning}, shape {expected}."
            )


def _conditioning(config: UNetConfig) -> ClassEmbedding | TextEncoder | None:
    if config.conditioning == "class":
        return ClassEmbedding(config.classes, 4 * config.channels)
    return TextEncoder(config.channels) if config.conditioning == "text" else None
