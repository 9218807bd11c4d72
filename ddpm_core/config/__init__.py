"""The settings of params.yaml as frozen, validated objects.

Nothing here imports torch, so that `ddpm --help` and errors in a params file appear at once. All
problems of a file are reported together, each with its path, the value and what is allowed.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, ValidationInfo, model_validator

from ddpm_core.config.network import Diffusion, Model, attention_sizes
from ddpm_core.config.prepare import Prepare
from ddpm_core.config.results import Evaluate, Register, Sample, Tracking
from ddpm_core.config.section import Section
from ddpm_core.config.train import Loss, Optimizer, Timesteps, Train
from ddpm_core.errors import Invalid, Problem, got
from ddpm_core.models.config import UNetConfig
from ddpm_core.problems import problems_of
from ddpm_core.text import masked, throughout

__all__ = [
    "Config",
    "Diffusion",
    "Evaluate",
    "Loss",
    "Model",
    "Optimizer",
    "Prepare",
    "Register",
    "Sample",
    "Section",
    "Timesteps",
    "Tracking",
    "Train",
]


class Config(Section):
    """All settings of a params.yaml."""

    def dump(self) -> dict[str, Any]:
        """Return plain data, as in a params file. `load.validate` turns it into the same Config."""
        return self.model_dump(mode="json", by_alias=True)

    def record(self) -> dict[str, Any]:
        """Return `dump` without secrets, for logs, MLflow, checkpoints and results."""
        return dict(throughout(masked, self.dump()))

    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        0, description="seed of weights, batches and noise: the same seed gives the same model"
    )
    workspace: str = Field(
        "workspace",
        description="where all results are stored: a directory or s3://bucket/prefix; or use -w",
    )
    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")] = Field(
        "auto", description="auto, cpu, mps, cuda or cuda:N"
    )
    prepare: Prepare = Prepare()
    model: Model = Model()
    diffusion: Diffusion = Diffusion()
    train: Train = Train()
    sample: Sample = Sample()
    evaluate: Evaluate = Evaluate()
    registration: Register = Field(
        Register(), alias="register"
    )  # `register` is a method of ABC classes
    tracking: Tracking = Tracking()

    @property
    def measures_moments(self) -> bool:
        """Return whether training uses the mean and covariance of the images.

        Drawing uses them only if the prediction does (`Diffusion.uses_moments`).
        """
        train = self.train
        by_levels = train.loss.weighting == "edm" or train.timesteps.adaptive == "wiener_gate"
        return self.diffusion.uses_moments or by_levels

    @model_validator(mode="before")
    @classmethod
    def _choose_attention(cls, given: Any) -> Any:
        """Replace `model.attention: auto`, which is also the default, by image sizes."""
        if not isinstance(given, dict):
            return given
        model, prepare = given.get("model", {}), given.get("prepare", {})
        if not isinstance(model, dict) or model.get("attention", "auto") != "auto":
            return given
        size = prepare.get("image_size") if isinstance(prepare, dict) else None
        multipliers = model.get("multipliers")
        chosen = attention_sizes(
            size if isinstance(size, int) else Prepare().image_size,
            len(multipliers if isinstance(multipliers, list | tuple) else Model().multipliers),
        )
        return {**given, "model": {**model, "attention": chosen}}

    @model_validator(mode="after")
    def _check_combinations(self, info: ValidationInfo) -> Self:
        problems = self._network_problems() + self._path_problems() + self._training_problems()
        # A trained checkpoint knows by itself what it can draw (sampling.plan.must_suit).
        if not (info.context or {}).get("trained"):
            problems += self._sampling_problems()
        if problems:
            raise Invalid(problems)
        return self

    def _network_problems(self) -> list[Problem]:
        def setting(field: str) -> str:
            return "prepare.image_size" if field == "image_size" else f"model.{field}"

        try:  # the channels and classes of the images are unknown here, and do not matter
            self.model.network(self.prepare.image_size, in_channels=3, classes=1)
        except ValidationError as error:
            return [
                replace(p, path=setting(p.path), involves=tuple(map(setting, p.involves)))
                for p in problems_of(error, UNetConfig)
            ]
        return []

    def _path_problems(self) -> list[Problem]:
        problems = []
        # An empty path, as from a shell variable that is not set, is not the current directory.
        if not self.workspace.strip():
            expected = "must be a directory or s3://bucket/prefix"
            problems.append(Problem("workspace", got(self.workspace), expected))
        if not self.prepare.source.strip():
            expected = "must be digits, a directory or another source"
            problems.append(Problem("prepare.source", got(self.prepare.source), expected))
        # The homes of the workspace and the source are checked where they are opened.
        paths = {
            "train.init": self.train.init or "",
            "train.timesteps.tables": self.train.timesteps.tables or "",
            "evaluate.inception_weights": self.evaluate.inception_weights or "",
            "tracking.tensorboard": self.tracking.tensorboard or "",
            "tracking.uri": self.tracking.uri.removeprefix("sqlite:///").removeprefix("file://"),
        }
        for name, path in paths.items():
            if path.startswith("~") and os.path.expanduser(path) == path:  # noqa: PTH111
                expected = f"must not begin with {path.partition('/')[0]}, which has no home"
                problems.append(Problem(name, got(path), expected, "write the path without ~"))
        return problems

    def _training_problems(self) -> list[Problem]:
        adaptive = self.train.timesteps.adaptive
        if adaptive != "held_out" or self.prepare.holdout > 0:
            return []
        expected = "requires held-out images"
        hint, involves = "use a prepare.holdout above 0", ("prepare.holdout",)
        path = "train.timesteps.adaptive"
        return [Problem(path, got(adaptive), expected, hint, involves=involves)]

    def _sampling_problems(self) -> list[Problem]:
        sample, train = self.sample, self.train
        problems = sample.problems(
            self.model.conditioning, self.diffusion.timesteps, train.label_drop
        )
        return problems + self._guide_problems() + self._average_problems()

    def _average_problems(self) -> list[Problem]:
        """Return why no checkpoint of the run can have the average, if that is known already."""
        ema, train, chosen = self.sample.ema, self.train, self.sample.checkpoints
        involves = ["train.ema"]
        if isinstance(ema, float) and not train.widths and ema not in train.ema:
            expected = f"must be one of train.ema, {list(train.ema)}"
            hint = "any width requires widths in train.ema, as in [power:0.05, power:0.1]"
        else:
            step = min(chosen) if isinstance(chosen, tuple) else train.steps
            milestones = range(train.milestone_every, step, train.milestone_every)
            expected = train.width_problem(ema, milestones, step)
            hint = "more milestones (train.milestone_every) represent more widths"
            involves += ["train.milestone_every", "train.steps", "sample.checkpoints"]
        problem = Problem("sample.ema", got(ema), expected, hint, involves=tuple(involves))
        return [problem] if expected else []

    def _guide_problems(self) -> list[Problem]:
        """Return why no checkpoint of the run can have the guide, if that is known already."""
        guide, chosen = self.sample.guide, self.sample.checkpoints
        every = self.train.milestone_every
        if guide is None:
            return []
        earliest = every if guide == "auto" else guide
        first = min(chosen) if isinstance(chosen, tuple) else self.train.steps
        if earliest < first:
            return []
        settings = {"train.milestone_every": every, "train.steps": self.train.steps}
        involves = (*settings, "sample.checkpoints")
        given = ", ".join(f"{name} {value}" for name, value in settings.items())
        expected = f"requires a milestone before step {first}, but there is none with {given}"
        if guide != "auto":
            expected = f"must be below {first}, a step that is sampled"
        return [Problem("sample.guide", got(guide), expected, involves=involves)]
