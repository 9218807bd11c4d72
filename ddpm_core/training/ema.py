"""Exponential moving averages of the weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Ema:
    """average <- decay * average + (1 - decay) * weights, after each step; buffers are copied.

    It starts as the initial weights, and has no warm-up unless asked: with `warmup` the decay of
    step s is min(decay, (1 + s) / (10 + s)).
    """

    def __init__(self, model: nn.Module, decay: float, warmup: bool) -> None:
        self.decay = decay
        self.warmup = warmup
        self.tensors = {name: t.detach().clone() for name, t in model.state_dict().items()}
        self._parameters = [name for name, _ in model.named_parameters()]
        self._buffers = [name for name in self.tensors if name not in set(self._parameters)]

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Take in the weights after step number `step` (the first is 1)."""
        decay = min(self.decay, (1 + step) / (10 + step)) if self.warmup else self.decay
        weights = dict(model.named_parameters())
        averages = [self.tensors[name] for name in self._parameters]
        torch._foreach_lerp_(averages, [weights[name].data for name in self._parameters], 1 - decay)
        buffers = dict(model.named_buffers())
        for name in self._buffers:
            self.tensors[name].copy_(buffers[name])

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over averages of the same names and shapes. Raises ValueError, KeyError."""
        for name, tensor in self.tensors.items():
            if tensors[name].shape != tensor.shape:
                raise ValueError(f"the average of {name} has shape {tuple(tensors[name].shape)}")
            tensor.copy_(tensors[name])
