"""Whether all workers hold the same weights: a cheap proof at every snapshot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ddpm_core.checkpoint import WEIGHTS, ema_name
from ddpm_core.errors import UserError
from ddpm_core.training.snapshot import NOISE_LEVELS
from ddpm_core.training.state import TrainState

# Integers as wide as an element, to read its bits.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensors: Iterable[Tensor]) -> Tensor:
    """The sum of all elements' bit patterns as integers, modulo 2^64: int64, on their device.

    Any one changed bit changes it, and no order of summing does.
    """
    sums = [t.detach().view(_BITS[t.element_size()]).sum(dtype=torch.int64) for t in tensors]
    return torch.stack(sums).sum()


def check_agreement(state: TrainState, newest: Callable[[], int]) -> None:
    """Compare the weights, averages and noise levels of all workers.

    Raises UserError, with the ranks, where they differ.

    Every worker computes its averages from its own weights, so that what differs on one has gone
    wrong there: a fault of its memory or device, or a library that is not the same everywhere.
    `newest` returns the step of the newest snapshot on disk; 0: none.
    """
    if state.world.size == 1:
        return
    groups = {
        WEIGHTS: state.model.state_dict(),
        **{ema_name(e.decay): e.tensors for e in state.emas},
        NOISE_LEVELS: state.noise_levels.state_dict(),
    }
    mine = torch.stack([checksum(tensors.values()) for tensors in groups.values()])
    rows = [tuple(row) for row in state.world.all_gather(mine).cpu().tolist()]
    if len(set(rows)) == 1:
        return
    files = [name for i, name in enumerate(groups) if len({row[i] for row in rows}) > 1]
    written = newest()
    kept = f"that of step {written} is whole" if written else "there is none yet"
    raise UserError(
        f"The workers' weights differ at step {state.step}: {_who(rows)} ({', '.join(files)}). "
        f"The snapshot of this step is not written; {kept}. A memory or device fault there is "
        "likely, or another version of a library: mend or replace it, and run the same command "
        "again."
    )


def _who(rows: list[tuple[int, ...]]) -> str:
    """Which ranks hold something else than most; without a majority, who agrees with whom."""
    most, count = Counter(rows).most_common(1)[0]
    if 2 * count > len(rows):
        odd = [str(rank) for rank, row in enumerate(rows) if row != most]
        return f"rank {', '.join(odd)} of {len(rows)} holds others than the rest"
    sets: dict[tuple[int, ...], list[str]] = {}
    for rank, row in enumerate(rows):
        sets.setdefault(row, []).append(str(rank))
    return "ranks " + " against ".join(", ".join(ranks) for ranks in sets.values())
