"""The section prepare: which images, and how they are made square."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from ddpm_core.config.section import Auto, Fraction, Processes, Section, as_tuple


class Prepare(Section):
    """Where the images come from and how they are made square."""

    source: str = Field(
        "digits",
        description="digits, cifar10, dtd, a folder, a zip or tar, s3://... or dvc:REPO#PATH@REV",
    )
    image_size: Annotated[int, Field(ge=4, le=1024)] = Field(16, description="pixels a side")
    channels: Auto | Literal[1, 3] = Field("auto", description="auto: 1 where every image is gray")
    resize: Literal["crop", "pad", "squash"] = Field(
        "crop", description="how a picture becomes square"
    )
    background: str = Field("white", description="behind transparency and around padded images")
    holdout: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.1, description="share held out, where the source has no test or val folder of its own"
    )
    classes: Annotated[tuple[str, ...], BeforeValidator(as_tuple), Field(min_length=1)] | None = (
        Field(None, description="the classes to use; null: all")
    )
    caption: str = Field(
        "a photo of a {class}", description="the caption of a picture that comes without"
    )
    caption_column: Annotated[str, Field(min_length=1)] = Field(
        "text", description="the column of metadata.csv or key of metadata.jsonl with captions"
    )
    workers: Auto | Processes = Field(
        "auto", description="processes that decode; auto: one a processor"
    )
    max_rejected: Fraction = Field(
        0.01, description="share of unusable files above which nothing is made"
    )
    download: bool = Field(
        False, description="whether cifar10 and dtd are fetched where they are not at hand"
    )

    anonymous: bool = Field(
        False, description="whether s3:// is read without keys, as public buckets can be"
    )

    @model_validator(mode="after")
    def _background_is_a_color(self) -> Self:
        if self.background in ("white", "black", "gray"):
            return self
        from PIL import ImageColor

        try:
            ImageColor.getrgb(self.background)
        except ValueError:
            raise ValueError(
                f"background: {self.background!r} given; a color such as white or #808080 is needed"
            ) from None
        return self
