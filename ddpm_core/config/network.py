"""The sections model and diffusion: the U-Net and the noise that it learns to remove."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ddpm_core.config.section import LEVELS, Depth, Section, Width, as_tuple
from ddpm_core.errors import Invalid, Problem, got
from ddpm_core.models.config import UNetConfig, group_count


def attention_sizes(image_size: int, levels: int) -> list[int]:
    """Return the image sizes that `attention: auto` stands for.

    That is the largest size of at most 16 pixels below the size of the images themselves: Ho et al.
    (2020), section B, use 16 for images of 32 pixels. If no level is that small, it is the size of
    the last level.
    """
    sizes = [max(1, image_size >> level) for level in range(levels)]
    small = [size for size in sizes if size <= 16 and size < image_size]
    return [max(small)] if small else sizes[-1:]


def _plain(number: float) -> int | float:
    return int(number) if number == int(number) else number


_Bounds = Field(gt=0, le=2**10)
Multiplier = Annotated[Annotated[int, _Bounds] | Annotated[float, _Bounds], AfterValidator(_plain)]


class Model(Section):
    """The U-Net of Ho et al. (2020), section B."""

    channels: Annotated[Width, Field(ge=2)] = Field(32, description="channels of the first level")
    multipliers: Annotated[
        tuple[Multiplier, ...], BeforeValidator(as_tuple), Field(min_length=1, max_length=LEVELS)
    ] = Field(
        (1, 2, 2),
        description="channels of each level, times `channels`; each level halves the size",
    )
    blocks: Depth = Field(1, description="residual blocks per level")
    attention: Annotated[tuple[Depth, ...], BeforeValidator(as_tuple)] = Field(
        (8,), description="image sizes with self-attention: a list, or auto, the largest up to 16"
    )
    heads: Width = Field(1, description="attention heads")
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.0, description="share of activations dropped in training"
    )
    conditioning: Literal["none", "class", "text"] = Field(
        "none", description="condition images on a class, a text prompt, or nothing"
    )
    cross_attention: bool = Field(
        False, description="attend to each byte of a prompt, not only to their average"
    )

    def network(self, image_size: int, in_channels: int, classes: int) -> UNetConfig:
        """Return the network for images of a size (pixels a side), with 1 or 3 channels.

        `classes` counts only with conditioning class. All norms have the number of groups of the
        first level, since diffusers' UNet2DModel has one number for all.

        Raises:
            pydantic.ValidationError: the settings contradict each other or the images.
        """
        widths = [round(self.channels * multiplier) for multiplier in self.multipliers]
        return UNetConfig(
            image_size=image_size,
            in_channels=in_channels,
            channels=self.channels,
            multipliers=self.multipliers,
            blocks=self.blocks,
            attention=self.attention,
            heads=self.heads,
            dropout=self.dropout,
            conditioning=self.conditioning,
            classes=classes if self.conditioning == "class" else 0,
            cross_attention=self.cross_attention and self.conditioning == "text",
            norm_num_groups=group_count(math.gcd(self.channels, *widths)),
        )


class Diffusion(Section):
    """The forward process, and what the network predicts."""

    schedule: Literal["linear", "cosine"] = Field(
        "cosine", description="how the noise grows with the timestep"
    )
    timesteps: Annotated[int, Field(ge=2, le=100_000)] = Field(
        1000, description="number of noise levels"
    )
    prediction: Literal["noise", "x0", "v", "edm", "wiener"] = Field(
        "v", description="what the network predicts; edm and wiener use moments of the images"
    )
    zero_terminal_snr: bool = Field(
        False, description="rescale the schedule so that the last timestep is pure noise"
    )

    @property
    def uses_moments(self) -> bool:
        """Return whether the prediction depends on the mean and covariance of the images."""
        return self.prediction in ("edm", "wiener")

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        problems = []
        if self.schedule == "linear" and self.timesteps <= 20:
            # Its betas are rescaled and go up to 0.02 x 1000 / timesteps, which must stay below 1.
            expected, hint = "must be more than 20 with schedule linear", "or use schedule cosine"
            given, involves = got(self.timesteps), ("schedule",)
            problems.append(Problem("timesteps", given, expected, hint, involves=involves))
        if self.zero_terminal_snr and self.prediction == "noise":
            # At the last timestep the noise is the input, so predicting it says nothing about x0.
            expected = "must be v, x0, edm or wiener with zero_terminal_snr"
            given, involves = got(self.prediction), ("zero_terminal_snr",)
            problems.append(Problem("prediction", given, expected, involves=involves))
        if problems:
            raise Invalid(problems)
        return self
