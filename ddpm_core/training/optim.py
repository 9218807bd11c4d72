"""How the arithmetic of training is carried out: precision, compilation, optimizer, rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from ddpm_core import config
from ddpm_core.runtime import compiling
from ddpm_core.runtime.adam import Adam
from ddpm_core.runtime.precision import autocast, choose


@dataclass(frozen=True)
class Execution:
    """Precision ("fp32", "bf16", "fp16") and whether the network is compiled, both decided."""

    precision: str
    compile: bool

    @classmethod
    def choose(
        cls, train: config.Train, device: torch.device, earlier: dict[str, Any] | None = None
    ) -> Execution:
        """What `auto` means here; for a run that goes on, what it meant when it began."""
        earlier = earlier or {}
        precision: str = train.precision
        if precision == "auto":
            precision = earlier.get("precision") or choose("auto", device)
        compiled = train.compile
        if compiled == "auto":
            compiled = earlier.get("compile", compiling.pays(device))
        return cls(precision, bool(compiled))

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        return autocast(self.precision, device)

    def scaler(self, device: torch.device) -> torch.amp.GradScaler:
        """Loss scaling for fp16; for the others one that does nothing."""
        return torch.amp.GradScaler(device.type, enabled=self.precision == "fp16")


def make_optimizer(
    settings: config.Optimizer, parameters: Iterable[torch.nn.Parameter], device: torch.device
) -> Adam:
    """The one of OPTIMIZERS that the settings name, fused where it exists."""
    return OPTIMIZERS[settings.name](settings, parameters, device)


def adam(
    settings: config.Optimizer,
    parameters: Iterable[torch.nn.Parameter],
    device: torch.device,
    decoupled: bool = False,
) -> Adam:
    """w -= lr m / (sqrt(v) + 1e-8), m and v the averages of g + weight_decay w and of its square.

    Kingma & Ba (2015), "Adam: a method for stochastic optimization", algorithm 1.
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
    settings: config.Optimizer, parameters: Iterable[torch.nn.Parameter], device: torch.device
) -> Adam:
    """Adam of g alone, and w -= lr weight_decay w beside it.

    Loshchilov & Hutter (2019), "Decoupled weight decay regularization", algorithm 2.
    """
    return adam(settings, parameters, device, decoupled=True)


OPTIMIZERS: dict[str, Callable[..., Adam]] = {"adam": adam, "adamw": adamw}


def learning_rate(settings: config.Optimizer, step: int, steps: int) -> float:
    """The rate of step number `step` (the first is 1): linear warm-up, then RATE_SCHEDULES."""
    if step <= settings.warmup:
        return settings.lr * step / settings.warmup
    done = (step - settings.warmup) / max(1, steps - settings.warmup)
    return settings.lr * RATE_SCHEDULES[settings.schedule](min(1.0, done))


def constant_rate(done: float) -> float:
    """1: the rate stays as it is after the warm-up (Ho et al. 2020, appendix B)."""
    return 1.0


def cosine_rate(done: float) -> float:
    """(1 + cos(pi done)) / 2, `done` the share of the steps after the warm-up, 0 to 1.

    Loshchilov & Hutter (2017), "SGDR: stochastic gradient descent with warm restarts", eq. 5,
    without a restart.
    """
    return 0.5 * (1 + math.cos(math.pi * done))


RATE_SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": constant_rate,
    "cosine": cosine_rate,
}
