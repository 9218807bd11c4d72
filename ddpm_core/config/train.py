"""The section train: one run of training, its optimizer and its loss."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from ddpm_core.config.durations import YEAR, duration
from ddpm_core.config.section import Auto, Batch, Fraction, Processes, Section, Steps, as_tuple
from ddpm_core.errors import UserError


def _is_interval(every: int | str) -> bool:
    """Whether something can be done every so many steps, or after such a time of a year at most."""
    if isinstance(every, int):
        return every > 0
    try:
        return bool(re.fullmatch("[1-9][0-9]*[smh]", every) and duration(every))
    except UserError:
        return False


class Optimizer(Section):
    """Adam, its learning rate and its limits."""

    name: Literal["adam", "adamw"] = Field(
        "adam", description="adamw: weight decay apart from the gradient"
    )
    lr: Annotated[float, Field(gt=0.0)] = Field(1.0e-3, description="learning rate")
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0.0, lt=1.0)], Annotated[float, Field(ge=0.0, lt=1.0)]],
        BeforeValidator(as_tuple),
    ] = Field((0.9, 0.999), description="decays of the averages of the gradient and of its square")
    weight_decay: Annotated[float, Field(ge=0.0)] = Field(
        0.0, description="pull of the weights towards 0"
    )
    warmup: Annotated[int, Field(ge=0, le=10**10)] = Field(
        100, description="steps of linear warm-up"
    )
    schedule: Literal["constant", "cosine"] = Field(
        "constant", description="learning rate after the warm-up"
    )
    clip: Annotated[float, Field(ge=0.0)] = Field(
        1.0, description="largest gradient norm; 0: no clipping"
    )


class Loss(Section):
    """What training minimises."""

    kind: Literal["l2", "huber"] = Field("l2", description="distance between prediction and target")
    weighting: Literal["uniform", "min_snr", "p2"] = Field(
        "min_snr", description="how much each noise level counts"
    )
    gamma: Annotated[float, Field(gt=0.0)] | None = Field(
        None, description="min_snr's bound (5) or p2's power (1), where none is given"
    )
    k: Annotated[float, Field(gt=0.0)] = Field(1.0, description="p2's offset")


class Timesteps(Section):
    """Which noise levels a batch has."""

    sampler: Literal["uniform"] = Field(
        "uniform", description="how the noise levels of a batch are drawn"
    )


class Train(Section):
    """One run of training; `batch_size` is that of all workers and microbatches together."""

    steps: Steps = Field(800, description="updates of the weights")
    batch_size: Batch = Field(
        32, description="images a step, of all workers and microbatches together"
    )
    microbatches: Batch = Field(1, description="gradient accumulation, for memory alone")
    processes: Auto | Processes = Field(1, description="auto: one a GPU")
    worker_timeout: Annotated[float, Field(gt=0.0, le=YEAR)] = Field(
        300.0, description="seconds until a worker that does not answer counts as hung"
    )
    restarts: Annotated[int, Field(ge=0, le=10**6)] = Field(
        3, description="how often `processes` start again after one died"
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="number format; auto: bf16 where it is the faster one, else fp32"
    )
    compile: Auto | bool = Field("auto", description="auto: on a GPU, where PyTorch can")
    reduction: Literal["flat", "exact"] = Field(
        "flat", description="exact: the same bits on any number of workers, at a high price"
    )
    init: str | None = Field(
        None, description="start from models:/NAME@ALIAS, a checkpoint folder or a diffusers folder"
    )
    init_diffusion: Literal["same", "any"] = Field(
        "same", description="any: init may have another prediction, schedule or timesteps"
    )
    optimizer: Optimizer = Optimizer()
    ema: Annotated[
        tuple[Annotated[float, Field(gt=0.0, lt=1.0)], ...],
        BeforeValidator(as_tuple),
        Field(max_length=100),
    ] = Field(
        (0.99,), description="decays of the averaged weights; 0.9999 for runs of 100,000s of steps"
    )
    ema_warmup: bool = Field(
        False, description="decay (1 + step) / (10 + step) until it reaches ema"
    )
    flip: bool = Field(False, description="mirror half of the images: not for digits")
    label_drop: Fraction = Field(
        0.1, description="share trained without its class or text, for guidance"
    )
    loss: Loss = Loss()
    timesteps: Timesteps = Timesteps()
    log_every: Steps = Field(20, description="steps between rows of the log")
    grid: Annotated[int, Field(ge=0, le=10**4)] = Field(
        36, description="images in a milestone's preview"
    )
    snapshot_every: int | str = Field(
        200, description="steps, or a time such as 90s, 5m or 1h, looked at with each logged step"
    )
    keep: Steps = Field(3, description="snapshots kept beside the milestones")
    milestone_every: Steps = Field(200, description="steps between checkpoints for evaluation")

    @property
    def snapshot_steps(self) -> int | None:
        """`snapshot_every`, where it is a number of steps."""
        return self.snapshot_every if isinstance(self.snapshot_every, int) else None

    @property
    def snapshot_seconds(self) -> float | None:
        """`snapshot_every`, where it is a time."""
        if isinstance(self.snapshot_every, int):
            return None
        return duration(self.snapshot_every)

    def is_milestone(self, step: int) -> bool:
        """Whether the snapshot of a step is kept for evaluation; that of the last step is one."""
        return step % self.milestone_every == 0 or step == self.steps

    @model_validator(mode="after")
    def _settings_fit(self) -> Self:
        mistakes = []
        if self.microbatches > self.batch_size:
            mistakes.append(
                f"microbatches: {self.microbatches} is more than batch_size, {self.batch_size}"
            )
        if not _is_interval(self.snapshot_every):
            mistakes.append(
                f"snapshot_every: {self.snapshot_every!r} given; a number of steps, or a time such "
                "as 90s, 5m or 1h, is needed"
            )
        if self.reduction == "exact" and self.precision == "fp16":
            mistakes.append(
                "reduction: exact given with precision fp16, whose scaled gradients it can't hold; "
                "use fp32 or bf16, or reduction flat"
            )
        if len(set(self.ema)) < len(self.ema):
            mistakes.append(f"ema: {list(self.ema)} has a decay twice")
        if mistakes:
            raise ValueError("\n".join(mistakes))
        return self
