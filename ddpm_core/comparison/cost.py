"""The cost of a training step of each method, measured in turns, and the steps of a budget.

A run that stopped by the clock would not reproduce. So the cost is measured once and recorded in
the folder of the comparison, and each run takes the number of steps that fits the budget.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from pydantic import ConfigDict

from ddpm_core.comparison.experiment import PARTS, Experiment
from ddpm_core.config import Config
from ddpm_core.console import progress
from ddpm_core.data.dataset import PackedDataset, open_dataset
from ddpm_core.diffusion.probed import Probed
from ddpm_core.runtime.device import device_name
from ddpm_core.runtime.distributed import World, world
from ddpm_core.storage.files import Schema
from ddpm_core.storage.workspace import Workspace, fingerprint
from ddpm_core.training import timing
from ddpm_core.training.identity import identity
from ddpm_core.training.init import check_data_fits, fresh_network
from ddpm_core.training.moments import run_moments
from ddpm_core.training.optim import Execution
from ddpm_core.training.probe import make_probe
from ddpm_core.training.resume import checkpoint_settings
from ddpm_core.training.state import TrainState
from ddpm_core.training.step import next_batch, step
from ddpm_core.training.timing import Timed, timed

COST = "cost.json"
WARMUP = 5  # steps before the measurement: memory, compilation
ROUNDS = 15
PER_TURN = 4  # steps of a method in each round
PROBE_PERIOD = 10_000  # steps over which the evaluations of a probe are averaged


# Takes a number of steps of a training, and returns the mean time of one.
TakeSteps = Callable[[int], Timed]


class Cost(Schema):
    """The content of cost.json: seconds of a step by method, and of one evaluation of an image."""

    model_config = ConfigDict(frozen=True)

    seconds: dict[str, float]
    settings: dict[str, str]  # fingerprint of the settings that were measured, by method
    evaluation: float
    threads: int
    device: str

    def steps(self, experiment: Experiment) -> dict[str, int]:
        """Return the number of steps of each method, a multiple of PARTS."""
        return {
            name: max(1, int(experiment.seconds / self.seconds[name] / PARTS)) * PARTS
            for name in experiment.methods
        }


@dataclass(frozen=True)
class Other:
    """A training by another program: the fingerprint of what it does, and how to begin it."""

    settings: str
    begin: Callable[[], TakeSteps]


def measured(
    experiment: Experiment, workspace: Workspace, others: Mapping[str, Other] | None = None
) -> Cost:
    """Return the recorded costs; measures and records those that are missing.

    `others` are measured in the same turns. Methods that are added later are measured in turns with
    the baseline, and scaled by the recorded cost of the baseline. So a machine that has become
    faster or slower since makes no difference. Raises UserError if a method cannot train on the
    data.
    """
    configs = {name: experiment.config(name, workspace.uri) for name in experiment.methods}
    settings = {name: settings_of_cost(config) for name, config in configs.items()}
    others = others or {}
    settings |= {name: other.settings for name, other in others.items()}
    known = workspace.read_model(COST, Cost)
    kept = known.settings if known else {}
    missing = {name for name in settings if kept.get(name) != settings[name]}
    if known and not missing:
        return known
    baseline = experiment.baseline
    chosen = {name: config for name, config in configs.items() if name in {*missing, baseline}}
    data = open_dataset(workspace)
    with world(configs[baseline].device, {}) as here:
        turns: dict[str, TakeSteps] = {
            name: _Turn(config, workspace, data, here) for name, config in chosen.items()
        }
        turns |= {name: other.begin() for name, other in others.items() if name in missing}
        seconds = measure(turns)
        evaluation = time_of_evaluation(configs[baseline], data, here)
    if known and baseline not in missing:
        factor = known.seconds[baseline] / seconds[baseline]
        seconds = {**known.seconds, **{name: factor * seconds[name] for name in missing}}
    cost = Cost(
        seconds=seconds,
        settings={**kept, **settings},
        evaluation=evaluation,
        threads=torch.get_num_threads(),
        device=device_name(here.device),
    )
    workspace.write_json(COST, cost.model_dump())
    return cost


def settings_of_cost(config: Config) -> str:
    """Return the fingerprint of the settings that the cost of a step depends on."""
    settings = {**identity(config, ""), "image_size": config.prepare.image_size}
    irrelevant = ("seed", "train.optimizer.lr", "train.optimizer.warmup", "train.steps")
    return fingerprint({name: v for name, v in settings.items() if name not in irrelevant})


def measure(turns: Mapping[str, TakeSteps]) -> dict[str, float]:
    """Return the seconds of a training step by method, from ROUNDS turns of each.

    Each is the median of the method's share of a round, times the median round. On a CPU, shares
    are of processor time, which other work on the machine hardly changes.
    """
    rounds: list[dict[str, Timed]] = []
    with progress("compare: cost of a step", (ROUNDS + 1) * len(turns), "turns") as advance:
        for turn in turns.values():
            turn(WARMUP)
            advance()
        for _ in range(ROUNDS):
            rounds.append({})
            for name, turn in turns.items():
                rounds[-1][name] = turn(PER_TURN)
                advance()
    return medians(rounds)


def medians(rounds: Sequence[Mapping[str, Timed]]) -> dict[str, float]:
    """Return the median round by the clock, times the median share of each name."""
    totals = [sum(timed.processor for timed in times.values()) for times in rounds]
    shares = {
        name: [times[name].processor / all for times, all in zip(rounds, totals, strict=True)]
        for name in rounds[0]
    }
    total = statistics.median(sum(timed.clock for timed in times.values()) for times in rounds)
    return {name: total * statistics.median(share) for name, share in shares.items()}


class _Turn:
    """A training in progress that takes a few steps at a time.

    The time of a step includes reading the batch and the method's own work with its probes, and
    excludes compilation, snapshots and the log.
    """

    def __init__(
        self, config: Config, workspace: Workspace, data: PackedDataset, world: World
    ) -> None:
        check_data_fits(config, data)
        model, _ = fresh_network(config, data)
        moments = run_moments(config, data, world)
        execution = Execution.choose(config.train, world.device)
        self._state = TrainState.create(config, world, execution, model, moments)
        self._data = data
        self._probe = make_probe(self._state, workspace, data)
        levels, period = self._state.noise_levels, range(1, PROBE_PERIOD + 1)
        # Evaluations of the probe per step.
        self._probes = (
            sum(map(levels.probe_due, period)) / PROBE_PERIOD if isinstance(levels, Probed) else 0.0
        )

    def __call__(self, count: int) -> Timed:
        """Take `count` steps; return the mean time of one, with its share of a probe."""
        state, device = self._state, self._state.world.device
        flag = torch.zeros((), device=device)

        def work() -> None:
            for _ in range(count):
                batch = next_batch(state.config, self._data, state.world, state.step)
                step(state, batch, flag)

        steps = timed(work, device)
        probe = timed(self._probe, device) if self._probe else Timed(0.0, 0.0)
        return Timed(*(s / count + self._probes * p for s, p in zip(steps, probe, strict=True)))


def time_of_evaluation(config: Config, data: PackedDataset, world: World) -> float:
    """Return the seconds of one evaluation of the network for one image in a batch of samples."""
    model, _ = fresh_network(config, data)
    moments = run_moments(config, data, world) if config.diffusion.uses_moments else None
    described = checkpoint_settings(config, data).data
    return timing.time_of_evaluation(config, model, described, world, moments)
