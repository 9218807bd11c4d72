"""Compare methods: prepare, measure the cost, run in stages, and write the results."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import typer

from ddpm_core.comparison import cost, report
from ddpm_core.comparison.experiment import SHARES, Arm, Experiment, Run, warmup_problems
from ddpm_core.comparison.results import Results
from ddpm_core.comparison.runs import Shared, outcomes
from ddpm_core.comparison.verdict import best_rate
from ddpm_core.config.durations import in_words
from ddpm_core.console import say, warn
from ddpm_core.data.prepare import prepare
from ddpm_core.errors import NotFinite, invalid, require
from ddpm_core.storage.lease import hold
from ddpm_core.storage.workspace import Workspace, snapshot_key
from ddpm_core.text import counted
from ddpm_core.tracking.record import read_record
from ddpm_core.tracking.tracker import Tracker
from ddpm_core.training.snapshot import NOISE_LEVELS

REFRESH = 60.0  # seconds between two versions of the results while runs are missing


def compare(experiment: Experiment, folder: Path, dry_run: bool = False) -> None:
    """Run what is missing of a comparison, and write its results into the folder.

    Raises:
        UserError: a method cannot train on the data, or the budget is too short. Nothing has been
            trained then.
        Interrupted: a request to stop arrived; the same command continues.
    """
    for package in ("jinja2", "matplotlib", "torch_fidelity"):  # fail before a training starts
        require(package, "eval")
    base = experiment.config(None, str(folder))
    workspace = Workspace.open(str(folder))
    prepare(base, workspace)
    torch.set_num_threads(max(1, torch.get_num_threads() // experiment.workers))
    with hold(workspace):
        measured = cost.measured(experiment, workspace)
        steps = measured.steps(experiment)
        if problems := warmup_problems(experiment, steps):
            raise invalid(problems, "the experiment")
        typer.echo(described(experiment, measured, steps))
        if dry_run:
            return
        shared = Shared(experiment, folder, _parent(experiment, workspace))
        spaces = shared.spaces()
        results = Results(
            experiment,
            folder,
            measured,
            steps,
            spaces.distances,
            {"dpmpp": spaces.floor(experiment.samples), "ddpm": spaces.floor(experiment.by_ddpm)},
            planned=len(list(planned(experiment, steps))),
        )
        for runs, by_ddpm in stages(results):
            written = time.monotonic()
            for run, outcome in outcomes(runs, replace(shared, by_ddpm=by_ddpm), spaces):
                results.outcomes[run] = outcome
                if time.monotonic() - written > REFRESH:
                    report.write(results, workspace)
                    written = time.monotonic()
    for problem in results.problems:
        warn(problem)
    if not any(outcome.scores for outcome in results.outcomes.values()):
        raise NotFinite("No run has scores. " + results.problems[0])
    results.complete = True
    report.write(results, workspace)
    _finish_parent(experiment, workspace)
    say(f"Done. Look at {workspace.shown(report.PAGE)}.")


def stages(results: Results) -> Iterator[tuple[list[Run], int]]:
    """Yield the runs in three stages, and the number of images by DDPM sampling.

    Each stage depends on the outcomes of the one before. First all learning rates of methods with
    several ones, on the first seeds and without DDPM sampling, which takes longest; then each
    method with its best rate on all seeds; then the controls, which replay recorded tables.
    """
    experiment, steps = results.experiment, results.steps
    if tuning := list(_tuning(experiment, steps)):
        yield tuning, 0
    for name in experiment.methods:
        results.rates[name] = _chosen_rate(results, name)
    runs = [
        Run(Arm(name, name), results.rates[name], seed, steps[name])
        for seed in experiment.seeds
        for name in experiment.methods
    ]
    yield runs, experiment.by_ddpm
    if controls := list(_controls(results)):
        yield controls, experiment.by_ddpm


def _tuning(experiment: Experiment, steps: dict[str, int]) -> Iterator[Run]:
    for seed in experiment.seeds[: experiment.tuning_seeds]:
        for name in experiment.methods:
            rates = experiment.rates(name)
            for rate in rates if len(rates) > 1 else ():
                yield Run(Arm(name, name), rate, seed, steps[name])


def planned(experiment: Experiment, steps: dict[str, int]) -> Iterator[tuple[str, int]]:
    """Yield (method, steps) of each run, as far as it is known before the first one."""
    tuned = experiment.seeds[: experiment.tuning_seeds]
    for arm in experiment.arms.values():
        extra = 0 if arm.control else (len(experiment.rates(arm.method)) - 1) * len(tuned)
        for _ in range(len(experiment.seeds) + extra):
            yield arm.name, steps[arm.method]


def _chosen_rate(results: Results, method: str) -> float | None:
    rates = results.experiment.rates(method)
    if len(rates) == 1:
        return rates[0]
    final: dict[float | None, dict[int, dict[str, float]]] = {rate: {} for rate in rates}
    for run, outcome in results.outcomes.items():
        if run.arm.name == method and (scores := outcome.final):
            final[run.learning_rate][run.seed] = scores
    chosen = best_rate(final, results.distances)
    say(f"compare: {method} counts with learning rate {chosen:g}.")
    return chosen


def _controls(results: Results) -> Iterator[Run]:
    """Yield the runs of controls, which replay tables of their method with its learning rate."""
    experiment, seeds = results.experiment, results.experiment.seeds
    for place, seed in enumerate(seeds):
        for arm in experiment.arms.values():
            other = seeds[(place + 1) % len(seeds)]
            source = other if arm.control == "other_seed" else seed
            if arm.control and source in results.counted(arm.method):
                steps, rate = results.steps[arm.method], results.rates[arm.method]
                recorded = Run(Arm(arm.method, arm.method), rate, source, steps)
                tables = f"{recorded.key}/{snapshot_key(steps)}/{NOISE_LEVELS}"
                yield Run(arm, rate, seed, steps, tables)


def described(experiment: Experiment, cost: cost.Cost, steps: dict[str, int]) -> str:
    """Return what the comparison costs, before it starts."""
    runs = list(planned(experiment, steps))
    seconds = len(runs) * experiment.seconds
    timesteps = experiment.config(experiment.baseline, "w").diffusion.timesteps
    evaluations = len(runs) * len(SHARES) * experiment.samples * experiment.dpmpp_steps
    evaluations += len(experiment.arms) * len(experiment.seeds) * experiment.by_ddpm * timesteps
    sampling = evaluations * cost.evaluation
    width = max(map(len, experiment.methods))
    lines = [
        f"{name.ljust(width)}  {1000 * cost.seconds[name]:8.1f} ms per step  {steps[name]:>9,} "
        "steps"
        for name in experiment.methods
    ]
    total = (seconds + sampling) / experiment.workers
    lines += [
        f"runs      {len(runs)}, with {sum(count for _, count in runs):,} steps in total",
        f"training  {in_words(seconds)} on {cost.device} with {counted(cost.threads, 'thread')}",
        f"sampling  {in_words(sampling)}",
        f"total     about {in_words(total)} with {counted(experiment.workers, 'worker')}, and the "
        "time of scoring",
    ]
    return "\n".join(lines)


def _parent(experiment: Experiment, workspace: Workspace) -> str:
    """Return the ID of the comparison's run in MLflow, "" if there is none."""
    tracker = Tracker.open(experiment.config(None, workspace.uri), workspace)
    tracker.params(experiment.model_dump(mode="json"))
    tracker.close(status="RUNNING")
    return read_record(workspace).run_id


def _finish_parent(experiment: Experiment, workspace: Workspace) -> None:
    tracker = Tracker.open(experiment.config(None, workspace.uri), workspace)
    for name in (report.PAGE, report.TABLE, report.SUMMARY):
        tracker.artifact(workspace.path(name))
    tracker.close()
