"""The section prepare: the image source, and how images become square."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from ddpm_core.config.section import Auto, Fraction, Processes, Section, as_tuple
from ddpm_core.errors import Invalid, Problem, got


class Prepare(Section):
    """Where the images come from and how they become square."""

    source: str = Field(
        "digits",
        description="digits, cifar10, dtd, a folder, a zip, tar, parquet, npy or npz file, "
        "s3://... or dvc:REPO#PATH@REV",
    )
    image_size: Annotated[int, Field(ge=4, le=1024)] = Field(
        16, description="width and height in pixels"
    )
    channels: Auto | Literal[1, 3] = Field(
        "auto", description="auto: 1 if every image is gray, else 3"
    )
    resize: Literal["crop", "pad", "squash"] = Field(
        "crop", description="how an image becomes square"
    )
    background: str = Field(
        "white", description="color behind transparent and around padded images"
    )
    holdout: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.1, description="share of images held out, if the source has no test or val folder"
    )
    classes: Annotated[tuple[str, ...], BeforeValidator(as_tuple), Field(min_length=1)] | None = (
        Field(None, description="classes to use; null: all")
    )
    caption: str = Field("a photo of a {class}", description="caption of images without one")
    caption_column: Annotated[str, Field(min_length=1)] = Field(
        "text", description="column or key with the captions: parquet, metadata.csv, .json(l)"
    )
    image_column: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="column of parquet files with the images; null: found by its type"
    )
    label_column: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="column of parquet files or key of .json files with the class; null: found",
    )
    workers: Auto | Processes = Field(
        "auto", description="processes that decode images; auto: one per CPU core"
    )
    max_rejected: Fraction = Field(
        0.01, description="fail if the share of unusable files is above this"
    )
    download: bool = Field(False, description="download cifar10 and dtd if they are missing")
    anonymous: bool = Field(False, description="read s3:// without credentials, for public buckets")

    @model_validator(mode="after")
    def _check_background(self) -> Self:
        if self.background in ("white", "black", "gray"):
            return self
        from PIL import ImageColor

        try:
            ImageColor.getrgb(self.background)
        except ValueError:
            expected = "must be a color such as white or #808080"
            raise Invalid([Problem("background", got(self.background), expected)]) from None
        return self
