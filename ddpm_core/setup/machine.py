"""What this machine can do: its free memory, and the time and memory of a network."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from ddpm_core.config import Config
from ddpm_core.evaluation import in_domain
from ddpm_core.runtime.distributed import World
from ddpm_core.training import timing
from ddpm_core.training.dry_run import PROGRAM, ExpectedImages, memory_needed
from ddpm_core.training.step import step

USABLE = 0.8  # of the free memory
STEPS = 4  # measured steps, at least; more while they take less than SECONDS
SECONDS = 3.0
LONGEST = 1.0  # seconds of a measured step; slower ones are measured with fewer images
EVALUATED = 16  # images in the measurement of sampling


@dataclass(frozen=True)
class Measured:
    """A network on this machine: seconds of a step and of evaluating one image, and bytes.

    `fixed` is the memory without activations, `activations` those of one image of a step. `others`
    is the share of the processors' time that other programs took.
    """

    parameters: int
    step: float
    evaluation: float
    fixed: float
    activations: int
    others: float = 0.0

    def microbatches(self, batch: int, memory: float) -> int | None:
        """Return the smallest number of microbatches that fits in the memory; None: none does."""
        fitting = int((USABLE * memory - self.fixed) // max(1, self.activations))
        return -(-batch // fitting) if fitting > 0 else None

    def memory(self, batch: int, microbatches: int) -> float:
        """Return the memory that training takes, in bytes."""
        return self.fixed + self.activations * -(-batch // microbatches)


def free_memory(device: torch.device) -> float:
    """Return the free memory of a device in bytes; infinity if it is unknown."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    known = list(_free_on_host())
    return min(known) if known else float("inf")


def _free_on_host() -> Iterable[float]:
    """Yield the limits of the host's memory: what is available, and what the container may take."""
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        yield 1024.0 * int(next(line for line in lines if "MemAvailable" in line).split()[1])
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):
        limit = int((group / "memory.max").read_text(encoding="ascii"))  # "max" is no number
        yield float(limit - int((group / "memory.current").read_text(encoding="ascii")))
    if not Path("/proc/meminfo").exists():  # macOS; about half is in use
        with suppress(OSError, ValueError):
            yield 0.5 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def measure(config: Config, images: ExpectedImages, world: World, memory: float) -> Measured:
    """Train and sample with made-up images for a few seconds; return the time and the memory.

    The network is not compiled, which takes minutes on a GPU. Slow steps are measured with fewer
    images than train.batch_size.
    """
    batch = config.train.batch_size
    train = config.train.model_copy(update={"compile": False, "microbatches": 1})
    config = config.model_copy(update={"train": train})
    state = timing.made_up_state(config, images, world)
    device, flag = world.device, torch.zeros((), device=world.device)
    batches = {n: timing.made_up_batch(config, images, n, device) for n in (1, 2)}
    activations = timing.activation_bytes(state, (batches[1], batches[2]))
    parameters = sum(weights.numel() for weights in state.parameters)
    on_device, on_host = memory_needed(config, parameters, 1)
    fixed = on_device if device.type == "cuda" else on_device + on_host + PROGRAM
    found = Measured(parameters, 0.0, 0.0, fixed, activations)
    seconds = timing.timed(lambda: step(state, batches[2], flag), device).clock
    fitting = -(-batch // (found.microbatches(batch, memory) or batch))
    count = max(1, min(fitting, int(2 * LONGEST / seconds)))
    made = timing.made_up_batch(config, images, count, device)
    mean = _mean_time(lambda: step(state, made, flag), device)
    data = timing.made_up_data(images, config.model.conditioning)
    sample = config.sample.model_copy(update={"batch_size": EVALUATED, "classes": None})
    sampled = config.model_copy(update={"sample": sample})
    evaluation = timing.time_of_evaluation(sampled, state.model, data, world, state.moments)
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    others = max(0.0, 1 - mean.processor / (mean.clock * threads))
    return Measured(parameters, mean.clock * batch / count, evaluation, fixed, activations, others)


def _mean_time(work: Callable[[], object], device: torch.device) -> timing.Timed:
    """Return the mean time of `work()`, after a first call that does not count."""
    work()
    times = [timing.timed(work, device)]
    while len(times) < STEPS or sum(one.clock for one in times) < SECONDS:
        times.append(timing.timed(work, device))
    return timing.Timed(*(statistics.fmean(column) for column in zip(*times, strict=True)))


def time_of_classifier(images: ExpectedImages) -> float:
    """Return the seconds per image of a training step of evaluate's in-domain classifier."""
    network = in_domain.Network(images.channels, images.image_size, 2)
    x = torch.zeros(in_domain.BATCH, images.channels, images.image_size, images.image_size)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in evaluate
    labels = torch.zeros(len(x), dtype=torch.int64)

    def work() -> None:
        F.cross_entropy(network(x)[1], labels).backward()  # type: ignore[no-untyped-call]

    times = [timing.timed(work, torch.device("cpu")).clock for _ in range(STEPS)]
    torch.set_num_threads(threads)
    return statistics.median(times) / len(x)
