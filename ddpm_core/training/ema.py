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
        weights, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        # The model's own tensors, which training changes in their place.
        self._weights = [(self.tensors[name], tensor) for name, tensor in weights.items()]
        self._buffers = [
            (average, buffers[name]) for name, average in self.tensors.items() if name in buffers
        ]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the model's weights after step number `step` (the first is 1)."""
        decay = min(self.decay, (1 + step) / (10 + step)) if self.warmup else self.decay
        averages = [average for average, _ in self._weights]
        torch._foreach_lerp_(averages, [weight.data for _, weight in self._weights], 1 - decay)
        for average, buffer in self._buffers:
            average.copy_(buffer)

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over averages of the same names and shapes. Raises ValueError, KeyError."""
        for name, tensor in self.tensors.items():
            if tensors[name].shape != tensor.shape:
                raise ValueError(f"the average of {name} has shape {tuple(tensors[name].shape)}")
            tensor.copy_(tensors[name])
