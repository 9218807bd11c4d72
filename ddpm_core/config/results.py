"""The sections sample, evaluate, register and tracking: what follows training."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from ddpm_core.config.identity import flat, relevant
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
from ddpm_core.errors import Invalid, Problem, got

EXTRACTORS = "-extractors"  # appended to tracking.experiment: the experiment with the extractors

SamplerName = Literal["ddpm", "ddim", "dpmpp", "heun"]

# Settings of `sample` that do not belong to the sampler: which images to draw, how many, and how
# they are split, computed and stored. Scores and images with different values of any other setting
# are not comparable.
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

Sigma = Annotated[float, Field(ge=0.0)]


class Sample(Section):
    """Which checkpoints are sampled, how many images, by which sampler."""

    checkpoints: Annotated[
        Literal["latest", "all", "best"] | Annotated[tuple[Steps, ...], Field(min_length=1)],
        BeforeValidator(as_tuple),
    ] = Field("all", description="latest, all, best, or a list of steps as in [200, 800]")
    count: Images = Field(
        500, description="images per checkpoint; only scores of equal counts are comparable"
    )
    batch_size: Batch = Field(250, description="images drawn at the same time")
    sampler: SamplerName = Field("dpmpp", description="how noise becomes an image")
    steps: Steps = Field(
        20, description="updates per image, with one evaluation of the network each; heun: two"
    )
    spacing: Literal["uniform", "quadratic", "quadratic_official"] = Field(
        "uniform", description="which timesteps ddpm and ddim use"
    )
    eta: Fraction = Field(0.0, description="noise of DDIM; 0: none, 1: as much as DDPM")
    variance: Literal["auto", "large", "small"] = Field(
        "auto",
        description="posterior variance of DDPM; auto: large if every timestep is used, else small",
    )
    guidance: Annotated[float, Field(ge=0.0)] = Field(
        1.0, description="scale of guidance; 1: none. Away from no class or text, or from `guide`"
    )
    guide: Auto | Steps | None = Field(
        None,
        description="guide away from an earlier checkpoint of the run: its step, or auto, the "
        "milestone nearest to a quarter of the step sampled",
    )
    guidance_interval: Annotated[tuple[Sigma, Sigma], BeforeValidator(as_tuple)] | None = Field(
        None,
        description="guide only at noise of a standard deviation from low to high, as in "
        "[0.3, 3], if that of the images is about 0.5; null: everywhere",
    )
    classes: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] | None = Field(
        None, description="class names to draw in turn; null: as frequent as in training"
    )
    prompts: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] | None = Field(
        None, description="prompts to draw in turn; null: captions as frequent as in training"
    )
    ema: Auto | Literal["none"] | float = Field(
        "auto",
        description="auto: the first of train.ema; none: no average; or a decay or width of "
        "train.ema. If it has widths, any other width too",
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="number format, as in train"
    )
    compile: Auto | bool = Field("auto", description="auto: on a GPU, for many images")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(1, description="seed of the noise")
    shards: Parts = Field(
        1, description="parts that can be drawn separately: ddpm sample --shard 0/4"
    )
    png: bool = Field(False, description="also write one PNG file per image")

    @model_validator(mode="after")
    def _check_guidance(self) -> Self:
        interval, problems = self.guidance_interval, []
        if interval is not None and interval[0] >= interval[1]:
            expected = "must be [low, high] with low < high"
            problems.append(Problem("guidance_interval", got(list(interval)), expected))
        if self.guide is not None and self.guidance == 1.0:
            expected, involves = "must not be 1 with a guide, because 1 has no effect", ("guide",)
            problems.append(Problem("guidance", got(self.guidance), expected, involves=involves))
        if problems:
            raise Invalid(problems)
        return self

    @property
    def evaluations(self) -> int:
        """Return how often the network is evaluated for an image, at most."""
        return 2 * self.steps - 1 if self.sampler == "heun" else self.steps

    def of_sampler(self) -> dict[str, Any]:
        """Return the settings that the chosen sampler uses, as plain data."""
        return _used(self.model_dump(mode="json", exclude=_NOT_OF_SAMPLER))

    def problems(
        self, conditioning: str, timesteps: int, label_drop: float | None = None
    ) -> list[Problem]:
        """Return why a network cannot draw with these settings, with the paths of all settings.

        The arguments are the settings of the network: model.conditioning, diffusion.timesteps and
        train.label_drop. Without `label_drop`, as for a registered model, guidance is not checked.
        """
        problems = []
        if self.steps > timesteps:
            expected = f"must be at most diffusion.timesteps, {timesteps}"
            involves = ("diffusion.timesteps",)
            problems.append(Problem("sample.steps", got(self.steps), expected, involves=involves))
        for name, kind in (("classes", "class"), ("prompts", "text")):
            given, involves = getattr(self, name), ("model.conditioning",)
            if given is not None and conditioning != kind:
                path, expected = f"sample.{name}", f"requires model.conditioning {kind}"
                hint = f"it is {conditioning}"
                problems.append(Problem(path, got(list(given)), expected, hint, involves=involves))
        # With `guide`, every network can be guided. Without it, guidance extrapolates from the
        # unconditional to the conditional prediction. So the network must have been trained with a
        # condition, and sometimes without.
        if self.guidance != 1.0 and self.guide is None and label_drop is not None:
            setting = "model.conditioning" if conditioning == "none" else "train.label_drop"
            if conditioning == "none" or label_drop == 0.0:
                value = "none" if conditioning == "none" else "0"
                expected = f"must be 1 (no guidance) with {setting} {value}"
                guidance = got(self.guidance)
                problems.append(Problem("sample.guidance", guidance, expected, involves=(setting,)))
        return problems


SAMPLER_DEFAULTS: dict[str, Any] = Sample().model_dump(mode="json", exclude=_NOT_OF_SAMPLER)


def as_sampled(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return an earlier `of_sampler` with the defaults of settings that it does not contain."""
    return _used({**SAMPLER_DEFAULTS, **record})


def _used(given: Mapping[str, Any]) -> dict[str, Any]:
    used = relevant(flat(given, "sample."))
    return {name.removeprefix("sample."): value for name, value in used.items()}


class Evaluate(Section):
    """How sampled checkpoints are scored."""

    extractor: Literal["auto", "inception", "in_domain"] = Field(
        "auto",
        description="features that images are compared by; auto: inception if weights are set",
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
        None, description="a file or a URI; #sha256=HEX at the end is checked"
    )

    @model_validator(mode="after")
    def _check_scores(self) -> Self:
        if self.extractor == "inception" and self.inception_weights is None:
            expected = "must be a file or URI of torch-fidelity's weights with extractor inception"
            hint, involves = "or use extractor in_domain", ("extractor",)
            raise Invalid(
                [Problem("inception_weights", got(None), expected, hint, involves=involves)]
            )
        if not {"fid", "kid"} & set(self.metrics):
            expected = "must contain fid or kid, which rank the checkpoints"
            raise Invalid([Problem("metrics", got(list(self.metrics)), expected)])
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
    def _check_names(self) -> Self:
        """Check what MLflow itself would refuse only after everything is uploaded."""
        problems = []
        if self.name == "." or self.name.startswith(".."):
            problems.append(Problem("name", got(self.name), "must not be . or begin with .."))
        if re.fullmatch(r"latest|v\d+", self.alias, re.IGNORECASE):
            expected = "must not be latest or v with a number, which MLflow reserves"
            problems.append(Problem("alias", got(self.alias), expected))
        if problems:
            raise Invalid(problems)
        return self


class Tracking(Section):
    """The MLflow server or database, and TensorBoard."""

    uri: str = Field(
        "sqlite:///mlflow.db", description="an MLflow tracking URI; empty: no tracking"
    )
    experiment: Annotated[str, Field(min_length=1, max_length=NAME - len(EXTRACTORS))] = Field(
        "ddpm", description="MLflow experiment of the runs"
    )
    system_metrics: bool = Field(
        False, description="log the use of CPU, memory, disk, network and GPU to MLflow in training"
    )
    tensorboard: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="a folder for TensorBoard: training rows, scores, grids; null: none"
    )

    @model_validator(mode="after")
    def _check_folder(self) -> Self:
        if "://" in (self.tensorboard or ""):
            given = got(self.tensorboard)
            raise Invalid([Problem("tensorboard", given, "must be a local folder, or null")])
        return self

    @field_validator("uri")
    @classmethod
    def _expand_home(cls, uri: str) -> str:
        """Expand the ~ of a path: MLflow would create a folder with that name."""
        scheme = next((s for s in ("sqlite:///", "file://") if uri.startswith(s)), "")
        return scheme + os.path.expanduser(uri.removeprefix(scheme))  # noqa: PTH111, may be no path
