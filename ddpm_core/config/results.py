"""The sections sample, evaluate, register and tracking: what is made of a training."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from ddpm_core.config.identity import deciding, flat
from ddpm_core.config.section import (
    NAME,
    Auto,
    Batch,
    Fraction,
    Images,
    Parts,
    Section,
    Steps,
    Width,
    as_tuple,
)

EXTRACTORS = "-extractors"  # appended to tracking.experiment: the experiment with the extractors

SamplerName = Literal["ddpm", "ddim", "dpmpp"]

# Settings of `sample` that are not the sampler's: which images are wanted, how many, and how they
# are cut, drawn and stored. Every other one tells scores and images apart.
_NOT_OF_SAMPLER = {
    "checkpoints",
    "count",
    "batch_size",
    "seed",
    "shards",
    "png",
    "precision",
    "compile",
}


class Sample(Section):
    """Which checkpoints are sampled, how many images, by which sampler."""

    checkpoints: Annotated[
        Literal["latest", "all", "best"] | Annotated[tuple[Steps, ...], Field(min_length=1)],
        BeforeValidator(as_tuple),
    ] = Field("all", description="latest, all, best, or a list of steps as in [200, 800]")
    count: Images = Field(
        500, description="images of each checkpoint; scores compare at equal counts alone"
    )
    batch_size: Batch = Field(250, description="images drawn at once")
    sampler: SamplerName = Field("dpmpp", description="how noise becomes an image")
    steps: Steps = Field(20, description="evaluations of the network for an image")
    spacing: Literal["uniform", "quadratic", "quadratic_official"] = Field(
        "uniform", description="which timesteps, of ddpm and ddim"
    )
    eta: Fraction = Field(0.0, description="DDIM's noise: 0 none, 1 that of DDPM")
    variance: Literal["auto", "large", "small"] = Field(
        "auto",
        description="DDPM's posterior variance; auto: large for full chains, small for short",
    )
    guidance: Annotated[float, Field(ge=0.0)] = Field(1.0, description="classifier-free; 1: none")
    classes: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] | None = Field(
        None, description="class names to draw, in turn; null: as frequent as in training"
    )
    prompts: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] | None = Field(
        None, description="texts to draw, in turn; null: captions as frequent as in training"
    )
    ema: Auto | Literal["none"] | float = Field("auto", description="auto: the first of train.ema")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="number format, as in train"
    )
    compile: Auto | bool = Field("auto", description="auto: on a GPU, for a lot of images")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(1, description="of the images' noise")
    shards: Parts = Field(1, description="parts that may be drawn apart: ddpm sample --shard 0/4")
    png: bool = Field(False, description="also single PNG files")

    def of_sampler(self) -> dict[str, Any]:
        """The settings that the chosen sampler draws by, as plain data."""
        return _used(self.model_dump(mode="json", exclude=_NOT_OF_SAMPLER))

    def guidance_lacks(self, conditioning: str, label_drop: float) -> str:
        """The setting of a training that guidance can't work with; empty where it can, or is none.

        It leads from the network's images of no condition to those of one, and needs both.
        """
        if self.guidance == 1.0:
            return ""
        if conditioning == "none":
            return "model.conditioning"
        return "" if label_drop else "train.label_drop"


SAMPLER_DEFAULTS: dict[str, Any] = Sample().model_dump(mode="json", exclude=_NOT_OF_SAMPLER)


def as_sampled(record: Mapping[str, Any]) -> dict[str, Any]:
    """An earlier `of_sampler` as it would be written today: what it lacks had its default."""
    return _used({**SAMPLER_DEFAULTS, **record})


def _used(given: Mapping[str, Any]) -> dict[str, Any]:
    used = deciding(flat(given, "sample."))
    return {name.removeprefix("sample."): value for name, value in used.items()}


class Evaluate(Section):
    """How sampled checkpoints are scored."""

    extractor: Literal["auto", "inception", "in_domain"] = Field(
        "auto", description="what images are compared by; auto: inception where weights are given"
    )
    metrics: Annotated[
        tuple[Literal["fid", "kid", "is", "prdc", "memorisation"], ...],
        BeforeValidator(as_tuple),
        Field(min_length=1),
    ] = Field(
        ("fid", "kid", "is", "prdc", "memorisation"),
        description="scores to compute; fid or kid ranks the checkpoints",
    )
    neighbours: Width = Field(5, description="k of precision, recall, density and coverage")
    inception_weights: str | None = Field(
        None, description="a file, or a URI; #sha256=HEX at the end is checked"
    )

    @model_validator(mode="after")
    def _can_score(self) -> Self:
        if self.extractor == "inception" and self.inception_weights is None:
            raise ValueError(
                "inception_weights: none given, but extractor is inception; a file or URI of "
                "torch-fidelity's weights is needed, or extractor in_domain"
            )
        if not {"fid", "kid"} & set(self.metrics):
            raise ValueError(
                f"metrics: {list(self.metrics)} given; fid or kid is needed to rank checkpoints"
            )
        return self


class Register(Section):
    """The model in MLflow's registry."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$", max_length=NAME)] = Field(
        "ddpm", description="letters, digits, dots, - and _"
    )
    alias: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$", max_length=NAME)] = Field(
        "champion", description="a letter, then letters, digits, - and _"
    )

    @model_validator(mode="after")
    def _can_be_told_apart(self) -> Self:
        """MLflow itself says no only at the end, when all is uploaded."""
        mistakes = []
        if self.name == "." or self.name.startswith(".."):
            mistakes.append(f"name: {self.name!r} given; one that is no path of dots is needed")
        if re.fullmatch(r"latest|v\d+", self.alias, re.IGNORECASE):
            mistakes.append(
                f"alias: {self.alias!r} given; MLflow keeps latest, and v with a number, for "
                "itself: another name is needed"
            )
        if mistakes:
            raise ValueError("\n".join(mistakes))
        return self


class Tracking(Section):
    """Where MLflow is."""

    uri: str = Field(
        "sqlite:///mlflow.db", description="an MLflow tracking URI; empty: no tracking"
    )
    experiment: Annotated[str, Field(min_length=1, max_length=NAME - len(EXTRACTORS))] = Field(
        "ddpm", description="MLflow's experiment of the runs"
    )

    @field_validator("uri")
    @classmethod
    def _home_is_a_folder(cls, uri: str) -> str:
        """Expand the ~ of a path: MLflow would make a folder of that name."""
        scheme = next((s for s in ("sqlite:///", "file://") if uri.startswith(s)), "")
        return scheme + os.path.expanduser(uri.removeprefix(scheme))  # noqa: PTH111, may be no path
