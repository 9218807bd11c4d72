"""Measure the speed of ddpm relative to diffusers, interleaved in one run, on a CPU or a GPU.

    python -m benchmarks.peers --json FILE [--quick] [--networks NAME...] [--rounds N] [--threads N]
                               [--clock cpu] [--device cuda] [--batch N] [--diffusers bf16]
                               [--any-kernels] [--train-only]

The fields `train` and `sample` of the file map diffusers to the speed of ddpm divided by its speed:
the geometric mean over the networks. `networks` has the ratio of each network, the median over
rounds that measure both libraries one right after the other. A train step is forward, backward,
clip, Adam, EMA, dropout and all random draws; a denoising step is one evaluation and its update.
ddpm runs the code of `ddpm train` and `ddpm sample` with `precision: auto`. On a GPU it is compiled
if possible, with repeatable kernels unless --any-kernels is given; diffusers runs with PyTorch's
defaults.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import diffusers
import torch

from benchmarks import ours, theirs
from benchmarks.networks import NETWORKS, Network, resized
from ddpm_core.runtime.device import choose_device, choose_precision, device_name

Work = Callable[[], None]
Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}


def seconds(work: Work, clock: Clock) -> float:
    """Return the seconds that `work` takes."""
    started = clock()
    work()
    return clock() - started


def on_gpu(work: Work, repeatable: bool, device: torch.device) -> Work:
    """Return `work` with the chosen kernels and a wait for the GPU; on a CPU unchanged."""

    def run() -> None:
        ours.use_kernels(repeatable)
        work()
        torch.cuda.synchronize(device)

    return run if device.type == "cuda" else work


def compare(contestants: dict[str, Work], rounds: int, clock: Clock) -> dict[str, list[float]]:
    """Return the seconds of each contestant in each round, after a warm-up round."""
    for work in contestants.values():
        work()
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, work in contestants.items():
            times[name].append(seconds(work, clock))
    return times


def ratio(times: dict[str, list[float]]) -> float:
    """Return the speed of ddpm divided by that of diffusers, the median over rounds."""
    pairs = zip(times["diffusers"], times["ours"], strict=True)
    return round(median(their / own for their, own in pairs), 3)


def random_share(step: Work, rounds: int) -> float:
    """Return the share of ddpm's training step that its random numbers take."""
    shares = []
    for _ in range(rounds):
        with ours.timed_draws() as spent:
            whole = seconds(step, time.perf_counter)
            shares.append(spent() / whole)
    return round(median(shares), 4)


def measure(
    network: Network,
    rounds: int,
    clock: Clock,
    device: torch.device,
    precision: str = "fp32",
    repeatable: bool = True,
    sampling: bool = True,
) -> dict[str, Any]:
    """Return seconds per step, ratios, and the share of random numbers for one network.

    `precision` is that of diffusers. On a GPU the share is unknown, because the GPU runs
    asynchronously.
    """

    def contest(own: Work, their: Work) -> dict[str, list[float]]:
        works = {"diffusers": on_gpu(their, False, device), "ours": on_gpu(own, repeatable, device)}
        return compare(works, rounds, clock)

    own_step = ours.train_step(network, ours.train_state(network, device))
    train = contest(own_step, theirs.train_step(network, device, precision))
    share = random_share(own_step, rounds) if device.type == "cpu" else None
    del own_step  # so that a GPU's memory has room for the sampling
    works = {"train": train}
    if sampling:
        own, their = ours.denoise(network, device), theirs.denoise(network, device, precision)
        works["sample"] = {
            name: [t / network.steps for t in times] for name, times in contest(own, their).items()
        }
    return {
        "batch": {"train": network.batch, "sample": network.sample_batch},
        "ratios": {work: ratio(times) for work, times in works.items()},
        "random_share": share,
        "seconds": {
            work: {name: round(median(values), 5) for name, values in times.items()}
            for work, times in works.items()
        },
    }


def report(
    measured: dict[str, dict[str, Any]], rounds: int, device: torch.device, precision: str
) -> dict[str, Any]:
    """Return the content of the file."""
    return {
        **{
            work: {
                "diffusers": round(geometric_mean(m["ratios"][work] for m in measured.values()), 3)
            }
            for work in next(iter(measured.values()))["ratios"]
        },
        "networks": {name: m["ratios"] for name, m in measured.items()},
        "random_share": {name: m["random_share"] for name, m in measured.items()},
        "seconds": {name: m["seconds"] for name, m in measured.items()},
        "batch": {name: m["batch"] for name, m in measured.items()},
        "rounds": rounds,
        "precision": {"ours": choose_precision("auto", device), "diffusers": precision},
        "machine": machine(device),
        "versions": versions(),
    }


def machine(device: torch.device) -> dict[str, Any]:
    """Return the processor, the device, the system and the number of threads."""
    return {
        "processor": processor(),
        "device": device_name(device),
        "system": platform.platform(),
        "threads": torch.get_num_threads(),
    }


def versions() -> dict[str, Any]:
    """Return the versions of Python, PyTorch and diffusers."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
    }


def processor() -> str:
    """Return the name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="the file to write")
    parser.add_argument("--quick", action="store_true", help="few rounds: about a minute")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--rounds", type=int, help="default 15, with --quick 3")
    parser.add_argument("--threads", type=int, help="use 1 if other processes keep cores busy")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: with one thread, on a busy machine"
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--batch", type=int, help="images per batch, for all networks")
    parser.add_argument("--diffusers", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument(
        "--any-kernels", action="store_true", help="on a GPU: run ddpm with PyTorch's defaults"
    )
    parser.add_argument("--train-only", action="store_true", help="skip sampling")
    arguments = parser.parse_args(argv)
    repeatable = not arguments.any_kernels
    device = choose_device(arguments.device) if repeatable else torch.device(arguments.device)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    rounds, steps = (3, 2) if arguments.quick else (15, 4)
    rounds = arguments.rounds or rounds
    clock = CLOCKS[arguments.clock]
    measured = {}
    for name in arguments.networks:
        network = resized(NETWORKS[name](steps), arguments.batch)
        given = (rounds, clock, device, arguments.diffusers, repeatable)
        measured[name] = measure(network, *given, sampling=not arguments.train_only)
    result = report(measured, rounds, device, arguments.diffusers)
    result |= {"clock": arguments.clock, "repeatable": repeatable}
    arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(
        json.dumps(
            {key: result[key] for key in (*measured[name]["ratios"], "networks", "random_share")},
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
