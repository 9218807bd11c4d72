"""Which worker this is, of how many, on which device; and what workers tell each other."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ddpm_core.errors import UserError

TIMEOUT = timedelta(minutes=5)  # a worker that hangs longer ends the others


@dataclass(frozen=True)
class World:
    """One worker's place among all. `size` 1 needs no communication."""

    rank: int
    size: int
    device: torch.device

    def share(self, batch_size: int) -> range:
        """The indices in the global batch that are this worker's: contiguous, sizes within one."""
        return range(self.rank * batch_size // self.size, (self.rank + 1) * batch_size // self.size)

    def sum_(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its sum over all workers."""
        if self.size > 1:
            dist.all_reduce(tensor)

    def from_first(self, value: int) -> int:
        """The first worker's value, on every worker."""
        if self.size == 1:
            return value
        tensor = torch.tensor([value], device=self.device)
        dist.broadcast(tensor, 0)
        return int(tensor.item())

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """The device of `device: auto | cpu | mps | cuda[:N]`. Raises UserError if it is not there."""
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if name == "auto":
        name = "cuda" if cuda else "mps" if mps else "cpu"
    if (name.startswith("cuda") and not cuda) or (name == "mps" and not mps):
        raise UserError(f"device: {name} given; this machine has none that PyTorch can use.")
    if name == "cuda":
        name = f"cuda:{local_rank % torch.cuda.device_count()}"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device: {name} given; there are {torch.cuda.device_count()} GPUs.")
    return device


@contextmanager
def world(device: str, environment: Mapping[str, str]) -> Iterator[World]:
    """The world that torchrun describes in the environment; without it, one worker alone."""
    size, rank = int(environment.get("WORLD_SIZE", 1)), int(environment.get("RANK", 0))
    chosen = choose_device(device, int(environment.get("LOCAL_RANK", 0)))
    if size == 1:
        yield World(0, 1, chosen)
        return
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo", timeout=TIMEOUT)
    try:
        yield World(rank, size, chosen)
    finally:
        dist.destroy_process_group()


def processes(wanted: str | int, device: str) -> int:
    """How many workers `train.processes` asks for on this machine: auto is one a GPU."""
    if wanted != "auto":
        return int(wanted)
    return torch.cuda.device_count() if choose_device(device).type == "cuda" else 1


def launch(count: int, arguments: Sequence[str]) -> int:
    """Run `ddpm ARGUMENTS` as `count` workers under torchrun; its exit status.

    Signals that ask to stop go on to the workers, which save and leave.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={count}", "--max-restarts=0", "-m", "ddpm_core.cli", *arguments]
    process = subprocess.Popen(command)
    previous = {
        number: signal.signal(number, lambda received, frame: process.send_signal(received))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        return process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
