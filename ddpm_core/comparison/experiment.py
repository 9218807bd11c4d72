"""The experiment file of `ddpm compare`: its fields, its validation, and the settings of each run.

Nothing here imports torch, so that errors in an experiment appear at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from ddpm_core.config import Config, yaml_text
from ddpm_core.config.durations import duration
from ddpm_core.config.identity import flat
from ddpm_core.config.load import override, validate
from ddpm_core.config.section import Section, Steps, as_tuple
from ddpm_core.config.template import PRESETS, presets
from ddpm_core.errors import Problem, UserError, got, invalid
from ddpm_core.problems import problems_of

SHARES = (0.25, 0.5, 1.0)  # of the budget, at which runs are scored
PARTS = 4  # of a run; steps are a multiple of it, so that each share ends with a step

Control = Literal["last", "mean", "other_seed", "reversed"]
Images = Annotated[int, Field(ge=2, le=10**8)]
Rates = Annotated[
    tuple[Annotated[float, Field(gt=0.0)], ...], BeforeValidator(as_tuple), Field(max_length=20)
]

# What a method may set. Everything else is the same for all runs.
_OF_METHOD = re.compile(r"(model|diffusion|train)\.|sample\.(guid|ema$)")
_OF_COMPARISON = tuple(
    f"train.{name}" for name in ("steps", "milestone_every", "processes", "grid", "validate_every")
)


class Method(Section):
    """One of the methods."""

    settings: dict[str, Any] = Field(default_factory=dict)
    learning_rates: Rates = ()
    controls: Annotated[tuple[Control, ...], BeforeValidator(as_tuple)] = ()


class Experiment(Section):
    """An experiment file."""

    params: str | None = None
    data: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    budget: float | str
    seeds: Annotated[
        tuple[Annotated[int, Field(ge=0, lt=2**63)], ...],
        BeforeValidator(as_tuple),
        Field(min_length=1, max_length=1000),
    ]
    samples: Images = 2000
    ddpm_samples: Literal[0] | Images | None = None
    dpmpp_steps: Steps = 20
    learning_rates: Rates = ()
    tuning_seeds: Annotated[int, Field(ge=1)] = 1
    workers: Annotated[int, Field(ge=1, le=1000)] = 1
    baseline: str
    methods: dict[str, Method]

    @property
    def seconds(self) -> float:
        """The budget of a run in seconds of training."""
        return duration(str(self.budget))

    @property
    def by_ddpm(self) -> int:
        """The number of images by full DDPM sampling; 0: none."""
        return self.samples if self.ddpm_samples is None else self.ddpm_samples

    def rates(self, method: str) -> tuple[float | None, ...]:
        """Return the learning rates to try; None is that of the settings."""
        return self.methods[method].learning_rates or self.learning_rates or (None,)

    @property
    def arms(self) -> dict[str, Arm]:
        """Methods and their controls by name, each method before its controls."""
        found = {}
        for name, method in self.methods.items():
            found[name] = Arm(name, name)
            for control in method.controls:
                found[f"{name}-{control}"] = Arm(f"{name}-{control}", name, control)
        return found

    def config(self, method: str | None, folder: str, **changes: Any) -> Config:
        """Return the settings of a method (None: what all methods share) in a workspace.

        `changes` are settings by dotted name. Raises UserError that lists all problems.
        """
        given: dict[str, Any] = {}
        if self.params:
            preset = self.params in presets()
            file = PRESETS / f"{self.params}.yaml" if preset else Path(self.params)
            given = yaml_text.read(file, "params file", "sections such as `train:`")
        source = {} if self.data is None else {"prepare.source": self.data}
        own = self.methods[method].settings if method else {}
        sampler = {
            "sampler": "dpmpp",
            "steps": self.dpmpp_steps,
            "count": self.samples,
            "checkpoints": "all",
        }
        train = {"train.processes": 1, "train.grid": 0, "train.validate_every": 0}
        fixed = {"workspace": folder, "sample": sampler, **train}
        for settings in (self.settings, source, own, fixed, _steps(PARTS * 1000), changes):
            given = merged(given, settings)
        return validate(given)

    def run_config(self, run: Run, folder: Path) -> Config:
        """Return the settings of a run."""
        changes: dict[str, Any] = {"seed": run.seed, **_steps(run.steps, run.shares)}
        if run.learning_rate is not None:
            changes["train.optimizer.lr"] = run.learning_rate
        if run.arm.control:
            order = {"other_seed": "recorded"}.get(run.arm.control, run.arm.control)
            tables = str(folder / run.tables)
            replay = {"adaptive": "replay", "tables": tables, "order": order}
            changes["train.timesteps"] = replay
        return self.config(run.arm.method, str(folder / run.key), **changes)


@dataclass(frozen=True)
class Arm:
    """A method, or a control of one: the method with the tables of a run replayed."""

    name: str
    method: str
    control: str = ""


@dataclass(frozen=True)
class Run:
    """One training: an arm with a learning rate (None: that of the settings) and a seed.

    `tables` is the key of the recorded tables that a control replays, below the folder. `shares`
    are those of the steps at which the run is scored.
    """

    arm: Arm
    learning_rate: float | None
    seed: int
    steps: int
    tables: str = ""
    shares: tuple[float, ...] = SHARES

    @property
    def key(self) -> str:
        """The key of its workspace below the folder of the comparison."""
        rate = "" if self.learning_rate is None else f"/lr-{self.learning_rate:g}"
        return f"runs/{self.arm.name}{rate}/seed-{self.seed}"

    @property
    def title(self) -> str:
        rate = "" if self.learning_rate is None else f", learning rate {self.learning_rate:g}"
        return f"{self.arm.name}{rate}, seed {self.seed}"

    @property
    def scored_steps(self) -> tuple[int, ...]:
        """The steps of the checkpoints that are scored."""
        return _scored_steps(self.steps, self.shares)


def _steps(steps: int, shares: Sequence[float] = SHARES) -> dict[str, Any]:
    part = {"train.steps": steps, "train.milestone_every": steps // PARTS}
    return {**part, "sample.checkpoints": _scored_steps(steps, shares)}


def _scored_steps(steps: int, shares: Sequence[float]) -> tuple[int, ...]:
    return tuple(round(share * steps) for share in shares)


def merged(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings `a` replaced by those of `b`, whose keys may be dotted, as after -S."""
    result = dict(a)
    for name, value in b.items():
        first, _, rest = name.partition(".")
        inner = {rest: value} if rest else value
        below = result.get(first)
        is_section = isinstance(inner, Mapping)
        result[first] = (
            merged(below if isinstance(below, Mapping) else {}, inner) if is_section else inner
        )
    return result


def load(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    """Return the experiment in a file, with `key=value` overrides of its fields.

    Raises:
        UserError: the file cannot be read, or it or the settings of a method are invalid. Lists
            every problem.
    """
    given = yaml_text.read(path, "experiment file", "fields such as `methods:`")
    problems = [problem for item in overrides if (problem := override(given, item))]
    return checked(given, str(path), problems)


def checked(given: dict[str, Any], where: str, problems: Sequence[Problem] = ()) -> Experiment:
    """Return the experiment with these fields.

    Raises UserError that lists the given problems and those of the fields, in `where`.
    """
    problems = list(problems)
    methods: dict[str, Method] = {}
    listed = given.get("methods")
    for name, fields in (listed if isinstance(listed, dict) else {}).items():
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,99}", name):
            expected = "must be letters, digits, dots, - and _, because it names a folder"
            problems.append(Problem(f"methods.{name}", got(name), expected))
        try:
            methods[name] = Method.model_validate(fields or {})
        except ValidationError as error:
            problems += [p.below(f"methods.{name}") for p in problems_of(error, Method)]
    try:
        experiment = Experiment.model_validate({**given, "methods": methods})
    except ValidationError as error:
        problems += problems_of(error, Experiment)
    if not problems:
        problems += [*_combinations(experiment), *_settings_problems(experiment)]
    if problems:
        raise invalid(list(dict.fromkeys(problems)), where)
    return experiment


def _combinations(experiment: Experiment) -> Iterator[Problem]:
    """Yield the problems of the file apart from those of the settings."""
    names = list(experiment.methods)
    if experiment.baseline not in names:
        expected = f"must be one of the methods: {', '.join(names)}"
        yield Problem("baseline", got(experiment.baseline), expected)
    if len(names) < 2:
        yield Problem("methods", f"got {len(names)}", "must be at least two")
    if len(set(experiment.seeds)) < len(experiment.seeds):
        yield Problem("seeds", got(list(experiment.seeds)), "must not repeat a seed")
    try:
        if experiment.seconds <= 0:
            yield Problem("budget", got(experiment.budget), "must be more than 0")
    except UserError:
        expected = "must be a time of training such as 90s, 10m or 2h"
        yield Problem("budget", got(experiment.budget), expected)
    for name, method in experiment.methods.items():
        if "other_seed" in method.controls and len(experiment.seeds) < 2:
            path = f"methods.{name}.controls"
            yield Problem(path, "got other_seed", "requires at least two seeds")
    repeated = len(experiment.arms) < sum(1 + len(m.controls) for m in experiment.methods.values())
    if repeated:
        yield Problem("methods", "two methods or controls with one name", "must differ")


def _settings_problems(experiment: Experiment) -> Iterator[Problem]:
    """Yield the problems of the settings that all methods share, and of each method."""
    base, problems = _validated(experiment, None)
    yield from (p.below("settings") for p in problems)
    for name, method in experiment.methods.items():
        config, found = _validated(experiment, name)
        for problem in found:
            if problem not in problems:
                yield problem.below(f"methods.{name}.settings")
        if config is None:
            continue
        if method.controls and config.train.timesteps.adaptive in ("none", "replay"):
            path, expected = f"methods.{name}.controls", "requires train.timesteps.adaptive"
            yield Problem(path, got(list(method.controls)), expected)
        for path, value in flat(merged({}, method.settings)).items():
            unchanged = base and flat(base.dump()).get(path) == value
            if path in _OF_COMPARISON:
                hint = "the comparison sets it"
                yield Problem(f"methods.{name}.settings.{path}", got(value), hint)
            elif not _OF_METHOD.match(path) and not unchanged:
                expected = "must be the same for all methods; move it to settings"
                yield Problem(f"methods.{name}.settings.{path}", got(value), expected)


def _validated(experiment: Experiment, method: str | None) -> tuple[Config | None, list[Problem]]:
    try:
        return experiment.config(method, "workspace"), []
    except UserError as error:
        if not error.problems:
            raise
        return None, [replace(problem, option="") for problem in error.problems]


def warmup_problems(experiment: Experiment, steps: Mapping[str, int]) -> list[Problem]:
    """Return the methods whose warm-up is not over after their number of steps."""
    problems = []
    for name, count in steps.items():
        warmup = experiment.config(name, "workspace").train.optimizer.warmup
        if warmup >= count:
            given = f"got {experiment.budget}, which is {count} steps of {name}"
            expected = f"must be longer than train.optimizer.warmup, {warmup} steps"
            problems.append(Problem("budget", given, expected))
    return problems
