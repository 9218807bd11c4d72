"""Checks of the state before it is saved: values are finite, and all workers hold the same ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ddpm_core.checkpoint import MOMENTS, WEIGHTS, ema_name
from ddpm_core.config import Config
from ddpm_core.errors import UserError
from ddpm_core.training.snapshot import NOISE_LEVELS
from ddpm_core.training.state import TrainState

SMALLEST_SCALE = 2.0**-14  # of fp16's loss; it starts at 2^16 and halves with each skipped step

# Integer types as wide as an element, to view its bits.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def loss_problem(state: TrainState) -> str:
    """Return which loss or gradient was not finite since the run began, or "".

    Waits for the device.
    """
    if bad := int(state.bad_step):
        return f"The loss of step {bad} is not finite"
    if state.scaler.is_enabled() and state.scaler.get_scale() < SMALLEST_SCALE:
        return f"The gradients of step {state.step} are not finite at the smallest loss scale"
    return ""


def weights_problem(state: TrainState) -> str:
    """Return that the weights, their averages or the optimizer state are not finite, or ""."""
    kept = [*state.model.state_dict().values()]
    kept += [tensor for ema in state.emas for tensor in ema.tensors.values()]
    kept += [tensor for values in state.optimizer.state.values() for tensor in values.values()]
    floats = [t for t in kept if t.is_floating_point() and t.device.type == state.world.device.type]
    # One kernel for all tensors, and one wait for the device. The norm of a tensor with NaN is NaN.
    largest = torch._foreach_norm(floats, float("inf"))
    if bool(torch.stack(largest).isfinite().all()):
        return ""
    return f"The weights after step {state.step} are not finite"


def explanation(state: TrainState, start: int, source: str) -> str:
    """Return the likely causes of a value that is not finite, and what to do.

    This process began at step `start` with the weights of `source` ("": a new network). The first
    loss after that cannot be the fault of an optimizer step.
    """
    config, precision = state.config, state.execution.precision
    coarse = "" if precision == "fp32" else f"precision {precision} is too coarse"
    if int(state.bad_step) != start + 1:
        return f"Likely causes: {_joined([*_optimizer_causes(config), coarse])}."
    if not source:
        causes = [coarse, "train.reduction exact" * (config.train.reduction == "exact")]
        return f"Likely causes: {_joined([*causes, 'the settings of the network (model)'])}."
    return (
        f"It is the first step with the weights of {source}, so train.optimizer.lr is not the "
        f"cause. Likely causes: {_joined(['these weights are too large', coarse])}. "
        f"{'Resume from an earlier one: --from-step.' if start else 'Use another train.init.'}"
    )


def _optimizer_causes(config: Config) -> list[str]:
    optimizer = config.train.optimizer
    off = "clipping is off (train.optimizer.clip 0)" * (optimizer.clip == 0.0)
    return [
        f"train.optimizer.lr {optimizer.lr:g} is too high",
        f"train.optimizer.warmup {optimizer.warmup} is too short",
        off,
    ]


def _joined(causes: list[str]) -> str:
    """Join the causes that are not empty: "a, b or c"."""
    *most, last = filter(None, causes)
    return f"{', '.join(most)} or {last}" if most else last


def check_agreement(state: TrainState, newest: Callable[[], int]) -> None:
    """Compare the weights, averages and noise levels of all workers.

    Each worker updates its own copy, so a difference means that a worker's memory or device failed,
    or that it runs other library versions. `newest` returns the step of the newest snapshot on
    disk, 0 for none. Raises UserError with the ranks that differ.
    """
    if state.world.size == 1:
        return
    groups = {
        WEIGHTS: state.model.state_dict(),
        **{ema_name(e.average): e.tensors for e in state.emas},
        NOISE_LEVELS: state.noise_levels.state_dict(),
        **({MOMENTS: state.moments.tensors()} if state.moments else {}),
    }
    mine = torch.stack([checksum(tensors.values()) for tensors in groups.values()])
    rows = [tuple(row) for row in state.world.all_gather(mine).cpu().tolist()]
    if len(set(rows)) == 1:
        return
    files = [name for i, name in enumerate(groups) if len({row[i] for row in rows}) > 1]
    saved = newest()
    kept = f"the newest complete one is that of step {saved}" if saved else "there is no other yet"
    raise UserError(
        f"The workers' weights differ at step {state.step}: {_odd_ranks(rows)} "
        f"({', '.join(files)}). This snapshot was not written; {kept}. Likely causes: a fault of "
        "memory or device, or different library versions. Repair or replace that machine, then "
        "run the same command again."
    )


def checksum(tensors: Iterable[Tensor]) -> Tensor:
    """Return the sum of all elements' bits as integers, modulo 2^64: int64 (), on their device.

    Any single changed bit changes it, and the order of summation does not.
    """
    sums = [t.detach().view(_BITS[t.element_size()]).sum(dtype=torch.int64) for t in tensors]
    return torch.stack(sums).sum()


def _odd_ranks(rows: list[tuple[int, ...]]) -> str:
    """Return which ranks differ from the majority; without one, which ranks agree."""
    most, count = Counter(rows).most_common(1)[0]
    if 2 * count > len(rows):
        odd = [str(rank) for rank, row in enumerate(rows) if row != most]
        return f"rank {', '.join(odd)} of {len(rows)} differs from the rest"
    sets: dict[tuple[int, ...], list[str]] = {}
    for rank, row in enumerate(rows):
        sets.setdefault(row, []).append(str(rank))
    return "ranks " + " against ".join(", ".join(ranks) for ranks in sets.values())
