"""The workers of one training: their ranks, their collectives, and how they find each other.

torchrun's agent keeps one key-value store for all restarts of its workers (see
https://github.com/pytorch/pytorch/issues/135712; still so in PyTorch 2.15). A restarted worker
would find the addresses that dead workers left there and fail to connect. So the workers of each
start first agree on a fresh name, and keep their keys below it.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ddpm_core.errors import Interrupted, UserError
from ddpm_core.runtime.device import choose_device, is_shared

TIMEOUT = 300.0  # seconds that a collective may take before a worker counts as lost
START_TIMEOUT = 1800.0  # seconds that workers wait for each other to start; data may be downloaded
WORKER_LOST_STATUS = 138  # exit status after losing a worker; from 128 on, a scheduler retries
STORE_POLL = 0.005  # seconds between two looks at the key-value store

# Errors of this worker's own device. They can surface in a collective, but no other worker is lost.
_OWN_ERRORS = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))


@dataclass(frozen=True)
class World:
    """This worker's rank among `size` workers, and its collectives.

    A collective raises WorkerLost if another worker died or did not respond within `timeout`
    seconds. With `size` 1 nothing is communicated. `agent` is the ID of the torchrun process that
    watches this worker; 0: none.
    """

    rank: int
    size: int
    device: torch.device
    timeout: float = TIMEOUT
    agent: int = 0
    group: dist.ProcessGroup | None = None

    def share(self, batch_size: int) -> range:
        """Return this worker's contiguous part of the global batch; sizes differ by at most 1."""
        return range(self.rank * batch_size // self.size, (self.rank + 1) * batch_size // self.size)

    def all_reduce_(self, tensor: torch.Tensor) -> None:
        """Replace a tensor with its sum over all workers."""
        if self.size > 1:
            with self._raise_worker_lost():
                dist.all_reduce(tensor, group=self.group)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all workers, each of shape (...), as (size, ...) by rank."""
        if self.size == 1:
            return tensor[None]
        rows = [torch.empty_like(tensor) for _ in range(self.size)]
        with self._raise_worker_lost():
            dist.all_gather(rows, tensor, group=self.group)
        return torch.stack(rows)

    def broadcast(self, value: int) -> int:
        """Return the value of rank 0 on every worker."""
        if self.size == 1:
            return value
        tensor = torch.tensor([value], device=self.device)
        with self._raise_worker_lost():
            dist.broadcast(tensor, 0, group=self.group)
            return int(tensor.item())

    def barrier(self) -> None:
        """Wait until every worker has called this."""
        if self.size > 1:
            own = [self.device.index or 0] if self.device.type == "cuda" else None
            with self._raise_worker_lost():
                dist.barrier(group=self.group, device_ids=own)

    def abandoned(self) -> bool:
        """Return whether torchrun has died, so that nothing watches or restarts this worker."""
        return self.agent > 0 and os.getppid() != self.agent

    @contextmanager
    def _raise_worker_lost(self) -> Iterator[None]:
        try:
            yield
        except _OWN_ERRORS:
            raise
        except RuntimeError as error:
            raise WorkerLost(self, error) from error


class WorkerLost(Interrupted):
    """Another worker died or hangs; this worker may be in the middle of a step."""

    def __init__(self, world: World, error: BaseException) -> None:
        # PyTorch's own text starts with [FILE:LINE], and ends with a C++ trace and general advice.
        # It has neither a code nor a type for a timeout.
        words = str(error).partition("Exception raised from")[0].split()
        line = " ".join(words)[:300] or type(error).__name__
        reason = re.sub(r"^\[[^]]*/[^]]*\] ", "", line).partition(". This is typically")[0]
        timed_out = "timed out" in reason.lower() or "timeout" in reason.lower()
        problem = (
            f"timed out after {world.timeout:g} s waiting for another worker (train.worker_timeout)"
            if timed_out
            else "the connection to another worker broke, because it died or exited"
        )
        super().__init__(
            f"Worker {world.rank} of {world.size}: {problem}. All workers must restart from the "
            f"newest snapshot; torchrun restarts them while train.restarts allows it. ({reason})",
            WORKER_LOST_STATUS,
        )


@contextmanager
def world(device: str, environment: Mapping[str, str], timeout: float = TIMEOUT) -> Iterator[World]:
    """Connect the workers that torchrun describes in the environment; without it, a single one.

    Workers wait up to START_TIMEOUT seconds for each other to start, then up to `timeout` seconds
    for each collective. Raises UserError if several workers would share one device.
    """
    size, rank = int(environment.get("WORLD_SIZE", 1)), int(environment.get("RANK", 0))
    chosen = choose_device(device, int(environment.get("LOCAL_RANK", 0)))
    agent = os.getppid() if "TORCHELASTIC_RUN_ID" in environment else 0
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if size == 1:
        yield World(0, 1, chosen, timeout, agent)
        return
    if is_shared(chosen.type, device):
        raise UserError(
            f"Got {size} workers for device {device}, which is a single device that workers cannot "
            "share. Set train.processes: 1, or device: cpu."
        )
    group = _connect(chosen, World(rank, size, chosen, max(timeout, START_TIMEOUT)), timeout)
    try:
        yield World(rank, size, chosen, timeout, agent, group)
    except BaseException as error:
        # With gloo, destroying the group shows the other workers that this one has left. With NCCL,
        # or after losing a worker, it would wait for ever; the end of the process closes all.
        if chosen.type != "cuda" and not isinstance(error, WorkerLost):
            dist.destroy_process_group()
        raise
    else:
        dist.destroy_process_group()


def _connect(device: torch.device, starting: World, timeout: float) -> dist.ProcessGroup | None:
    """Connect all workers; return the group whose collectives take up to `timeout` seconds.

    None means the default group.
    """
    limit = timedelta(seconds=starting.timeout)
    with starting._raise_worker_lost():
        store, rank, size = next(rendezvous("env://", timeout=limit))
        name = agree_on_name(store, rank, size, starting.timeout)
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


class Store(Protocol):
    """The part of torch.distributed.Store that is used here; `get` waits for the key."""

    def set(self, key: str, value: str, /) -> object: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


def agree_on_name(store: Store, rank: int, size: int, timeout: float) -> str:
    """Return a name that rank 0 of this start chose, the same on every rank.

    Each other rank writes a random question under its rank. Only rank 0 of this start can answer
    it, since no earlier start knew it. The rank then confirms under the name; so rank 0 knows when
    every rank has arrived, and ignores questions that a dead start left behind. Raises
    RuntimeError after `timeout` seconds.
    """
    token = uuid.uuid4().hex  # rank 0: the name; other ranks: the question
    if rank:
        store.set(f"asks/{rank}", token)
        name = store.get(f"answer/{token}").decode()
        store.set(f"{name}/{rank}", "")
        return name
    deadline = time.monotonic() + timeout
    missing = set(range(1, size))
    answered: set[str] = set()
    while missing:
        for other in [r for r in missing if store.check([f"asks/{r}"])]:
            question = store.get(f"asks/{other}").decode()
            if question not in answered:
                store.set(f"answer/{question}", token)
                answered.add(question)
            if store.check([f"{token}/{other}"]):
                missing.remove(other)
        if time.monotonic() > deadline:
            raise RuntimeError(f"Timed out waiting for the start of workers {sorted(missing)}")
        time.sleep(STORE_POLL)
    return token
