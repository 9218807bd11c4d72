"""Which worker this is, of how many; and what workers tell each other."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ddpm_core.errors import Interrupted, UserError
from ddpm_core.runtime.device import choose_device, is_one
from ddpm_core.runtime.rendezvous import agree

TIMEOUT = 300.0  # seconds that workers wait for one that does not answer
START = 1800.0  # seconds that they wait for each other's start, in which data may be fetched
LOST = 138  # exit status of a worker that lost another: 128 and more tell a scheduler to try again

# Errors of this worker's own device, which may be met while others are waited for.
_OWN = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))


@dataclass(frozen=True)
class World:
    """One worker's place among all. `size` 1 needs no communication.

    Whatever they tell each other raises WorkerLost where one of them died, or did not answer
    within `timeout` seconds. `agent` is the process of torchrun that watches this worker; 0: none.
    """

    rank: int
    size: int
    device: torch.device
    timeout: float = TIMEOUT
    agent: int = 0
    group: dist.ProcessGroup | None = None

    def share(self, batch_size: int) -> range:
        """The indices in the global batch that are this worker's: contiguous, sizes within one."""
        return range(self.rank * batch_size // self.size, (self.rank + 1) * batch_size // self.size)

    def all_reduce_(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its sum over all workers."""
        if self.size > 1:
            with self._told_when_lost():
                dist.all_reduce(tensor, group=self.group)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors of all workers, of the same shape (...): (size, ...), in order of rank."""
        if self.size == 1:
            return tensor[None]
        rows = [torch.empty_like(tensor) for _ in range(self.size)]
        with self._told_when_lost():
            dist.all_gather(rows, tensor, group=self.group)
        return torch.stack(rows)

    def broadcast(self, value: int) -> int:
        """The first worker's value, on every worker."""
        if self.size == 1:
            return value
        tensor = torch.tensor([value], device=self.device)
        with self._told_when_lost():
            dist.broadcast(tensor, 0, group=self.group)
            return int(tensor.item())

    def barrier(self) -> None:
        if self.size > 1:
            own = [self.device.index or 0] if self.device.type == "cuda" else None
            with self._told_when_lost():
                dist.barrier(group=self.group, device_ids=own)

    def abandoned(self) -> bool:
        """Whether torchrun is gone, so that nothing watches this worker or starts it again."""
        return self.agent > 0 and os.getppid() != self.agent

    @contextmanager
    def _told_when_lost(self) -> Iterator[None]:
        try:
            yield
        except _OWN:
            raise
        except RuntimeError as error:
            raise WorkerLost(self, error) from error


class WorkerLost(Interrupted):
    """Another worker died or hangs. The state of this one may be in the middle of a step."""

    def __init__(self, world: World, error: BaseException) -> None:
        # NCCL's last words are on lines of their own, before the trace.
        words = str(error).partition("Exception raised from")[0].split()
        line = " ".join(words)[:300] or type(error).__name__
        reason = re.sub(r"^\[[^]]*/[^]]*\] ", "", line).partition(". This is typically")[0]
        late = "timed out" in reason.lower() or "timeout" in reason.lower()
        what = (
            f"another worker did not answer within {world.timeout:g} s (train.worker_timeout)"
            if late
            else "the connection to another worker broke: it died or left"
        )
        super().__init__(
            f"Worker {world.rank} of {world.size}: {what}. All workers have to start again from "
            f"the newest snapshot; torchrun does so while it has restarts left. ({reason})",
            LOST,
        )


@contextmanager
def world(device: str, environment: Mapping[str, str], timeout: float = TIMEOUT) -> Iterator[World]:
    """The world that torchrun describes in the environment; without it, one worker alone.

    Workers wait for each other `timeout` seconds, and for each other's start START. Raises
    UserError for a device that several workers can't share.
    """
    size, rank = int(environment.get("WORLD_SIZE", 1)), int(environment.get("RANK", 0))
    chosen = choose_device(device, int(environment.get("LOCAL_RANK", 0)))
    agent = os.getppid() if "TORCHELASTIC_RUN_ID" in environment else 0
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if size == 1:
        yield World(0, 1, chosen, timeout, agent)
        return
    if is_one(chosen.type, device):
        raise UserError(
            f"{size} workers given, but device {device} here is one, which they can't share: "
            "set train.processes: 1, or device: cpu."
        )
    group = _meet(chosen, World(rank, size, chosen, max(timeout, START)), timeout)
    try:
        yield World(rank, size, chosen, timeout, agent, group)
    except BaseException as error:
        # Closing tells gloo's workers that this one has left. NCCL would wait in it for what never
        # comes, as both do where a worker is lost: the end of the process closes all.
        if chosen.type != "cuda" and not isinstance(error, WorkerLost):
            dist.destroy_process_group()
        raise
    else:
        dist.destroy_process_group()


def _meet(device: torch.device, starting: World, timeout: float) -> dist.ProcessGroup | None:
    """Connect all workers; a group of all of them whose operations take `timeout` at most."""
    limit = timedelta(seconds=starting.timeout)
    with starting._told_when_lost():
        store, rank, size = next(rendezvous("env://", timeout=limit))
        name = agree(store, rank, size, starting.timeout)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore(name, store),  # type: ignore[attr-defined]
            rank=rank,
            world_size=size,
            timeout=limit,
        )
        if timeout >= starting.timeout:
            return None
        group = dist.new_group(timeout=timedelta(seconds=timeout))
        return None if isinstance(group, int) else group
