"""Our speed over diffusers', interleaved in one run on this machine's CPU.

    python -m benchmarks.peers --json FILE [--quick] [--networks NAME...] [--rounds N] [--threads N]
                               [--clock cpu]

The file holds `train` and `sample`: peer -> our speed over theirs, the geometric mean over the
networks, each of which stands under `networks`: the median over rounds that measure both, one right
after the other. A train step is forward, backward, clip,
Adam, EMA, dropout and all random draws; a denoising step one evaluation and its update. Ours is
what `ddpm train` and `ddpm sample` run with `precision: auto`.
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
from benchmarks.networks import NETWORKS, Network
from ddpm_core.precision import choose

Work = Callable[[], None]
Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}


def seconds(work: Work, clock: Clock) -> float:
    started = clock()
    work()
    return clock() - started


def compare(contestants: dict[str, Work], rounds: int, clock: Clock) -> dict[str, list[float]]:
    """Seconds of each, round by round, after one that doesn't count."""
    for work in contestants.values():
        work()
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, work in contestants.items():
            times[name].append(seconds(work, clock))
    return times


def ratio(times: dict[str, list[float]]) -> float:
    """Our speed over theirs: the median of the rounds' ratios."""
    pairs = zip(times["diffusers"], times["ours"], strict=True)
    return round(median(their / own for their, own in pairs), 3)


def random_share(step: Work, rounds: int) -> float:
    """The share of our training step that its random numbers take."""
    shares = []
    for _ in range(rounds):
        with ours.timed_draws() as spent:
            whole = seconds(step, time.perf_counter)
            shares.append(spent() / whole)
    return round(median(shares), 4)


def measure(network: Network, rounds: int, clock: Clock) -> dict[str, Any]:
    """Both works of one network: seconds a step, ratios, and the share of random numbers."""
    own_step = ours.train_step(network)
    train = compare({"diffusers": theirs.train_step(network), "ours": own_step}, rounds, clock)
    share = random_share(own_step, rounds)
    denoise = {"diffusers": theirs.denoise(network), "ours": ours.denoise(network)}
    sample = compare(denoise, rounds, clock)
    sample = {name: [t / network.steps for t in times] for name, times in sample.items()}
    return {
        "batch": {"train": network.batch, "sample": network.sample_batch},
        "ratios": {"train": ratio(train), "sample": ratio(sample)},
        "random_share": share,
        "seconds": {
            work: {name: round(median(values), 5) for name, values in times.items()}
            for work, times in (("train", train), ("sample", sample))
        },
    }


def report(measured: dict[str, dict[str, Any]], rounds: int) -> dict[str, Any]:
    """What the file holds."""
    return {
        **{
            work: {
                "diffusers": round(geometric_mean(m["ratios"][work] for m in measured.values()), 3)
            }
            for work in ("train", "sample")
        },
        "networks": {name: m["ratios"] for name, m in measured.items()},
        "random_share": {name: m["random_share"] for name, m in measured.items()},
        "seconds": {name: m["seconds"] for name, m in measured.items()},
        "batch": {name: m["batch"] for name, m in measured.items()},
        "rounds": rounds,
        "precision": {"ours": choose("auto", torch.device("cpu")), "diffusers": "fp32"},
        "machine": {
            "processor": processor(),
            "system": platform.platform(),
            "threads": torch.get_num_threads(),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "diffusers": diffusers.__version__,
        },
    }


def processor() -> str:
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
    parser.add_argument("--rounds", type=int, help="15, or 3 where quick")
    parser.add_argument("--threads", type=int, help="1 where other processes keep cores busy")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: with one thread, on a busy machine"
    )
    arguments = parser.parse_args(argv)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    rounds, steps = (3, 2) if arguments.quick else (15, 4)
    rounds = arguments.rounds or rounds
    clock = CLOCKS[arguments.clock]
    measured = {name: measure(NETWORKS[name](steps), rounds, clock) for name in arguments.networks}
    result = {**report(measured, rounds), "clock": arguments.clock}
    arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(
        json.dumps(
            {key: result[key] for key in ("train", "sample", "networks", "random_share")}, indent=2
        )
    )


if __name__ == "__main__":
    main()
