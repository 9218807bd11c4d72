"""The sections model and diffusion: the network and what it is to undo."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ddpm_core.config.section import LEVELS, Depth, Section, Width, as_tuple


def attention_sizes(image_size: int, levels: int) -> list[int]:
    """What `attention: auto` means: the largest image size of at most 16 below the images' own.

    16 is where Ho et al. (2020), section B, have it for images of 32 pixels. Where no level is so
    small, it is the smallest there is.
    """
    sizes = [max(1, image_size >> level) for level in range(levels)]
    small = [size for size in sizes if size <= 16 and size < image_size]
    return [max(small)] if small else sizes[-1:]


def _plain(number: float) -> int | float:
    return int(number) if number == int(number) else number


Multiplier = Annotated[int | float, Field(gt=0, le=2**10), AfterValidator(_plain)]


class Model(Section):
    """The U-Net of Ho et al. (2020), section B."""

    channels: Annotated[Width, Field(ge=2)] = Field(32, description="channels of the first level")
    multipliers: Annotated[
        tuple[Multiplier, ...], BeforeValidator(as_tuple), Field(min_length=1, max_length=LEVELS)
    ] = Field(
        (1, 2, 2),
        description="channels of each level, times `channels`; a level halves the size",
    )
    blocks: Depth = Field(1, description="residual blocks a level")
    attention: Annotated[tuple[Depth, ...], BeforeValidator(as_tuple)] = Field(
        (8,), description="image sizes with self-attention: a list, or auto, the largest up to 16"
    )
    heads: Width = Field(1, description="attention heads")
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.0, description="share of activations that are dropped in training"
    )
    conditioning: Literal["none", "class", "text"] = Field(
        "none", description="what an image can be asked for by"
    )

    @model_validator(mode="after")
    def _widths_are_whole(self) -> Self:
        for multiplier in self.multipliers:
            width = self.channels * multiplier
            if width < 1 or abs(width - round(width)) > 1e-6:
                raise ValueError(
                    f"multipliers: {multiplier} given; times channels, {self.channels}, it must be "
                    "a whole number"
                )
        return self

    @property
    def widths(self) -> list[int]:
        """The number of channels at each level."""
        return [round(self.channels * multiplier) for multiplier in self.multipliers]


class Diffusion(Section):
    """The forward process and what the network predicts."""

    schedule: Literal["linear", "cosine"] = Field(
        "cosine", description="how noise grows with the timestep"
    )
    timesteps: Annotated[int, Field(ge=2, le=100_000)] = Field(1000, description="noise levels")
    prediction: Literal["noise", "x0", "v"] = Field("v", description="what the network predicts")

    @model_validator(mode="after")
    def _linear_needs_steps(self) -> Self:
        if self.schedule == "linear" and self.timesteps <= 20:
            raise ValueError(
                f"timesteps: {self.timesteps} with schedule linear: its rescaled betas, up to "
                "0.02 x 1000 / timesteps, reach 1; use more than 20 timesteps or schedule cosine"
            )
        return self
