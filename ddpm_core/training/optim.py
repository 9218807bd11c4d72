"""The optimizer, the learning rate, averages of the weights, and the number format."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ddpm_core import config
from ddpm_core.config.train import width_of
from ddpm_core.models.averages import exponent, power_decay
from ddpm_core.runtime import device as devices
from ddpm_core.runtime.adam import Adam

if TYPE_CHECKING:
    from ddpm_core.training.snapshot import SavedExecution


def make_optimizer(
    settings: config.Optimizer, parameters: Iterable[nn.Parameter], device: torch.device
) -> Adam:
    """Return the optimizer of OPTIMIZERS that the settings name, fused where PyTorch has it."""
    return OPTIMIZERS[settings.name](settings, parameters, device)


def adam(
    settings: config.Optimizer,
    parameters: Iterable[nn.Parameter],
    device: torch.device,
    decoupled: bool = False,
) -> Adam:
    """Return Adam: w -= lr m / (sqrt(v) + 1e-8).

    m and v are the moving averages of g + weight_decay w and of its square. Kingma & Ba
    (2015), "Adam: a method for stochastic optimization", algorithm 1.
    """
    return Adam(
        parameters,
        lr=settings.lr,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        decoupled=decoupled,
        fused=device.type in ("cuda", "cpu", "mps"),
    )


def adamw(
    settings: config.Optimizer, parameters: Iterable[nn.Parameter], device: torch.device
) -> Adam:
    """Return Adam of g alone, with a separate decay: w -= lr weight_decay w.

    Loshchilov & Hutter (2019), "Decoupled weight decay regularization", algorithm 2.
    """
    return adam(settings, parameters, device, decoupled=True)


OPTIMIZERS: dict[str, Callable[..., Adam]] = {"adam": adam, "adamw": adamw}


def learning_rate(settings: config.Optimizer, step: int, steps: int) -> float:
    """Return the learning rate of step number `step` (from 1) of `steps`.

    It rises linearly during the warm-up, then follows the schedule.
    """
    if step <= settings.warmup:
        return settings.lr * step / settings.warmup
    done = (step - settings.warmup) / max(1, steps - settings.warmup)
    return settings.lr * RATE_SCHEDULES[settings.schedule](min(1.0, done))


def constant_rate(done: float) -> float:
    """Return 1: the learning rate stays constant after the warm-up (Ho et al. 2020, appendix B)."""
    return 1.0


def cosine_rate(done: float) -> float:
    """Return (1 + cos(pi done)) / 2, `done` the share of the steps after the warm-up, 0 to 1.

    Loshchilov & Hutter (2017), "SGDR: stochastic gradient descent with warm restarts", eq. 5,
    without a restart.
    """
    return 0.5 * (1 + math.cos(math.pi * done))


RATE_SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": constant_rate,
    "cosine": cosine_rate,
}


class Ema:
    """Moving average of a network's weights: exponential, or by a power function.

    After each step, average <- decay * average + (1 - decay) * weights; buffers are copied. The
    average starts as the initial weights. `average` is an element of `train.ema`: a constant decay,
    or a width, whose decay depends on the step (see models.averages). With `warmup` the decay of
    step s is at most (1 + s) / (10 + s), unless a width gives it.
    """

    def __init__(self, model: nn.Module, average: float | str, warmup: bool) -> None:
        self.average = average
        self._decay = _decay_of(average, warmup)
        self.tensors = {name: t.detach().clone() for name, t in model.state_dict().items()}
        weights, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        # Pairs of an average and the model's own tensor, which training updates in place.
        self._weights = [(self.tensors[name], tensor) for name, tensor in weights.items()]
        self._buffers = [
            (average, buffers[name]) for name, average in self.tensors.items() if name in buffers
        ]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Include the model's weights after step number `step` (from 1)."""
        averages = [average for average, _ in self._weights]
        weights = [weight.data for _, weight in self._weights]
        torch._foreach_lerp_(averages, weights, 1 - self._decay(step))
        for average, buffer in self._buffers:
            average.copy_(buffer)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the averaged weights; afterwards it has its own again, bit for bit."""
        averages, weights = (list(tensors) for tensors in zip(*self._weights, strict=True))
        weights = [weight.data for weight in weights]
        own = [weight.clone() for weight in weights]
        torch._foreach_copy_(weights, averages)
        try:
            yield
        finally:
            torch._foreach_copy_(weights, own)

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Copy averages from a snapshot. Raises KeyError, or ValueError if a shape differs."""
        for name, tensor in self.tensors.items():
            if tensors[name].shape != tensor.shape:
                raise ValueError(f"the average of {name} has shape {tuple(tensors[name].shape)}")
            tensor.copy_(tensors[name])


def _decay_of(average: float | str, warmup: bool) -> Callable[[int], float]:
    """Return the decay of an average as a function of the step (from 1)."""
    if (width := width_of(average)) is not None:
        return partial(power_decay, exponent(width))
    decay = float(average)
    if warmup:
        return lambda step: min(decay, (1 + step) / (10 + step))
    return lambda step: decay


@dataclass(frozen=True)
class Execution:
    """The number format ("fp32", "bf16", "fp16") and whether to compile, with `auto` resolved."""

    precision: str
    compile: bool

    @classmethod
    def choose(
        cls, train: config.Train, device: torch.device, earlier: SavedExecution | None = None
    ) -> Execution:
        """Resolve `auto` for a device; a resumed run keeps what `earlier`, its snapshot, has."""
        precision: str = train.precision
        if precision == "auto":
            chosen = earlier and earlier.precision
            precision = chosen or devices.choose_precision("auto", device)
        compiled = train.compile
        if compiled == "auto":
            compiled = earlier.compile if earlier else devices.compiles_training(device)
        return cls(precision, bool(compiled))

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context in which the network computes."""
        return devices.autocast(self.precision, device)

    def scaler(self, device: torch.device) -> torch.amp.GradScaler:
        """Return the loss scaler: active for fp16, a no-op for fp32 and bf16."""
        return torch.amp.GradScaler(device.type, enabled=self.precision == "fp16")
