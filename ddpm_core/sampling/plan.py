"""What there is to sample: which checkpoints, and how their images are cut into shards.

Images are drawn in chunks of `sample.batch_size`: image i in chunk i // batch_size, whoever draws
it. A shard takes whole chunks, so that one worker and forty draw the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from ddpm_core.checkpoint import Checkpoint, look_at_checkpoint
from ddpm_core.config import Config, Sample
from ddpm_core.config.identity import non_defaults
from ddpm_core.config.load import validate
from ddpm_core.config.results import SAMPLER_DEFAULTS
from ddpm_core.errors import Corrupt, UserError
from ddpm_core.scores import best_to_sample, read_rows
from ddpm_core.storage.workspace import SNAPSHOTS, Workspace, fingerprint

T = TypeVar("T")
Tell = Callable[[str], None]
MENDING = "Put back a copy of the file; the newest checkpoint is trained again by `ddpm train`."

# What a checkpoint was trained with where guidance can't work, and what it would work with.
_UNGUIDED = {
    "model.conditioning": ("model.conditioning none", "conditioning class or text"),
    "train.label_drop": (
        "train.label_drop 0, and so never without its condition",
        "label_drop 0.1",
    ),
}


@dataclass(frozen=True)
class Shard:
    """Images [start, stop) of a run of `count`, in whole chunks of `batch_size`."""

    number: int
    of: int
    count: int
    batch_size: int

    @property
    def chunks(self) -> range:
        total = -(-self.count // self.batch_size)
        return range(self.number * total // self.of, (self.number + 1) * total // self.of)

    def images(self, chunk: int) -> range:
        """The images of a chunk that are kept; the rest of it is padding."""
        return range(chunk * self.batch_size, min((chunk + 1) * self.batch_size, self.count))

    @property
    def start(self) -> int:
        return min(self.chunks.start * self.batch_size, self.count)

    @property
    def stop(self) -> int:
        return min(self.chunks.stop * self.batch_size, self.count)

    @property
    def name(self) -> str:
        return f"shard-{self.number:03d}-of-{self.of:03d}"


def shards(settings: Sample) -> list[Shard]:
    return [
        Shard(number, settings.shards, settings.count, settings.batch_size)
        for number in range(settings.shards)
    ]


def chosen_steps(config: Config, workspace: Workspace) -> list[int]:
    """The steps that `sample.checkpoints` means, in order. Raises UserError where one is missing.

    `all` is every milestone and the newest checkpoint.
    """
    there = workspace.steps(SNAPSHOTS)
    if not there:
        raise UserError(f"{workspace.uri} has no checkpoint to sample: run `ddpm train` first.")
    wanted = config.sample.checkpoints
    if wanted == "latest":
        return there[-1:]
    if wanted == "all":
        return [step for step in there if config.train.is_milestone(step) or step == there[-1]]
    if wanted == "best":
        return [best_step(config, workspace)]
    missing = [step for step in wanted if step not in there]
    if missing:
        raise UserError(
            f"sample.checkpoints: there is no checkpoint of step {missing[0]} "
            f"(there: {', '.join(map(str, there))})."
        )
    return sorted(set(wanted))


def best_step(config: Config, workspace: Workspace) -> int:
    """The step of the best score so far."""
    row = best_to_sample(read_rows(workspace), config.sample)
    if row is None:
        raise UserError("sample.checkpoints: best, but nothing is scored yet: run `ddpm evaluate`.")
    return row.step


def recipe(
    config: Config, checkpoint: Checkpoint, precision: str, compiled: bool = False
) -> dict[str, Any]:
    """All that the images of a checkpoint depend on, with it their fingerprint, and the extras."""
    settings = config.sample
    sampler = {**settings.of_sampler(), "precision": precision}
    facts = {
        "step": checkpoint.step,
        "count": settings.count,
        "batch_size": settings.batch_size,
        "weights": checkpoint.weights_hash(settings.ema),
        "sampler": sampler,
        "seed": settings.seed,
        "data_fingerprint": checkpoint.data["fingerprint"],
        "train_fingerprint": checkpoint.train_fingerprint,
        "image_size": checkpoint.data["image_size"],
        "channels": checkpoint.data["channels"],
        "classes": checkpoint.data["classes"],
        **({"compiled": True} if compiled else {}),
    }
    return {**facts, "png": settings.png, "samples_fingerprint": fingerprint_of(facts)}


def fingerprint_of(facts: dict[str, Any]) -> str:
    """What stands for the facts of a recipe: settings at their defaults don't count."""
    return fingerprint({**facts, "sampler": non_defaults(facts["sampler"], SAMPLER_DEFAULTS)})


def must_suit(
    settings: Sample, conditioning: str, timesteps: int, label_drop: float | None = None
) -> None:
    """Raise UserError, with every mistake, where a network cannot draw by these settings.

    `conditioning`, `timesteps` and `label_drop` are what it was trained with, whatever the params
    say by now. Without `label_drop`, as for what was registered, guidance is not judged.
    """
    mistakes = []
    if settings.steps > timesteps:
        mistakes.append(
            f"sample.steps: {settings.steps} given; the checkpoint was trained with {timesteps} "
            "timesteps: give at most as many."
        )
    for name, kind in (("classes", "class"), ("prompts", "text")):
        if getattr(settings, name) is not None and conditioning != kind:
            mistakes.append(
                f"sample.{name}: given; the checkpoint was trained with model.conditioning "
                f"{conditioning}: leave it out, or train with {kind}."
            )
    if label_drop is not None and (lacks := settings.guidance_lacks(conditioning, label_drop)):
        trained, mend = _UNGUIDED[lacks]
        mistakes.append(
            f"sample.guidance: {settings.guidance:g} given; the checkpoint was trained with "
            f"{trained}: give 1, or train with {mend}."
        )
    if mistakes:
        raise UserError(" ".join(mistakes))


def look_at_chosen(
    config: Config, workspace: Workspace, tell: Tell | None = None
) -> list[Checkpoint]:
    """Without their weights: what a recipe needs. Raises UserError where one can't draw so."""
    steps = chosen_steps(config, workspace)
    attempts = (partial(look_at_checkpoint, workspace, step) for step in steps)
    found = list(whole(config, attempts, tell))
    for one in found:
        trained = one.params
        must_suit(
            config.sample,
            one.network.conditioning,
            trained.diffusion.timesteps,
            trained.train.label_drop,
        )
    return found


def whole(
    config: Config, attempts: Iterable[Callable[[], T]], tell: Tell | None = None
) -> Iterator[T]:
    """What comes of each attempt at a chosen checkpoint; `tell` hears of a damaged one.

    Where all are chosen, it is left out. Raises Corrupt where others are, or none is whole.
    """
    damage, count = "", 0
    for attempt in attempts:
        try:
            found = attempt()
        except Corrupt as error:
            damage = f"{error} {MENDING}"
            if config.sample.checkpoints != "all":
                told = f"{damage} sample.checkpoints: all leaves out what is damaged."
                raise Corrupt(told) from error
            if tell:
                tell(f"{error} The checkpoint is left out. {MENDING}")
        else:
            count += 1
            yield found
    if damage and not count:
        raise Corrupt(damage)


def parse_shard(text: str) -> tuple[int, int]:
    """(number, of) of `I/N`, 0 <= I < N. Raises UserError."""
    if match := re.fullmatch(r"(\d{1,18})/(\d{1,18})", text):
        number, of = map(int, match.groups())
        if number < of:
            validate({"sample": {"shards": of}})  # as if that setting had asked for them
            return number, of
    raise UserError(f"--shard {text}: I/N is needed, with I from 0 to N - 1, as in --shard 0/4.")
