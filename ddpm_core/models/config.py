"""The fields and rules of a network, for settings, checkpoints and imported networks alike.

Needs no torch, so that a checkpoint can be checked before torch is imported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, TypeAdapter, model_validator
from pydantic.dataclasses import dataclass

from ddpm_core.errors import Invalid, Problem, got

# Strict types: a number in quotes in a damaged file is an error, and 1 does not become 1.0.
Size = Annotated[int, Field(strict=True, ge=1, le=2**20)]
Index = Annotated[int, Field(strict=True, ge=0, le=2**20)]
Flag = Annotated[bool, Field(strict=True)]
Number = (
    Annotated[int, Field(strict=True)] | Annotated[float, Field(strict=True, allow_inf_nan=False)]
)
Multiplier = Annotated[Number, Field(gt=0, le=2**20)]

# Fields of UNetConfig that no setting has. Networks of diffusers and of earlier versions of ddpm
# differ in them, and keep their own values when they are trained further.
DETAILS = (
    "downsample_padding",
    "flip_sin_to_cos",
    "freq_shift",
    "norm_eps",
    "norm_num_groups",
    "attention_head_dim",
    "attention_up",
)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class UNetConfig:
    """The structure of a U-Net.

    Attributes:
        image_size: Pixels a side. Each level but the first halves it.
        in_channels: 1 for grayscale, 3 for RGB.
        channels: Width of the first level.
        multipliers: Width of each level, as a multiple of `channels`.
        blocks: Residual blocks per level on the way down; one more on the way up.
        attention: Image sizes of the levels with self-attention. The middle always has it.
        heads: Attention heads.
        dropout: Share of activations that training drops, in [0, 1).
        conditioning: What images are conditioned on: "none", "class" or "text".
        classes: Number of classes; at least 1 with conditioning "class".
        downsample_padding: 0: pad right and below, as Ho's code does; 1: pad all sides.
        flip_sin_to_cos: Whether cosines come first in the time embedding.
        freq_shift: Shift of the time embedding's frequencies; see unet.TimeEmbedding.
        norm_eps: Added to the variance in every norm.
        norm_num_groups: Groups of every norm. None: `group_count` of its channels, as in the first
            versions of ddpm.
        attention_head_dim: Channels per head at every level, in place of `heads`.
        attention_up: Levels, from 0, with attention on the way up. None: the same as on the way
            down.
        augmentation: Number of parameters of an augmentation that condition the network; 0: none.
        cross_attention: Whether pixels also attend to the bytes of a text, wherever they attend to
            each other; requires conditioning "text".

    `downsample_padding` to `attention_head_dim` are fields of diffusers' UNet2DModel.

    Raises:
        pydantic.ValidationError: A value is invalid, or values contradict each other (see
            `problems`).
    """

    image_size: Size
    in_channels: Size
    channels: Annotated[Size, Field(ge=2)]
    multipliers: Annotated[tuple[Multiplier, ...], Field(min_length=1, max_length=16)]
    blocks: Size
    attention: tuple[Size, ...]
    heads: Size = 1
    dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    conditioning: Literal["none", "class", "text"] = "none"
    classes: Index = 0
    downsample_padding: Literal[0, 1] = 0
    flip_sin_to_cos: Flag = False
    freq_shift: Number = 1
    norm_eps: Annotated[Number, Field(gt=0, lt=1)] = 1e-6
    norm_num_groups: Size | None = None
    attention_head_dim: Size | None = None
    attention_up: tuple[Index, ...] | None = None
    augmentation: Index = 0
    cross_attention: Flag = False

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the config with these fields; the inverse of `dataclasses.asdict`, also via JSON.

        Raises:
            pydantic.ValidationError: A field is unknown, missing or invalid, or fields contradict
                each other. `problems.problems_of` lists all problems.
        """
        return TypeAdapter(cls).validate_python(values)

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if problems := self.problems():
            raise Invalid(problems)
        return self

    def problems(self) -> list[Problem]:
        """Return what is wrong between fields that are each valid. Paths are names of fields."""
        problems = []
        if self.in_channels not in (1, 3):
            problems.append(Problem("in_channels", got(self.in_channels), "must be 1 or 3"))
        for multiplier in self.multipliers:
            width = self.channels * multiplier
            if abs(width - max(1, round(width))) > 1e-6:
                expected = f"times channels, {self.channels}, must be an integer of at least 1"
                problem = Problem("multipliers", got(multiplier), expected, involves=("channels",))
                problems.append(problem)
        if self.conditioning == "class" and self.classes < 1:
            expected = "must be at least 1 with conditioning class"
            problems.append(Problem("classes", got(self.classes), expected))
        if self.cross_attention and self.conditioning != "text":
            expected, involves = "must be false unless conditioning is text", ("conditioning",)
            problem = Problem("cross_attention", got(True), expected, involves=involves)
            problems.append(problem)
        if self.freq_shift != 1 and self.freq_shift >= self.channels // 2:
            expected = f"must be 1, or less than half of channels, {self.channels}"
            problems.append(Problem("freq_shift", got(self.freq_shift), expected))
        return problems or self._level_problems()

    def _level_problems(self) -> list[Problem]:
        levels, widths = len(self.multipliers), self.widths
        divisor = 2 ** (levels - 1)
        if self.image_size % divisor:
            below = self.image_size // divisor * divisor
            above = below + divisor
            expected = f"must be a multiple of {divisor} for a network of {levels} levels"
            hint = f"use {below} or {above}" if below else f"use {above}"
            size = got(self.image_size)
            return [Problem("image_size", size, expected, hint, involves=("multipliers",))]
        expected = f"must be one of {self.sizes}, the image sizes of the levels"
        problems = [
            Problem("attention", got(size), expected, involves=("image_size", "multipliers"))
            for size in self.attention
            if size not in self.sizes
        ]
        divisors = {
            "heads": (self.heads, widths),
            "attention_head_dim": (self.attention_head_dim, self.attention_widths),
            "norm_num_groups": (self.norm_num_groups, [self.channels, *widths]),
        }
        for name, (number, divided) in divisors.items():
            if math.gcd(*divided) % (number or 1):
                expected = f"must divide the channels of every level, {divided}"
                involves = ("channels", "multipliers")
                problems.append(Problem(name, got(number), expected, involves=involves))
        return problems

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
        """The different channel counts of the levels that have attention, and of the middle."""
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


def group_count(channels: int) -> int:
    """Return the largest divisor of `channels` up to min(32, channels / 4): groups of a GroupNorm.

    A group of one channel would erase the time embedding, which is added just before a norm.
    Ho's 128 channels keep their 32 groups.
    """
    most = max(1, min(32, channels // 4))
    return next(groups for groups in range(most, 0, -1) if channels % groups == 0)
