"""Everything that training changes, and its conversion to and from a snapshot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddpm_core.checkpoint import MOMENTS, WEIGHTS, Settings, ema_name
from ddpm_core.config import Config, Train
from ddpm_core.config.paths import input_path
from ddpm_core.diffusion.moments import Moments
from ddpm_core.diffusion.noise_levels import NoiseLevels, NoiseLevelSettings
from ddpm_core.diffusion.objective import make_noise_levels
from ddpm_core.diffusion.predictions import Prediction, make_prediction
from ddpm_core.diffusion.process import make_schedule
from ddpm_core.errors import UserError
from ddpm_core.models.execution import prepare_model
from ddpm_core.models.unet import UNet
from ddpm_core.runtime.adam import Adam
from ddpm_core.runtime.distributed import World
from ddpm_core.storage.files import read_tensors
from ddpm_core.training.optim import Ema, Execution, make_optimizer
from ddpm_core.training.snapshot import (
    NOISE_LEVELS,
    OPTIMIZER,
    SavedExecution,
    SavedTotals,
    SnapshotContents,
    State,
)
from ddpm_core.training.throughput import Stopwatch


def widest(device: torch.device) -> torch.dtype:
    """Return float64 if the device supports it, else float32 (on MPS)."""
    return torch.float64 if device.type in ("cpu", "cuda") else torch.float32


@dataclass
class Totals:
    """Sums since the last row of the log, on the device."""

    loss: Tensor
    grad_norm: Tensor
    clipped: Tensor
    skipped: Tensor  # steps whose gradients overflowed fp16; they do not change the weights
    steps: int = 0

    @classmethod
    def zero(cls, device: torch.device) -> Totals:
        """Return totals of no step, in the widest dtype of the device."""
        loss, grad_norm, clipped, skipped = torch.zeros(4, dtype=widest(device), device=device)
        return cls(loss, grad_norm, clipped, skipped)

    def values(self) -> dict[str, float]:
        """Read the sums from the device."""
        names = ("loss", "grad_norm", "clipped", "skipped")
        return {name: float(getattr(self, name)) for name in names}


@dataclass
class TrainState:
    """The network, its averages, the optimizer, and the step they have reached."""

    config: Config
    world: World
    execution: Execution
    model: UNet
    parameters: list[nn.Parameter]  # listing them in each step is slow on a CPU
    prediction: Prediction
    noise_levels: NoiseLevels
    alphas_bar: Tensor
    optimizer: Adam
    scaler: torch.amp.GradScaler
    emas: list[Ema]
    totals: Totals
    bad_step: Tensor  # the first step whose loss was not finite; 0: none
    moments: Moments | None = None  # of the training images (Config.measures_moments)
    step: int = 0
    history: list[float] = field(default_factory=list)  # losses of the last 100 rows of the log
    forward: Any = None  # the model, compiled or not
    probe: Callable[[], Tensor] | None = None  # the losses that a Probed method observes
    watch: Stopwatch = field(default_factory=lambda: Stopwatch(torch.device("cpu")))

    @classmethod
    def create(
        cls,
        config: Config,
        world: World,
        execution: Execution,
        model: UNet,
        moments: Moments | None = None,
    ) -> TrainState:
        """Return the state before the first step; `moments` are on the device of the worker."""
        device = world.device
        model = prepare_model(model, device, execution.precision, training=True).train()
        diffusion = config.diffusion
        schedule = make_schedule(
            diffusion.schedule, diffusion.timesteps, diffusion.zero_terminal_snr
        )
        prediction = make_prediction(diffusion.prediction, moments)
        chosen = noise_level_settings(config.train, moments)
        levels = make_noise_levels(chosen, schedule, prediction).to(device)
        return cls(
            config=config,
            world=world,
            execution=execution,
            model=model,
            parameters=list(model.parameters()),
            prediction=prediction,
            noise_levels=levels,
            alphas_bar=schedule.alphas_bar.to(device, widest(device)),
            optimizer=make_optimizer(config.train.optimizer, model.parameters(), device),
            scaler=execution.scaler(device),
            emas=[Ema(model, average, config.train.ema_warmup) for average in config.train.ema],
            totals=Totals.zero(device),
            bad_step=torch.zeros((), dtype=torch.int64, device=device),
            moments=moments,
            forward=torch.compile(model) if execution.compile else model,
            watch=Stopwatch(device),
        )


def noise_level_settings(train: Train, moments: Moments | None = None) -> NoiseLevelSettings:
    """Return the settings of the noise levels, with the recorded tables of `replay`.

    Raises UserError if the tables cannot be read.
    """
    timesteps, loss, tables = train.timesteps, train.loss, None
    if timesteps.adaptive == "replay" and timesteps.tables is not None:
        tables = recorded_tables(input_path(timesteps.tables))
    return NoiseLevelSettings(
        sampler=timesteps.sampler,
        weighting=loss.weighting,
        gamma=loss.gamma,
        k=loss.k,
        adaptive=timesteps.adaptive,
        steps=train.steps,
        batch_size=train.batch_size,
        moments=moments,
        tables=tables,
        order=timesteps.order,
    )


def recorded_tables(file: Path) -> Tensor:
    """Return the tables that an adaptive run recorded in a snapshot: float32 (SLOTS, 2, K).

    Raises UserError if the file has none.
    """
    if not file.is_file():
        raise UserError(f"train.timesteps.tables: there is no file {file}.")
    tensors = read_tensors(file)
    if "trajectory" not in tensors:
        raise UserError(
            f"train.timesteps.tables: {file} has no recorded tables. Use {NOISE_LEVELS} in a "
            "snapshot of a run with an adaptive method."
        )
    return tensors["trajectory"]


def to_contents(state: TrainState, settings: Settings) -> SnapshotContents:
    """Copy the state to the host, in the form of a snapshot with these settings."""
    # The optimizer keys its state by parameter object; a file needs names.
    names = {id(p): name for name, p in state.model.named_parameters()}
    optimizer = {
        f"{key}/{names[id(parameter)]}": value
        for parameter, values in state.optimizer.state.items()
        for key, value in values.items()
    }
    tensors = {WEIGHTS: state.model.state_dict(), OPTIMIZER: optimizer}
    tensors |= {ema_name(ema.average): ema.tensors for ema in state.emas}
    levels = state.noise_levels.state_dict()
    if levels:
        tensors[NOISE_LEVELS] = levels
    if state.moments is not None:
        tensors[MOMENTS] = state.moments.tensors()
    saved = State(
        step=state.step,
        execution=SavedExecution.model_validate(asdict(state.execution)),
        scaler=state.scaler.state_dict(),
        totals=SavedTotals(**state.totals.values(), steps=state.totals.steps),
        history=list(state.history),
    )
    host = {name: {k: _host(t) for k, t in group.items()} for name, group in tensors.items()}
    return SnapshotContents(host, saved, settings.model_copy(update={"step": state.step}))


def from_contents(state: TrainState, contents: SnapshotContents) -> None:
    """Restore the state from a snapshot. Raises LookupError, TypeError or ValueError."""
    saved = contents.state
    state.model.load_state_dict(dict(contents.tensors[WEIGHTS]))
    _load_optimizer(state, contents.tensors[OPTIMIZER])
    for ema in state.emas:
        ema.load(dict(contents.tensors[ema_name(ema.average)]))
    if NOISE_LEVELS in contents.tensors:
        state.noise_levels.load_state_dict(dict(contents.tensors[NOISE_LEVELS]))
    state.scaler.load_state_dict(saved.scaler)
    state.step = saved.step
    state.history = [float(value) for value in saved.history]
    for name in state.totals.values():
        getattr(state.totals, name).fill_(getattr(saved.totals, name))
    state.totals.steps = saved.totals.steps


def _load_optimizer(state: TrainState, tensors: Any) -> None:
    """Restore the optimizer state from tensors named KEY/PARAMETER."""
    by_parameter: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        key, _, parameter = name.partition("/")
        by_parameter.setdefault(parameter, {})[key] = tensor
    parameters = dict(state.model.named_parameters())
    if by_parameter.keys() != parameters.keys():
        raise ValueError("the optimizer state does not match the parameters of the network")
    for name, parameter in parameters.items():
        state.optimizer.restore(parameter, by_parameter[name])


def _host(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host; the copy does not change while training continues."""
    return tensor.detach().to("cpu", copy=True).contiguous()
