"""Measure the cost of snapshots in training: python -m benchmarks.snapshot --json FILE.

Training pauses while its thread copies the state for the writer (the stall); the writer saves the
files in the background. Runs on one thread of a CPU, in a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.networks import NETWORKS, Network
from benchmarks.ours import train_state, train_step
from ddpm_core.checkpoint import Settings, TrainingData
from ddpm_core.storage.workspace import SNAPSHOTS, Workspace, snapshot_key
from ddpm_core.training.snapshot import Writer
from ddpm_core.training.state import to_contents


def measure(network: Network, rounds: int) -> dict[str, Any]:
    """Return medians over `rounds` snapshots, each after a training step, in seconds and bytes."""
    state, settings = train_state(network), _settings(network)
    take_step = train_step(network, state)
    take_step()
    steps, stalls, writes = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        workspace = Workspace.open(folder)
        writer = Writer(workspace, lambda: None, lambda step: None, None)
        for number in range(1, rounds + 1):
            steps.append(_seconds(take_step))
            started = time.perf_counter()
            writer.submit(number, to_contents(state, settings))
            stalls.append(time.perf_counter() - started)
            writes.append(_seconds(writer.wait))
        writer.close()
        assert workspace.steps(SNAPSHOTS) == list(range(1, rounds + 1))
        size = sum(file.stat().st_size for file in workspace.path(snapshot_key(1)).iterdir())
    stall = statistics.median(stalls)
    return {
        "network": network.name,
        "rounds": rounds,
        "bytes": size,
        "step": statistics.median(steps),
        "stall": stall,
        "write": statistics.median(writes),
        "stall_at_one_a_minute": stall / 60,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.snapshot", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="the file to write")
    parser.add_argument("--network", choices=NETWORKS, default="ho")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    result = measure(NETWORKS[given.network](1), given.rounds)
    given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(
        f"{result['network']}: {result['bytes'] / 1e6:.0f} MB; a step {result['step']:.2f} s; "
        f"stall {result['stall']:.3f} s, {result['stall_at_one_a_minute']:.2%} of training at one "
        f"snapshot a minute; written in the background in {result['write']:.2f} s."
    )


def _settings(network: Network) -> Settings:
    data = TrainingData(
        fingerprint="",
        classes=[],
        class_counts=[],
        captions=[],
        image_size=network.image_size,
        channels=1 if network.channels == 1 else 3,
        source={},
    )
    return Settings(step=0, params={}, network={}, data=data, train_fingerprint="")


def _seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
