"""What to do: the sections of params.yaml as frozen, validated objects.

Nothing here imports torch, so `ddpm --help` and a mistake in a params file answer at once.
Every mistake of a file is reported together, each with its path, what was given and what is
allowed.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Self

from pydantic import Field, ValidationInfo, model_validator

from ddpm_core.config.network import Diffusion, Model, attention_sizes
from ddpm_core.config.prepare import Prepare
from ddpm_core.config.results import Evaluate, Register, Sample, Tracking
from ddpm_core.config.section import Section
from ddpm_core.config.train import Loss, Optimizer, Timesteps, Train
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


# What is the matter where guidance can't work, and what else would do.
_UNGUIDED = {
    "model.conditioning": "model.conditioning is none; 1, for no guidance,",
    "train.label_drop": "train.label_drop is 0; 1, for no guidance, or a label_drop",
}


class Config(Section):
    """A whole params.yaml."""

    def dump(self) -> dict[str, Any]:
        """Plain data, as in a params file; `params.validate` makes the same Config of it."""
        return self.model_dump(mode="json", by_alias=True)

    def record(self) -> dict[str, Any]:
        """The same without secrets: what logs, MLflow, checkpoints and results get."""
        return dict(throughout(masked, self.dump()))

    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        0, description="of weights, batches and noise: the same seed gives the same model"
    )
    workspace: str = Field(
        "workspace",
        description="where everything is kept: a directory or s3://bucket/prefix; -w overrides it",
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
    registration: Register = Field(Register(), alias="register")  # a class has a `register`
    tracking: Tracking = Tracking()

    @model_validator(mode="before")
    @classmethod
    def _attention_suits(cls, given: Any) -> Any:
        """Put image sizes in the place of `model.attention: auto`, and where it is not given."""
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
    def _sections_agree(self, info: ValidationInfo) -> Self:
        mistakes = self._network_mistakes() + self._homeless()
        # What is trained already says by itself what it can draw (generate.plan.must_suit).
        if not (info.context or {}).get("trained"):
            mistakes += self._sampling_mistakes()
        if mistakes:
            raise ValueError("\n".join(mistakes))
        return self

    def _network_mistakes(self) -> list[str]:
        size, levels = self.prepare.image_size, len(self.model.multipliers)
        divisor = 2 ** (levels - 1)
        if size % divisor:
            below, above = size // divisor * divisor, -(-size // divisor) * divisor
            allowed = f"{below} or {above}" if below else f"{above}"
            return [
                f"prepare.image_size: {size} given; a network of {levels} levels halves it "
                f"{levels - 1} times, so a multiple of {divisor} is needed: {allowed}"
            ]
        sizes = [size // 2**level for level in range(levels)]
        mistakes = [
            f"model.attention: {a} given; the network of prepare.image_size {size} works at "
            f"{sizes}; or auto"
            for a in self.model.attention
            if a not in sizes
        ]
        if any(width % self.model.heads for width in self.model.widths):
            mistakes.append(
                f"model.heads: {self.model.heads} given; it must divide the channels of every "
                f"level, {self.model.widths}"
            )
        return mistakes

    def _homeless(self) -> list[str]:
        """Paths that begin with ~ and have no home; those of the source and the workspace are
        reported where they are opened."""
        paths = {
            "train.init": self.train.init or "",
            "evaluate.inception_weights": self.evaluate.inception_weights or "",
            "tracking.uri": self.tracking.uri.removeprefix("sqlite:///").removeprefix("file://"),
        }
        return [
            f"{name}: {path!r} given; no home directory is known for {path.partition('/')[0]}, so "
            "a path without it is needed"
            for name, path in paths.items()
            if path.startswith("~") and os.path.expanduser(path) == path  # noqa: PTH111
        ]

    def _sampling_mistakes(self) -> list[str]:
        mistakes = []
        if self.sample.steps > self.diffusion.timesteps:
            mistakes.append(
                f"sample.steps: {self.sample.steps} given; there are only "
                f"{self.diffusion.timesteps} (diffusion.timesteps)"
            )
        if self.sample.classes is not None and self.model.conditioning != "class":
            mistakes.append("sample.classes: given, but model.conditioning is not class")
        if self.sample.prompts is not None and self.model.conditioning != "text":
            mistakes.append("sample.prompts: given, but model.conditioning is not text")
        if lacks := self.sample.guidance_lacks(self.model.conditioning, self.train.label_drop):
            mistakes.append(
                f"sample.guidance: {self.sample.guidance:g} given, but {_UNGUIDED[lacks]} is needed"
            )
        if isinstance(self.sample.ema, float) and self.sample.ema not in self.train.ema:
            mistakes.append(
                f"sample.ema: {self.sample.ema} given; train.ema has {list(self.train.ema)}"
            )
        return mistakes
