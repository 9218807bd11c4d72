"""What to do: the sections of params.yaml as frozen, validated objects.

Nothing here imports torch, so `ddpm --help` and a mistake in a params file answer at once.
Every mistake of a file is reported together, each with its path, what was given and what is
allowed.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Auto = Literal["auto"]


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


class Section(BaseModel):
    """Base of every section: unknown keys, wrong types and NaN are mistakes."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Prepare(Section):
    """Where the images come from and how they are made square."""

    source: str = Field(
        "digits", description="digits, a directory, archive, s3://, dvc:, cifar10 or dtd"
    )
    image_size: Annotated[int, Field(ge=4, le=1024)] = 16
    channels: Auto | Literal[1, 3] = Field("auto", description="auto: 1 where every image is gray")
    resize: Literal["crop", "pad", "squash"] = "crop"
    background: str = Field("white", description="behind transparency and around padded images")
    holdout: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.1, description="share held out, where the source has no test or val folder of its own"
    )
    classes: Annotated[tuple[str, ...], BeforeValidator(_as_tuple), Field(min_length=1)] | None = (
        Field(None, description="the classes to use; none: all")
    )
    caption: str = Field(
        "a photo of a {class}", description="the caption of a picture that comes without"
    )
    workers: Auto | Positive = "auto"
    max_rejected: Fraction = 0.01
    download: bool = False

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


class Model(Section):
    """The U-Net of Ho et al. (2020), section B."""

    channels: Positive = 32
    multipliers: Annotated[
        tuple[Positive, ...], BeforeValidator(_as_tuple), Field(min_length=1)
    ] = (1, 2, 2)
    blocks: Positive = 1
    attention: Annotated[tuple[Positive, ...], BeforeValidator(_as_tuple)] = Field(
        (8,), description="image sizes at which self-attention is added"
    )
    heads: Positive = 1
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    conditioning: Literal["none", "class", "text"] = "none"


class Diffusion(Section):
    """The forward process and what the network predicts."""

    schedule: Literal["linear", "cosine"] = "cosine"
    timesteps: Annotated[int, Field(ge=2, le=100_000)] = 1000
    prediction: Literal["noise", "x0", "v"] = "v"

    @model_validator(mode="after")
    def _linear_needs_steps(self) -> Self:
        if self.schedule == "linear" and self.timesteps <= 20:
            raise ValueError(
                f"timesteps: {self.timesteps} with schedule linear: its rescaled betas, up to "
                "0.02 x 1000 / timesteps, reach 1; use more than 20 timesteps or schedule cosine"
            )
        return self


class Optimizer(Section):
    name: Literal["adam", "adamw"] = "adam"
    lr: Annotated[float, Field(gt=0.0)] = 1.0e-3
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0.0, lt=1.0)], Annotated[float, Field(ge=0.0, lt=1.0)]],
        BeforeValidator(_as_tuple),
    ] = (0.9, 0.999)
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    warmup: Annotated[int, Field(ge=0)] = Field(100, description="steps of linear warm-up")
    schedule: Literal["constant", "cosine"] = "constant"
    clip: Annotated[float, Field(ge=0.0)] = Field(
        1.0, description="largest gradient norm; 0: no clipping"
    )


class Loss(Section):
    kind: Literal["l2", "huber"] = "l2"
    weighting: Literal["uniform", "min_snr", "p2"] = "min_snr"
    gamma: Annotated[float, Field(gt=0.0)] | None = Field(
        None, description="min_snr's bound (5) or p2's power (1), where none is given"
    )
    k: Annotated[float, Field(gt=0.0)] = Field(1.0, description="p2's offset")


class Timesteps(Section):
    sampler: Literal["uniform"] = "uniform"


class Train(Section):
    """One run of training; `batch_size` is that of all workers and microbatches together."""

    steps: Positive = 800
    batch_size: Positive = 32
    microbatches: Positive = Field(1, description="gradient accumulation, for memory alone")
    processes: Auto | Positive = Field(1, description="auto: one a GPU")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    compile: Auto | bool = "auto"
    init: str | None = Field(None, description="start from a models:/ URI or a diffusers folder")
    optimizer: Optimizer = Optimizer()
    ema: Annotated[
        tuple[Annotated[float, Field(gt=0.0, lt=1.0)], ...], BeforeValidator(_as_tuple)
    ] = (0.99,)
    ema_warmup: bool = Field(
        False, description="decay (1 + step) / (10 + step) until it reaches ema"
    )
    flip: bool = False
    label_drop: Fraction = 0.1
    loss: Loss = Loss()
    timesteps: Timesteps = Timesteps()
    log_every: Positive = 20
    grid: Annotated[int, Field(ge=0)] = Field(36, description="images in a milestone's preview")
    snapshot_every: Positive = 200
    keep: Positive = Field(3, description="snapshots kept beside the milestones")
    milestone_every: Positive = Field(200, description="steps between checkpoints for evaluation")

    @model_validator(mode="after")
    def _microbatches_fit(self) -> Self:
        if self.microbatches > self.batch_size:
            raise ValueError(
                f"microbatches: {self.microbatches} is more than batch_size, {self.batch_size}"
            )
        if len(set(self.ema)) < len(self.ema):
            raise ValueError(f"ema: {list(self.ema)} has a decay twice")
        return self


class Sample(Section):
    """Which checkpoints are sampled, how many images, by which sampler."""

    checkpoints: Annotated[
        Literal["latest", "all", "best"] | Annotated[tuple[Positive, ...], Field(min_length=1)],
        BeforeValidator(_as_tuple),
    ] = "all"
    count: Positive = 500
    batch_size: Positive = 250
    sampler: Literal["ddpm", "ddim", "dpmpp"] = "dpmpp"
    steps: Positive = 20
    spacing: Literal["uniform", "quadratic", "quadratic_official"] = "uniform"
    eta: Fraction = Field(0.0, description="DDIM's noise: 0 none, 1 that of DDPM")
    variance: Literal["auto", "large", "small"] = Field(
        "auto",
        description="DDPM's posterior variance; auto: large for full chains, small for short",
    )
    guidance: Annotated[float, Field(ge=0.0)] = Field(1.0, description="classifier-free; 1: none")
    classes: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] | None = Field(
        None, description="class names to draw, in turn; none: as frequent as in training"
    )
    prompts: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] | None = Field(
        None, description="texts to draw, in turn; none: captions as frequent as in training"
    )
    ema: Auto | Literal["none"] | float = Field("auto", description="auto: the first of train.ema")
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    shards: Positive = 1
    png: bool = Field(False, description="also single PNG files")


class Evaluate(Section):
    """How sampled checkpoints are scored."""

    extractor: Literal["auto", "inception", "in_domain"] = "auto"
    metrics: Annotated[
        tuple[Literal["fid", "kid", "is", "prdc", "memorisation"], ...],
        BeforeValidator(_as_tuple),
        Field(min_length=1),
    ] = ("fid", "kid", "is", "prdc", "memorisation")
    neighbours: Positive = Field(5, description="k of precision, recall, density and coverage")
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
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")] = "ddpm"
    alias: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")] = "champion"


class Tracking(Section):
    uri: str = Field(
        "sqlite:///mlflow.db", description="an MLflow tracking URI; empty: no tracking"
    )
    experiment: str = "ddpm"


class Config(Section):
    """A whole params.yaml."""

    def dump(self) -> dict[str, Any]:
        """Plain data, as in a params file; `params.validate` makes the same Config of it."""
        return self.model_dump(mode="json", by_alias=True)

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    workspace: str = "workspace"
    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")] = "auto"
    prepare: Prepare = Prepare()
    model: Model = Model()
    diffusion: Diffusion = Diffusion()
    train: Train = Train()
    sample: Sample = Sample()
    evaluate: Evaluate = Evaluate()
    registration: Register = Field(Register(), alias="register")  # a class has a `register`
    tracking: Tracking = Tracking()

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        mistakes = [*self._network_mistakes(), *self._sampling_mistakes()]
        if mistakes:
            raise ValueError("\n".join(mistakes))
        return self

    def _network_mistakes(self) -> list[str]:
        size, levels = self.prepare.image_size, len(self.model.multipliers)
        divisor = 2 ** (levels - 1)
        if size % divisor:
            below, above = size // divisor * divisor, -(-size // divisor) * divisor
            allowed = f"{below} or {above}" if below else f"{above}"
            return [
                f"prepare.image_size: {size} given; a network of {levels} levels halves it "
                f"{levels - 1} times, so a multiple of {divisor} is needed: {allowed}"
            ]
        sizes = [size // 2**level for level in range(levels)]
        mistakes = [
            f"model.attention: {a} given; the network of prepare.image_size {size} works at {sizes}"
            for a in self.model.attention
            if a not in sizes
        ]
        uneven = [m for m in self.model.multipliers if self.model.channels * m % self.model.heads]
        if uneven:
            mistakes.append(
                f"model.heads: {self.model.heads} given; it must divide the channels of every "
                f"level, {[self.model.channels * m for m in self.model.multipliers]}"
            )
        return mistakes

    def _sampling_mistakes(self) -> list[str]:
        mistakes = []
        if self.sample.steps > self.diffusion.timesteps:
            mistakes.append(
                f"sample.steps: {self.sample.steps} given; there are only "
                f"{self.diffusion.timesteps} (diffusion.timesteps)"
            )
        if self.sample.classes is not None and self.model.conditioning != "class":
            mistakes.append("sample.classes: given, but model.conditioning is not class")
        if self.sample.prompts is not None and self.model.conditioning != "text":
            mistakes.append("sample.prompts: given, but model.conditioning is not text")
        if isinstance(self.sample.ema, float) and self.sample.ema not in self.train.ema:
            mistakes.append(
                f"sample.ema: {self.sample.ema} given; train.ema has {list(self.train.ema)}"
            )
        return mistakes
