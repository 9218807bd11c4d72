"""Measure what optional parts of a training step cost: python -m benchmarks.overhead --json FILE.

The parts are the adaptive methods of `train.timesteps.adaptive`, a second average of the weights
(`train.ema`) and the augmentations (`train.augment`). Steps with and without a part take turns on
a CPU; `ratio` is the time with it divided by the time without, the median over rounds. That is
uncertain by a percent or more, so `share` is the time of the part alone, divided by that of a step
without it. `probe` is the share of the evaluations of fixed images, spread over the steps between
them.

The networks are those of benchmarks.networks; `digits` has 1.6M weights, 16x16, batches of 64.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.networks import NETWORKS, Network
from benchmarks.ours import images, train_state, train_step
from benchmarks.peers import CLOCKS, Clock, processor, seconds
from ddpm_core import rng
from ddpm_core.diffusion.moments import Moments, principal_components
from ddpm_core.diffusion.objective import ADAPTIVE_METHODS
from ddpm_core.diffusion.probed import Kim, Probed
from ddpm_core.sampling.images import to_model
from ddpm_core.storage.files import save_tensors
from ddpm_core.training.augment import AUGMENTATIONS
from ddpm_core.training.probe import Probe
from ddpm_core.training.state import TrainState
from ddpm_core.training.step import update_noise_levels

AVERAGE = "power:0.05"
REPEATS = 50  # of a part alone, in each round: methods change their tables every 50 steps


@dataclass(frozen=True)
class Part:
    """A training step with a part, that part alone, and the probe that it needs every so often."""

    step: Callable[[], None]
    alone: Callable[[], None]
    probe: Callable[[], None] | None = None
    every: float = 1.0  # steps per evaluation of the probe


def average(network: Network) -> Part:
    """Return a second average of the weights."""
    state = train_state(_with(network, ema=(*network.config.train.ema, AVERAGE)))
    return Part(train_step(network, state), lambda: state.emas[-1].update(state.step))


def adaptive(network: Network, method: str, tables: Path) -> Part:
    """Return an adaptive method; `tables` is a file for `replay`."""
    chosen = {"adaptive": method, "tables": str(tables)}
    timesteps = network.config.train.timesteps.model_copy(update=chosen)
    state = train_state(_with(network, timesteps=timesteps), moments=_moments(network))
    levels, errors = state.noise_levels, torch.rand(network.batch)

    def alone() -> None:
        state.step += 1
        update_noise_levels(state, errors, torch.full((), state.step, dtype=torch.int64))

    part = Part(train_step(network, state), alone)
    if not isinstance(levels, Probed):
        return part
    probe = Probe(images(network, len(levels.timesteps)), None, levels.timesteps)
    every = levels.every / (2 if isinstance(levels, Kim) else 1)
    return replace(part, probe=lambda: _observe(state, levels, probe), every=every)


def augmentation(network: Network, name: str) -> Part:
    """Return an augmentation of the images."""
    state = train_state(_with(network, augment=name))
    x0, index = to_model(images(network, network.batch)), torch.arange(network.batch)
    key = rng.key(rng.Purpose.AUGMENT, network.config.seed)

    def alone() -> None:
        AUGMENTATIONS[name](x0, key, index, torch.full((), state.step, dtype=torch.int64))

    return Part(train_step(network, state), alone)


def _observe(state: TrainState, levels: Probed, probe: Probe) -> None:
    levels.observe(2 * levels.every + 1, probe.losses(state))


def _with(network: Network, **train: Any) -> Network:
    config = network.config
    train_section = config.train.model_copy(update=train)
    return replace(network, config=config.model_copy(update={"train": train_section}))


def _moments(network: Network) -> Moments:
    shape = (network.channels, network.image_size, network.image_size)
    variances = torch.logspace(-3, 0, torch.Size(shape).numel(), dtype=torch.float64)
    return principal_components(torch.zeros(shape, dtype=torch.float64), variances.diag())


def all_parts(network: Network, folder: Path) -> dict[str, Callable[[], Part]]:
    """Return what makes each part, by its name."""
    tables = folder / "tables.safetensors"
    recorded = train_state(_with(network, timesteps=_method(network, "variance")))
    save_tensors(recorded.noise_levels.state_dict(), tables)
    return {
        f"average {AVERAGE}": partial(average, network),
        **{f"augment {n}": partial(augmentation, network, n) for n in AUGMENTATIONS if n != "none"},
        **{n: partial(adaptive, network, n, tables) for n in ADAPTIVE_METHODS if n != "none"},
    }


def measure(
    network: Network, chosen: str, rounds: int, clock: Clock, folder: Path
) -> dict[str, Any]:
    """Return the seconds of a plain step, and the ratio, share and probe of each part.

    `chosen` is the beginning of the names of the parts to measure.
    """
    makers = all_parts(network, folder)
    parts = {name: make() for name, make in makers.items() if name.startswith(chosen)}
    plain = train_step(network)
    plain()
    plains, found = [], {}
    for name, part in sorted(parts.items()):
        part.step()
        pairs = [_pair(plain, part.step, number % 2 == 0, clock) for number in range(rounds)]
        shares = [seconds(lambda p=part: _repeat(p.alone), clock) for _ in range(rounds)]
        probes = [seconds(part.probe, clock) / part.every for _ in range(rounds) if part.probe]
        probe = median(probes) if probes else 0.0
        plains += [own for own, _ in pairs]
        found[name] = median(both / own for own, both in pairs), median(shares) / REPEATS, probe
    step = median(plains)
    return {
        "seconds": round(step, 5),
        "parts": {
            name: {
                "ratio": round(ratio, 4),
                "share": round(share / step, 5),
                "probe": round(probe / step, 5),
            }
            for name, (ratio, share, probe) in found.items()
        },
    }


def _method(network: Network, name: str) -> Any:
    return network.config.train.timesteps.model_copy(update={"adaptive": name})


def _repeat(work: Callable[[], None]) -> None:
    for _ in range(REPEATS):
        work()


def _pair(
    plain: Callable[[], None], other: Callable[[], None], first: bool, clock: Clock
) -> tuple[float, float]:
    """Return the seconds of both, measured one right after the other; `first`: plain comes first.

    Taking turns cancels a drift of the machine's speed.
    """
    if first:
        own = seconds(plain, clock)
        return own, seconds(other, clock)
    both = seconds(other, clock)
    return seconds(plain, clock), both


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="the file to write")
    parser.add_argument("--network", choices=NETWORKS, default="digits")
    parser.add_argument("--parts", default="", help="those whose names begin so, as in augment")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: on a busy machine")
    given = parser.parse_args(argv)
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as folder:
        network, clock = NETWORKS[given.network](1), CLOCKS[given.clock]
        result = measure(network, given.parts, given.rounds, clock, Path(folder))
    machine = {"processor": processor(), "threads": given.threads, "torch": torch.__version__}
    result |= {"rounds": given.rounds, "clock": given.clock, "machine": machine}
    given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{result['seconds'] * 1000:.0f} ms a step on {machine['processor']}")
    for name, row in result["parts"].items():
        print(f"{name:20} {row['ratio']:.3f}  {row['share']:7.2%}  probe {row['probe']:.2%}")


if __name__ == "__main__":
    main()
