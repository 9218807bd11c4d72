"""The section train: the training run, its optimizer and its loss."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from ddpm_core.config.durations import YEAR, duration
from ddpm_core.config.section import Auto, Batch, Fraction, Processes, Section, Steps, as_tuple
from ddpm_core.errors import Invalid, Problem, UserError, got


def _is_interval(every: int | str) -> bool:
    """Return whether `every` is a number of steps, or a time of at most a year."""
    if isinstance(every, int):
        return every > 0
    try:
        return bool(re.fullmatch("[1-9][0-9]*[smh]", every) and duration(every))
    except UserError:
        return False


def width_of(average: float | str) -> float | None:
    """Return the width of a power-function average such as `power:0.05`; None for a decay."""
    match = re.fullmatch(r"power:(0?\.\d+)", average) if isinstance(average, str) else None
    return float(match[1]) if match else None


def _average(value: Any) -> float | str:
    """Return a decay, or a power-function average as `power:` and its width."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and 0.0 < value < 1.0:
        return float(value)
    from ddpm_core.models.averages import WIDTHS  # here, because it imports numpy

    low, high = WIDTHS
    if (width := width_of(value)) is not None and low <= width <= high:
        return f"power:{width}"
    expected = f"must be a decay between 0 and 1, or a width from power:{low} to power:{high}"
    raise Invalid([Problem("", got(value), expected)])


class Optimizer(Section):
    """Adam, its learning rate and gradient clipping."""

    name: Literal["adam", "adamw"] = Field("adam", description="adamw: decoupled weight decay")
    lr: Annotated[float, Field(gt=0.0)] = Field(1.0e-3, description="learning rate")
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0.0, lt=1.0)], Annotated[float, Field(ge=0.0, lt=1.0)]],
        BeforeValidator(as_tuple),
    ] = Field(
        (0.9, 0.999), description="decay rates of the averages of the gradient and its square"
    )
    weight_decay: Annotated[float, Field(ge=0.0)] = Field(
        0.0, description="strength of weight decay"
    )
    warmup: Annotated[int, Field(ge=0, le=10**10)] = Field(
        100, description="steps of linear warm-up of the learning rate"
    )
    schedule: Literal["constant", "cosine"] = Field(
        "constant", description="learning rate after the warm-up"
    )
    clip: Annotated[float, Field(ge=0.0)] = Field(
        1.0, description="maximum norm of the gradient; 0: no clipping"
    )


class Loss(Section):
    """The loss that training minimizes."""

    kind: Literal["l2", "huber"] = Field("l2", description="distance between prediction and target")
    weighting: Literal["uniform", "min_snr", "p2", "debias", "edm"] = Field(
        "min_snr", description="weight of each noise level"
    )
    gamma: Annotated[float, Field(gt=0.0)] | None = Field(
        None, description="bound of min_snr (null: 5), power of p2 (null: 1)"
    )
    k: Annotated[float, Field(gt=0.0)] = Field(1.0, description="offset of p2")


class Timesteps(Section):
    """The noise levels of a batch."""

    sampler: Literal["uniform", "log_normal", "laplace", "speed"] = Field(
        "uniform", description="distribution of the noise levels"
    )
    adaptive: Literal[
        "none",
        "loss_second_moment",
        "uncertainty",
        "variance",
        "wiener_gate",
        "paired_progress",
        "held_out",
        "kim",
        "replay",
    ] = Field("none", description="method that learns the noise levels or their weights")
    tables: str | None = Field(
        None, description="noise_levels.safetensors in a snapshot of another run, for replay"
    )
    order: Literal["recorded", "reversed", "last", "mean"] = Field(
        "recorded", description="how replay reads the tables"
    )

    @model_validator(mode="after")
    def _check_tables(self) -> Self:
        if self.adaptive == "replay" and self.tables is None:
            expected, involves = "required by adaptive replay", ("adaptive",)
            raise Invalid([Problem("tables", "missing", expected, involves=involves)])
        return self


class Train(Section):
    """The training run."""

    steps: Steps = Field(800, description="number of optimizer steps")
    batch_size: Batch = Field(32, description="images per step, over all workers and microbatches")
    microbatches: Batch = Field(1, description="gradient accumulation, to save memory")
    processes: Auto | Processes = Field(1, description="worker processes; auto: one per GPU")
    worker_timeout: Annotated[float, Field(gt=0.0, le=YEAR)] = Field(
        300.0, description="seconds without an answer after which a worker counts as hung"
    )
    restarts: Annotated[int, Field(ge=0, le=10**6)] = Field(
        3, description="how often all processes restart after one of them failed"
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="number format; auto: bf16 if it is faster, else fp32"
    )
    compile: Auto | bool = Field("auto", description="auto: on a GPU, if PyTorch supports it")
    reduction: Literal["flat", "exact"] = Field(
        "flat", description="exact: bit-identical on any number of workers, but slow"
    )
    init: str | None = Field(
        None, description="start from models:/NAME@ALIAS, a checkpoint folder or a diffusers folder"
    )
    init_diffusion: Literal["same", "any"] = Field(
        "same", description="any: init may have a different prediction, schedule or timesteps"
    )
    optimizer: Optimizer = Optimizer()
    ema: Annotated[
        tuple[Annotated[float | str, PlainValidator(_average)], ...],
        BeforeValidator(as_tuple),
        Field(max_length=100),
    ] = Field(
        (0.99,),
        description="averages of the weights: decays (0.9999 for 100,000 steps or more), or widths "
        "as in [power:0.05, power:0.1], for sample.ema of any width",
    )
    ema_warmup: bool = Field(
        False, description="use the decay (1 + step) / (10 + step) until it reaches that of ema"
    )
    flip: bool = Field(False, description="mirror half of the images; not for digits")
    augment: Literal["none", "crop", "edm"] = Field(
        "none",
        description="for few images; crop: random resized crops; edm: transforms that condition "
        "the network and do not appear in samples",
    )
    balance: Literal["none", "classes"] = Field(
        "none", description="classes: draw every class equally often"
    )
    label_drop: Fraction = Field(
        0.1, description="share of images trained without class or text, for guidance"
    )
    loss: Loss = Loss()
    timesteps: Timesteps = Timesteps()
    log_every: Steps = Field(20, description="steps between rows of the log")
    validate_every: Annotated[int, Field(ge=0, le=10**10)] = Field(
        200, description="steps between measurements of the loss on held-out images; 0: none"
    )
    grid: Annotated[int, Field(ge=0, le=10**4)] = Field(
        36, description="images in the preview of a milestone"
    )
    snapshot_every: int | str = Field(
        200, description="steps, or a time such as 90s, 5m or 1h, checked at each logged step"
    )
    keep: Steps = Field(3, description="snapshots to keep in addition to the milestones")
    milestone_every: Steps = Field(200, description="steps between checkpoints for evaluation")

    @property
    def snapshot_steps(self) -> int | None:
        """Return `snapshot_every` if it is a number of steps, else None."""
        return self.snapshot_every if isinstance(self.snapshot_every, int) else None

    @property
    def snapshot_seconds(self) -> float | None:
        """Return `snapshot_every` in seconds if it is a time, else None."""
        if isinstance(self.snapshot_every, int):
            return None
        return duration(self.snapshot_every)

    def is_milestone(self, step: int) -> bool:
        """Return whether the snapshot of a step is kept for evaluation; the last one always is."""
        return step % self.milestone_every == 0 or step == self.steps

    def milestones(self, available: Iterable[int], step: int) -> list[int]:
        """Return the steps before `step` that stay available for evaluation, in their order."""
        return [s for s in available if s < step and s % self.milestone_every == 0]

    def width_problem(self, ema: float | str, milestones: Sequence[int], step: int) -> str:
        """Return which widths `sample.ema` may have at a step, or "" if it has one of them.

        `milestones` are the earlier ones, ascending. Other kinds of `sample.ema` are no problem.
        """
        if not isinstance(ema, float) or not self.widths or ema in (*self.ema, *self.widths):
            return ""
        from ddpm_core.models.averages import problem, profiles  # here: it imports numpy

        return problem(profiles(self.widths, milestones, step), step, ema)

    @property
    def widths(self) -> list[float]:
        """Return the widths of the power-function averages in `ema`."""
        return [width for width in map(width_of, self.ema) if width is not None]

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        problems = []
        if self.microbatches > self.batch_size:
            expected = f"must be at most batch_size, {self.batch_size}"
            involves = ("batch_size",)
            given = got(self.microbatches)
            problems.append(Problem("microbatches", given, expected, involves=involves))
        if not _is_interval(self.snapshot_every):
            expected = "must be a number of steps, or a time such as 90s, 5m or 1h"
            problems.append(Problem("snapshot_every", got(self.snapshot_every), expected))
        if self.reduction == "exact" and self.precision == "fp16":
            # The scaled gradients of fp16 exceed the range of exact sums.
            expected = "must be flat with precision fp16"
            hint = "or use precision fp32 or bf16"
            given, involves = got(self.reduction), ("precision",)
            problems.append(Problem("reduction", given, expected, hint, involves=involves))
        if len({width_of(average) or average for average in self.ema}) < len(self.ema):
            # sample.ema names an average by its number.
            expected = "must not repeat a decay or width"
            problems.append(Problem("ema", got(list(self.ema)), expected))
        if problems:
            raise Invalid(problems)
        return self
