"""Reduce the gradients of all samples and workers to one: `train.reduction`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ddpm_core.runtime.distributed import World

FRACTION_BITS = 40  # fixed point with a resolution of 2^-40; sums of up to 2^22 fit
_LARGEST = 2.0**62  # of a sum of 64-bit integers, with a bit to spare
_SLICE = 2**20  # values converted to integers at a time, which bounds the extra memory


class Flat:
    """g = sum_m g_m in floating point, over microbatches m and, by one all-reduce, workers.

    Fast; the result depends on the number of workers and microbatches, by rounding.
    """

    def __init__(
        self, parameters: list[nn.Parameter], world: World, microbatches: int, batch_size: int
    ) -> None:
        self._world, self._microbatches = world, microbatches
        self._parameters = [p for p in parameters if p.requires_grad]
        self._loss = torch.zeros((), device=world.device)

    def cut(self, samples: int) -> Iterable[Tensor]:
        """Return the rows of a worker's share (int64) in the pieces that go through the network."""
        pieces = min(self._microbatches, max(1, samples))
        rows = torch.arange(samples, device=self._world.device).tensor_split(pieces)
        return (piece for piece in rows if len(piece))

    def add(self, loss: Tensor, scaled: Tensor) -> None:
        """Backpropagate a piece: its part of the mean loss, without and with the loss scale."""
        scaled.backward()  # type: ignore[no-untyped-call]
        self._loss = self._loss + loss.detach()

    def finish(self, stop_flag: Tensor) -> Tensor:
        """Set every `grad` to the global gradient, sum `stop_flag`, return the global mean loss."""
        if self._world.size == 1:
            return self._loss
        tensors = _gradients(self._parameters)
        ends = [self._loss.reshape(1), stop_flag.reshape(1)]
        # One all-reduce for everything: many small ones would wait for the network each time. The
        # loss and the stop flag travel along, so no worker stops at a step that others continue.
        flat = torch.cat([*(t.reshape(-1) for t in tensors), *ends])
        self._world.all_reduce_(flat)
        _spread(flat[:-2], tensors)
        stop_flag.copy_(flat[-1])
        return flat[-2]


class Exact:
    """g = sum_i round(2^40 g_i B) / (2^40 B) over single samples i, in 64-bit integers.

    Bitwise the same for every number of workers and microbatches: each sample goes through the
    network alone, which gives the same bits on every worker, and integers have the same sum in any
    order. It costs one pass through the network per sample. A sample whose gradient or loss reaches
    2^22 / B makes the loss NaN, which stops the run.
    """

    def __init__(
        self, parameters: list[nn.Parameter], world: World, microbatches: int, batch_size: int
    ) -> None:
        self._world, self._batch_size = world, batch_size
        self._parameters = [p for p in parameters if p.requires_grad]
        size = sum(p.numel() for p in self._parameters)
        # After the gradients: the loss, the number of values that overflowed, and the stop flag.
        self._sums = torch.zeros(size + 3, dtype=torch.int64, device=world.device)

    def cut(self, samples: int) -> Iterable[Tensor]:
        return torch.split(torch.arange(samples, device=self._world.device), 1)

    def add(self, loss: Tensor, scaled: Tensor) -> None:
        scaled.backward()  # type: ignore[no-untyped-call]
        parts = [t.reshape(-1) for t in _gradients(self._parameters)]
        flat = torch.cat([*parts, loss.detach().reshape(1)])
        pieces = (torch.split(tensor, _SLICE) for tensor in (flat, self._sums[:-2]))
        for values, sums in zip(*pieces, strict=True):
            # The loss of a sample was divided by B. Multiplying by it gives small values more of
            # the 40 bits. The sum over B samples must fit, too: values that are too large for that
            # are counted and left out, and `finish` returns NaN.
            values.mul_(self._batch_size).mul_(2.0**FRACTION_BITS)
            fits = values.abs() < _LARGEST / self._batch_size
            sums += torch.where(fits, values, 0.0).round().to(torch.int64)
            self._sums[-2] += (~fits).sum()
        # The next sample must start from zero: autograd would add to the gradient in float32.
        for parameter in self._parameters:
            parameter.grad = None

    def finish(self, stop_flag: Tensor) -> Tensor:
        self._sums[-1] = stop_flag.to(torch.int64)
        self._world.all_reduce_(self._sums)
        # Only here, after the exact sum over all samples, are the values rounded to float32.
        mean = torch.empty(len(self._sums) - 2, device=self._sums.device).copy_(self._sums[:-2])
        mean.mul_(2.0**-FRACTION_BITS).div_(self._batch_size)
        mean.masked_fill_(self._sums[-2] > 0, torch.nan)
        _spread(mean[:-1], _gradients(self._parameters))
        stop_flag.copy_(self._sums[-1])
        return mean[-1]


REDUCTIONS: dict[str, type[Flat] | type[Exact]] = {"flat": Flat, "exact": Exact}


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the gradients; zeros where a worker's share is empty or did not use a parameter."""
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    return gradients


def _spread(flat: Tensor, tensors: list[Tensor]) -> None:
    """Copy the values of a flat tensor into `tensors`, in order."""
    parts = torch.split(flat, [t.numel() for t in tensors])
    torch._foreach_copy_(tensors, [p.view(t.shape) for p, t in zip(parts, tensors, strict=True)])
