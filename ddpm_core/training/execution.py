"""How the arithmetic of training is carried out: precision, compilation, optimizer, rate."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from ddpm_core import compiling, config
from ddpm_core.adam import Adam
from ddpm_core.precision import autocast, choose


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
    """Adam (Kingma & Ba 2015) or AdamW (Loshchilov & Hutter 2019), fused where it exists."""
    return Adam(
        parameters,
        lr=settings.lr,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        decoupled=settings.name == "adamw",
        fused=device.type in ("cuda", "cpu", "mps"),
    )


def learning_rate(settings: config.Optimizer, step: int, steps: int) -> float:
    """The rate of step number `step` (the first is 1): linear warm-up, then constant or cosine."""
    if step <= settings.warmup:
        return settings.lr * step / settings.warmup
    if settings.schedule == "constant":
        return settings.lr
    done = (step - settings.warmup) / max(1, steps - settings.warmup)
    return settings.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
