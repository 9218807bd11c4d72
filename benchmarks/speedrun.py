"""Measure the time until a score, compared with diffusers, side by side on one machine.

    python -m benchmarks.speedrun [--data PATH] [--size 16|32] [--budget 10m] [--seeds N]
                                  [--decompose] [--dry-run] [--json FILE]

diffusers trains for the whole budget (reference.py) and is scored at its end. ddpm trains for 2 %
of the budget, then for 5 %, 10 %, 15 %, 20 %, 30 %, 50 % and 100 %, until a run has at most the
distances of diffusers in all feature spaces. The speed-up is the budget divided by the time of
that run. It is measured for the best static recipe and for everything that won (recipes.py).

Each share is a separate run. The learning rate is annealed to the end of a run, so an early
checkpoint of a long run scores worse than a run of that length. The shortest runs come first and
the first success ends them: with a speed-up of 5 the runs of a recipe take half of the budget.
`interpolated` estimates when the scores are equal, between that run and the one before: the
logarithm of the largest ratio of distances, linear in the logarithm of the time.

Times of a step are measured in turns, on a CPU in shares of processor time, and turn the budget
into steps (ddpm_core/comparison/cost.py). They include reading batches, and exclude compilation,
snapshots, sampling, and preparing the images and their moments. Both networks have the same
structure, batch size and images. Both are scored with the same number of images by DPM-Solver++ in
20 steps with x0 clipped, each with its own implementation. Scores are means over seeds.

With --decompose, diffusers' recipe also runs in ddpm. `throughput` is the ratio of the times of a
step, and `network` the rest of that recipe's speed-up: other initial weights and rounding. Then the
parametrization, the objective and the rest are changed one after the other. Each factor is the
ratio of the interpolated times before and after a change; the product is the whole speed-up.

To resume, run the same command. Finished runs are kept, and ddpm continues at its snapshots.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import reference
from benchmarks.networks import Network
from benchmarks.peers import machine, versions
from benchmarks.recipes import ALL, CHAIN, COMMON, FACTORS, THEIR_RECIPE, recipes
from ddpm_core.comparison.cost import Cost, Other, measured
from ddpm_core.comparison.experiment import Arm, Experiment, Run, checked, merged
from ddpm_core.comparison.runs import SCORES, Outcome, Score, Shared, finish
from ddpm_core.comparison.scoring import Scores, Spaces
from ddpm_core.config.durations import in_words
from ddpm_core.console import report_errors, say
from ddpm_core.data.dataset import open_dataset
from ddpm_core.data.prepare import prepare
from ddpm_core.errors import UserError
from ddpm_core.runtime.device import choose_device
from ddpm_core.storage.lease import hold
from ddpm_core.storage.workspace import Workspace, fingerprint
from ddpm_core.text import counted

SHARES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)  # of the budget
DIFFUSERS = "diffusers"


@dataclass
class Ladder:
    """The runs of a recipe by share of the budget, ascending."""

    steps: dict[float, int] = field(default_factory=dict)
    scores: dict[float, Scores] = field(default_factory=dict)  # means over seeds
    reached: float | None = None  # share of the first run with the scores of diffusers
    interpolated: float | None = None  # share at which the scores are equal

    @property
    def verdict(self) -> str:
        if self.reached is None or self.interpolated is None:
            return "does not reach the scores of diffusers"
        bound = "at least " if self.reached == min(self.scores) else ""
        return (
            f"{bound}{1 / self.reached:.1f} times as fast: has the scores of diffusers after "
            f"{self.reached:.0%} of the time (interpolated: {1 / self.interpolated:.1f} times)"
        )


def lag(scores: Scores, reference: Scores, distances: Sequence[str]) -> float:
    """Return the logarithm of the largest ratio of distances; <= 0: as good in all spaces."""
    if not scores:
        return math.inf
    return max(math.log(max(scores[name], 1e-12) / reference[name]) for name in distances)


def crossing(lags: Mapping[float, float]) -> tuple[float | None, float | None]:
    """Return the first share with a lag of at most 0, and the share at which it is about 0.

    `lags` are ascending by share. The second one is interpolated in the logarithm of the share;
    without a finite lag before, it is the first one, and so an upper bound. None: not reached.
    """
    before, lagging = 0.0, math.inf
    for share, found in lags.items():
        if found <= 0:
            part = lagging / (lagging - found) if math.isfinite(lagging) else 1.0
            return share, before * (share / before) ** part if before else share
        before, lagging = share, found
    return None, None


def factors(cost: Cost, ladders: Mapping[str, Ladder]) -> dict[str, float | None]:
    """Return the factors of the interpolated speed-up; None: a recipe does not reach the scores."""
    step = cost.seconds[THEIR_RECIPE] / cost.seconds[DIFFUSERS]
    shares = [1.0, step, *(ladders[name].interpolated for name in CHAIN)]
    return {
        factor: before / share if before and share else None
        for factor, before, share in zip(FACTORS, shares, shares[1:], strict=False)
    }


def mean(scores: Sequence[Scores]) -> Scores:
    """Return the means over seeds; {} if a seed has no scores."""
    return {name: fmean(s[name] for s in scores) for name in scores[0]} if all(scores) else {}


def row(name: str, share: str, steps: str, cells: Sequence[str]) -> str:
    """Return a line of the table."""
    return f"{name:15} {share:>6} {steps:>9}  " + "".join(f"{cell:>18}" for cell in cells)


class Speedrun:
    """A speedrun in a folder, which keeps what is finished."""

    def __init__(self, experiment: Experiment, folder: Path, decompose: bool) -> None:
        """Measure the times of a step on the prepared images. Raises UserError."""
        self.experiment, self.folder = experiment, folder
        self._workspace = Workspace.open(str(folder))
        self._config = experiment.config(experiment.baseline, str(folder))
        self._data = open_dataset(self._workspace)
        self.device = choose_device(self._config.device)
        self.network = Network("speedrun", self._config, self._data.channels, 1)
        # All recipes are measured, so that --decompose can be added later.
        theirs = Other(self._identity(), lambda: self._training(seed=0, steps=1))
        self.cost = measured(experiment, self._workspace, {DIFFUSERS: theirs})
        self.steps = int(experiment.seconds / self.cost.seconds[DIFFUSERS])
        if self.steps <= reference.WARMUP:
            raise UserError(
                f"--budget: got {experiment.budget}, which is {counted(self.steps, 'step')} of "
                f"diffusers; must be longer than its warm-up of {reference.WARMUP} steps."
            )
        names = ["static", ALL, *(CHAIN[:-1] if decompose else ())]
        self.ladders = {name: Ladder() for name in names}
        for share in SHARES:
            part = experiment.model_copy(update={"budget": f"{share * experiment.seconds:f}"})
            steps = self.cost.steps(part)
            for name, ladder in self.ladders.items():
                # A run that ends within its warm-up has not trained with its learning rate.
                if steps[name] > experiment.config(name, str(folder)).train.optimizer.warmup:
                    ladder.steps[share] = steps[name]

    def _identity(self, *more: object) -> str:
        """Return the fingerprint of what the training of diffusers depends on."""
        given, train = self._config.dump(), self._config.train
        network = given["model"], given["prepare"]["image_size"], train.batch_size, train.flip
        return fingerprint([versions(), self.device.type, network, *more])

    def _training(self, seed: int, steps: int) -> reference.Reference:
        return reference.Reference(self.network, self._data, steps, seed, self.device)

    def plan(self) -> str:
        """Return the times of a step and the cost of all runs."""
        seeds, seconds = len(self.experiment.seeds), self.experiment.seconds
        rungs = [share for ladder in self.ladders.values() for share in ladder.steps]
        images = seeds * self.experiment.samples * (1 + len(rungs))
        sampling = images * self.experiment.dpmpp_steps * self.cost.evaluation
        lines = [f"{name:15} {1000 * s:8.1f} ms per step" for name, s in self.cost.seconds.items()]
        lines += [
            f"device    {self.cost.device} with {counted(self.cost.threads, 'thread')}",
            f"runs      diffusers for {in_words(seconds)}, {self.steps:,} steps; then "
            f"{', '.join(self.ladders)}, each until it has the scores of diffusers",
            f"total     at most {in_words(seeds * seconds * (1 + sum(rungs)) + sampling)} with "
            f"{counted(seeds, 'seed')}, and the time of scoring",
        ]
        return "\n".join(lines)

    def run(self) -> dict[str, Any]:
        """Train and score what is missing; print a table, and return the content of the file."""
        experiment, shared = self.experiment, Shared(self.experiment, self.folder)
        spaces = shared.spaces()
        distances = spaces.distances

        def show(name: str, share: float, steps: int, scores: Scores) -> None:
            cells = [f"{scores[d]:.3f}" if scores else "not finite" for d in distances]
            print(row(name, f"{share:.0%}", f"{steps:,}", cells), flush=True)

        theirs = mean([self._reference(seed, spaces) for seed in experiment.seeds])
        print(row("", "time", "steps", distances))
        show(DIFFUSERS, 1.0, self.steps, theirs)
        for name, ladder in self.ladders.items():
            lags: dict[float, float] = {}
            for share, steps in ladder.steps.items():
                arm = Arm(f"{name}-{100 * share:g}", name)
                runs = [Run(arm, None, seed, steps, shares=(1.0,)) for seed in experiment.seeds]
                ladder.scores[share] = mean([finish(run, shared, spaces).final for run in runs])
                show(name, share, steps, ladder.scores[share])
                lags[share] = lag(ladder.scores[share], theirs, distances)
                if lags[share] <= 0:
                    break
            ladder.reached, ladder.interpolated = crossing(lags)
            print(f"{name}: {ladder.verdict}", flush=True)
        return self._report(theirs, distances)

    def _reference(self, seed: int, spaces: Spaces) -> Scores:
        """Return the scores of diffusers at the end of the budget, recorded or new."""
        key, given = f"{DIFFUSERS}/seed-{seed}/{SCORES}", self.experiment
        sampled = given.samples, given.dpmpp_steps, spaces.fingerprint
        identity = self._identity(self.steps, *sampled)
        known = self._workspace.read_model(key, Outcome)
        if known and known.train == identity:
            return known.final
        training = self._training(seed, self.steps)
        say(f"speedrun: diffusers trained for {in_words(training.train())}.")
        scores = spaces.score([training.images(given.samples, given.dpmpp_steps, seed)])
        score = Score(
            key=identity,
            share=1.0,
            step=self.steps,
            sampler="dpmpp",
            samples=given.samples,
            scores=scores,
        )
        self._workspace.write_json(key, Outcome(train=identity, scores=[score]).model_dump())
        return scores

    def _report(self, theirs: Scores, distances: Sequence[str]) -> dict[str, Any]:
        found = {name: ladder.reached for name, ladder in self.ladders.items()}
        decomposed = all(name in self.ladders for name in CHAIN)
        return {
            "speedup": {name: 1 / share if share else None for name, share in found.items()},
            "factors": factors(self.cost, self.ladders) if decomposed else None,
            "distances": list(distances),
            DIFFUSERS: {"steps": self.steps, "scores": theirs},
            "recipes": {name: asdict(ladder) for name, ladder in self.ladders.items()},
            "settings": {"common": self.experiment.settings, **recipes()},
            "data": self.experiment.data,
            "budget": self.experiment.seconds,
            "samples": self.experiment.samples,
            "seeds": list(self.experiment.seeds),
            "cost": self.cost.model_dump(exclude={"settings"}),
            "machine": machine(self.device),
            "versions": versions(),
        }


def experiment_of(given: argparse.Namespace) -> Experiment:
    """Return the recipes, as an experiment of `ddpm compare`. Raises UserError."""
    own = {"prepare.image_size": given.size, "device": given.device}
    # A mirrored digit is not a digit.
    flip = {"train.flip": False} if given.data == "digits" else {}
    fields = {
        "data": given.data,
        "settings": merged(merged(COMMON, own), flip),
        "budget": given.budget,
        "seeds": list(range(given.seeds)),
        "samples": given.samples,
        "ddpm_samples": 0,
        "baseline": CHAIN[0],
        "methods": {name: {"settings": settings} for name, settings in recipes().items()},
    }
    return checked(fields, "the options")


def parsed(argv: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", default="digits", help="images, as in prepare.source")
    parser.add_argument("--size", type=int, choices=(16, 32), default=16, help="of images")
    parser.add_argument("--budget", default="10m", help="time of training: 90s, 10m or 2h")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds; scores are means")
    parser.add_argument("--samples", type=int, default=2000, help="images that are scored")
    parser.add_argument("--decompose", action="store_true", help="also measure the factors")
    parser.add_argument("--dry-run", action="store_true", help="measure and print the cost")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("-w", "--workspace", type=Path, help="default comparisons/speedrun-SIZE")
    parser.add_argument("--json", type=Path, help="the file to write")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    given = parsed(argv)
    folder = given.workspace or Path(f"comparisons/speedrun-{given.size}")
    with report_errors("speedrun"):
        experiment, workspace = experiment_of(given), Workspace.open(str(folder))
        prepare(experiment.config(experiment.baseline, workspace.uri), workspace)
        with hold(workspace):
            speedrun = Speedrun(experiment, folder, given.decompose)
            print(speedrun.plan(), flush=True)
            if given.dry_run:
                return
            result = speedrun.run()
        for name, factor in (result["factors"] or {}).items():
            print(f"{name:15} {f'{factor:.2f} times' if factor else 'not reached'}")
        if given.json:
            given.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
