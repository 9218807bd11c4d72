"""The results of a comparison: which runs count, tables of scores, and the verdicts."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddpm_core.comparison import verdict
from ddpm_core.comparison.cost import Cost
from ddpm_core.comparison.experiment import SHARES, Experiment, Run
from ddpm_core.comparison.runs import Outcome, Score
from ddpm_core.comparison.scoring import KID, PRECISION, RECALL, Scores
from ddpm_core.comparison.verdict import BySeed, Finding


@dataclass
class Results:
    """The outcomes so far."""

    experiment: Experiment
    folder: Path
    cost: Cost
    steps: dict[str, int]  # by method
    distances: list[str]  # names of the scores that decide
    floors: dict[str, tuple[Scores, int]]  # of held-out images and their count, by sampler
    planned: int  # runs
    complete: bool = False
    outcomes: dict[Run, Outcome] = field(default_factory=dict)
    rates: dict[str, float | None] = field(default_factory=dict)  # chosen, by method

    @property
    def sampler(self) -> str:
        """The sampler whose images decide: full DDPM sampling, if it is used."""
        return "ddpm" if self.experiment.by_ddpm else "dpmpp"

    @property
    def measures(self) -> list[str]:
        """The names of all scores."""
        return [*self.distances, KID, PRECISION, RECALL]

    def counted(self, arm: str) -> dict[int, Outcome]:
        """Return the outcomes of an arm at the chosen learning rate by seed."""
        return {
            run.seed: outcome
            for run, outcome in self.outcomes.items()
            if run.arm.name == arm
            and run.arm.method in self.rates
            and run.learning_rate == self.rates[run.arm.method]
            and outcome.scores
        }

    def at(self, arm: str, share: float, sampler: str) -> dict[int, Score]:
        """Return the scores of an arm at a share of the budget by seed."""
        return {
            seed: score
            for seed, outcome in sorted(self.counted(arm).items())
            for score in outcome.scores
            if (score.share, score.sampler) == (share, sampler)
        }

    def deciding(self, arm: str) -> BySeed:
        """Return the scores of an arm at the end of the budget by seed and name."""
        found = self.at(arm, SHARES[-1], self.sampler)
        return {seed: score.scores for seed, score in found.items()}

    def findings(self) -> list[Finding]:
        """Return the verdict on each arm but the baseline."""
        arms, baseline = self.experiment.arms, self.experiment.baseline
        scores = {name: self.deciding(name) for name in arms}
        return [
            verdict.judge(name, scores, baseline, self._controls(name), self.distances)
            for name in arms
            if name != baseline
        ]

    def _controls(self, name: str) -> list[str]:
        arms = self.experiment.arms.values()
        return [arm.name for arm in arms if arm.control and arm.method == name]

    @property
    def problems(self) -> list[str]:
        """Why runs have no scores."""
        return [f"{run.title}: {o.problem}" for run, o in self.outcomes.items() if o.problem]


def spread(scores: Iterable[float]) -> tuple[float, float] | None:
    """Return mean and standard deviation (0 for a single value); None without values."""
    values = list(scores)
    if not values:
        return None
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def with_error(mean: float, error: float | None) -> str:
    """Return "4.21 ± 0.13", rounded to two digits of the error; without an error three digits."""
    scale, digits = (error, 1) if error else (abs(mean), 2)
    places = max(0, digits - math.floor(math.log10(scale))) if scale else 2
    text = f"{mean:.{places}f}" + ("" if error is None else f" ± {error:.{places}f}")
    return text.replace("-", "−")


def cell(values: Sequence[float]) -> str:
    """Return mean and standard deviation over seeds as a text, "" without values."""
    found = spread(values)
    return with_error(found[0], found[1] if len(values) > 1 else None) if found else ""


def headline(results: Results, findings: Sequence[Finding]) -> str:
    """Return which methods win, in one line."""
    baseline = results.experiment.baseline
    controls = [arm.name for arm in results.experiment.arms.values() if arm.control]
    winners = [f.name for f in findings if f.level == "good" and f.name not in controls]
    if not results.complete:
        return "The comparison is not finished yet."
    if not winners:
        return f"No method clearly beats {baseline} at equal training time."
    names = " and ".join(filter(None, (", ".join(winners[:-1]), winners[-1])))
    return f"{names} {'beats' if len(winners) == 1 else 'beat'} {baseline} at equal training time."


def to_csv(results: Results) -> str:
    """Return results.csv: a line per run, share of the budget and sampler."""
    stream = io.StringIO()
    first = ["method", "control_of", "learning_rate", "chosen", "seed"]
    at = ["share", "step", "seconds", "sampler", "samples"]
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*first, *at, *results.measures, "problem"])
    experiment = results.experiment
    rates = {n: experiment.config(n, "w").train.optimizer.lr for n in experiment.methods}
    order = {name: place for place, name in enumerate(experiment.arms)}
    runs = sorted(
        results.outcomes, key=lambda r: (order[r.arm.name], r.learning_rate or 0.0, r.seed)
    )
    for run in runs:
        outcome, arm = results.outcomes[run], run.arm
        control_of = arm.method if arm.control else ""
        chosen = outcome is results.counted(arm.name).get(run.seed)
        rate = run.learning_rate or rates[arm.method]
        begin = [arm.name, control_of, rate, int(chosen), run.seed]
        for s in outcome.scores:
            seconds = f"{s.step * results.cost.seconds[arm.method]:.1f}"
            scores = [s.scores.get(name) for name in results.measures]
            writer.writerow([*begin, s.share, s.step, seconds, s.sampler, s.samples, *scores, ""])
        if outcome.problem:
            blank = [""] * (len(at) + len(results.measures))
            writer.writerow([*begin, *blank, outcome.problem])
    return stream.getvalue()


def table(results: Results, share: float, sampler: str) -> list[list[str]]:
    """Return a row per arm: name, learning rate, steps, and mean ± deviation of each score."""
    rows = []
    for name, arm in results.experiment.arms.items():
        found = results.at(name, share, sampler)
        cells = [
            cell([s.scores[m] for s in found.values() if m in s.scores]) for m in results.measures
        ]
        rate = results.rates.get(arm.method)
        rows.append(
            [name, "" if rate is None else f"{rate:g}", f"{results.steps[arm.method]:,}", *cells]
        )
    return rows


def floor_row(results: Results, sampler: str) -> list[list[str]]:
    """Return the row of held-out images below the images by a sampler; [] without any."""
    scores, count = results.floors[sampler]
    cells = [with_error(scores[name], None) if name in scores else "" for name in results.measures]
    return [[f"{count:,} held-out real images", "", "", *cells]] if count else []


def to_markdown(results: Results, title: str) -> str:
    """Return results.md: the verdicts, and the scores at the end of the budget."""
    experiment, findings = results.experiment, results.findings()
    lines = [f"# {title}", "", headline(results, findings), ""]
    lines += ["| method | verdict | |", "|---|---|---|"]
    lines += [f"| {f.name} | {f.word} | {f.detail} |" for f in findings]
    samplers = [("ddpm", experiment.by_ddpm), ("dpmpp", experiment.samples)]
    for sampler, count in samplers:
        if count:
            names = ["method", "learning rate", "steps", *results.measures]
            lines += ["", f"## After {experiment.budget}, {count:,} images by {sampler}", ""]
            lines += [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
            rows = table(results, SHARES[-1], sampler)
            lines += [f"| {' | '.join(row)} |" for row in [*rows, *floor_row(results, sampler)]]
    lines += ["", f"Mean ± standard deviation over {len(experiment.seeds)} seeds."]
    return "\n".join(lines) + "\n"
