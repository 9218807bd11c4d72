"""Plan a sampling run: which checkpoints to sample, and how their images divide into shards.

Images are drawn in chunks of `sample.batch_size`: image i is in chunk i // batch_size for every
worker. A shard has whole chunks, so that one worker and forty draw the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, InstanceOf

from ddpm_core.checkpoint import MOMENTS, Checkpoint, look_at_checkpoint, with_earlier
from ddpm_core.config import Config, Sample
from ddpm_core.config.identity import non_defaults
from ddpm_core.config.load import validate
from ddpm_core.config.results import SAMPLER_DEFAULTS
from ddpm_core.errors import Corrupt, UserError
from ddpm_core.scores import best_to_sample, read_rows
from ddpm_core.storage.files import Count, Schema
from ddpm_core.storage.workspace import SNAPSHOTS, Workspace, fingerprint

T = TypeVar("T")
Warn = Callable[[str], None]
REPAIR = "Restore the file from a copy, or run `ddpm train` to train the newest checkpoint again."


# Fields of a samples' manifest that change no image; the fingerprint covers all others.
_UNRELATED = {"png", "samples_fingerprint", "shards", "files", "pictures"}


class Guide(Schema):
    """The earlier network that guided the sampling."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    step: Count
    weights: str  # SHA-256 of the weights file


class Recipe(Schema):
    """Everything that the images of a checkpoint depend on, and its fingerprint.

    `png`, whether each image is also written as a file, is included but not part of the
    fingerprint. Unknown fields are kept and count: another version of ddpm may have written them.
    """

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    step: Count
    count: Count
    batch_size: Count
    weights: str  # SHA-256 of the weights file
    sampler: dict[str, Any]  # the settings of `sample` that its method uses, and the precision
    seed: int
    data_fingerprint: str
    train_fingerprint: str
    image_size: Annotated[int, Field(ge=1, le=2**16)]
    channels: Annotated[int, Field(ge=1, le=4)]
    classes: list[InstanceOf[str]]
    # Unset if false or null: these were added later and must not change fingerprints.
    compiled: bool = False
    guide: Guide | None = None
    png: bool = False
    samples_fingerprint: str = ""

    def plain(self) -> dict[str, Any]:
        """Return the fields that were given, as they are written to the manifest."""
        return self.model_dump(exclude_unset=True)

    def fingerprint(self) -> str:
        """Return the fingerprint of the images. Settings at their defaults do not change it."""
        facts = {name: value for name, value in self.plain().items() if name not in _UNRELATED}
        return fingerprint({**facts, "sampler": non_defaults(self.sampler, SAMPLER_DEFAULTS)})


@dataclass(frozen=True)
class Shard:
    """Shard `number` of `of`: images [start, stop) out of `count`, in chunks of `batch_size`."""

    number: int
    of: int
    count: int
    batch_size: int

    @property
    def chunks(self) -> range:
        """The numbers of the chunks in this shard."""
        total = -(-self.count // self.batch_size)
        return range(self.number * total // self.of, (self.number + 1) * total // self.of)

    def images(self, chunk: int) -> range:
        """Return the images of a chunk. The last chunk may be shorter than `batch_size`."""
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
    """Return all shards of a run."""
    return [
        Shard(number, settings.shards, settings.count, settings.batch_size)
        for number in range(settings.shards)
    ]


def chosen_steps(config: Config, workspace: Workspace) -> list[int]:
    """Return the steps that `sample.checkpoints` selects, ascending.

    `all` selects every milestone and the newest checkpoint, except those before the first that can
    have the guide and the average of the settings. Raises UserError if a checkpoint is missing.
    """
    available = workspace.steps(SNAPSHOTS)
    if not available:
        raise UserError(f"{workspace.uri} has no checkpoint to sample.", run=("train",))
    wanted = config.sample.checkpoints
    if wanted == "latest":
        return available[-1:]
    if wanted == "all":
        newest = available[-1]
        found = [step for step in available if config.train.is_milestone(step) or step == newest]
        return [s for s in found if is_possible(config, available, s)] or found[-1:]
    if wanted == "best":
        return [best_step(config, workspace)]
    missing = [step for step in wanted if step not in available]
    if missing:
        raise UserError(
            f"sample.checkpoints: there is no checkpoint of step {missing[0]} "
            f"(available: {', '.join(map(str, available))})."
        )
    return sorted(set(wanted))


def guide_step(config: Config, available: list[int], step: int) -> int | None:
    """Return the step of the checkpoint that guides the one of `step`; None without sample.guide.

    Raises UserError if there is no earlier checkpoint of that kind among those available.
    """
    guide = config.sample.guide
    if guide is None:
        return None
    if guide == "auto":
        earlier = [s for s in available if s < step and config.train.is_milestone(s)]
        if earlier:
            return min(earlier, key=lambda s: (abs(4 * s - step), s))
        raise UserError(
            f"sample.guide: got auto, but there is no milestone before step {step}. Sample a later "
            "checkpoint, or train with a smaller train.milestone_every."
        )
    if guide < step and guide in available:
        return guide
    listed = ", ".join(str(s) for s in available if s < step) or "none"
    raise UserError(
        f"sample.guide: got {guide}; must be the step of a checkpoint before step {step} "
        f"(available: {listed})."
    )


def is_possible(config: Config, available: list[int], step: int) -> bool:
    """Return whether a step has the earlier checkpoints that its guide and its average require."""
    milestones = config.train.milestones(available, step)
    if config.train.width_problem(config.sample.ema, milestones, step):
        return False
    try:
        guide_step(config, available, step)
    except UserError:
        return False
    return True


def best_step(config: Config, workspace: Workspace) -> int:
    """Return the step with the best score so far. Raises UserError if there are no scores."""
    row = best_to_sample(read_rows(workspace), config.sample)
    if row is None:
        raise UserError(
            "sample.checkpoints: best requires scores; there are none.", run=("evaluate",)
        )
    return row.step


def make_recipe(
    config: Config, checkpoint: Checkpoint, precision: str, compiled: bool = False
) -> Recipe:
    """Return the recipe of a checkpoint's images."""
    settings, data = config.sample, checkpoint.training_data
    recipe = Recipe(
        step=checkpoint.step,
        count=settings.count,
        batch_size=settings.batch_size,
        weights=checkpoint.weights_hash(settings.ema),
        sampler={**settings.of_sampler(), "precision": precision},
        seed=settings.seed,
        data_fingerprint=data.fingerprint,
        train_fingerprint=checkpoint.train_fingerprint,
        image_size=data.image_size,
        channels=data.channels,
        classes=data.classes,
        png=settings.png,
    )
    if compiled:
        recipe = recipe.model_copy(update={"compiled": True})
    if (guide := checkpoint.guide) is not None:
        found = Guide(step=guide.step, weights=guide.weights_hash(settings.ema))
        recipe = recipe.model_copy(update={"guide": found})
    return recipe.model_copy(update={"samples_fingerprint": recipe.fingerprint()})


def must_suit(
    settings: Sample, conditioning: str, timesteps: int, label_drop: float | None = None
) -> None:
    """Raise UserError, which lists all problems, if a network cannot draw with these settings.

    `conditioning`, `timesteps` and `label_drop` are the values that the network was trained with;
    the present params may differ. Without `label_drop`, as for a registered model, guidance is not
    checked.
    """
    if problems := settings.problems(conditioning, timesteps, label_drop):
        raise UserError(
            "The network cannot draw with these settings. Change them, or train another one:",
            problems,
        )


def look_at_chosen(
    config: Config, workspace: Workspace, on_damage: Warn | None = None
) -> list[Checkpoint]:
    """Return the selected checkpoints without their weights (see `look_at_checkpoint`).

    Raises UserError if one is missing, damaged or cannot draw with the settings; see `intact` for
    the damage that is tolerated.
    """
    steps = chosen_steps(config, workspace)
    available = workspace.steps(SNAPSHOTS)
    guides = [guide_step(config, available, step) for step in steps]
    ema = config.sample.ema
    pairs = zip(steps, guides, strict=True)
    attempts = (partial(_look_at, workspace, ema, *pair) for pair in pairs)
    found = list(intact(config, attempts, on_damage))
    for checkpoint in found:
        trained = checkpoint.params
        must_suit(
            config.sample,
            checkpoint.network.conditioning,
            trained.diffusion.timesteps,
            trained.train.label_drop,
        )
    return found


def look_at_one(config: Config, workspace: Workspace, on_damage: Warn | None = None) -> Checkpoint:
    """Return the best of the selected checkpoints, or without scores the newest.

    It draws what is not scored. Raises UserError as `look_at_chosen` does.
    """
    found = look_at_chosen(config, workspace, on_damage)
    row = best_to_sample(read_rows(workspace), config.sample)
    return next((c for c in found if row is not None and c.step == row.step), found[-1])


def _look_at(workspace: Workspace, ema: float | str, step: int, guide: int | None) -> Checkpoint:
    """Return a checkpoint with its guide and what their averages require, without the weights.

    Raises UserError if the guide is a different network or there is no such average, Corrupt if one
    of the checkpoints is damaged.
    """
    checkpoint = with_earlier(workspace, look_at_checkpoint(workspace, step), ema)
    if guide is None:
        return checkpoint
    found = with_earlier(workspace, look_at_checkpoint(workspace, guide), ema)
    theirs, own = (
        (c.network, c.params.diffusion, c.checksums.get(MOMENTS)) for c in (found, checkpoint)
    )
    if theirs != own:
        raise UserError(
            f"sample.guide: the checkpoint of step {guide} is a different network than that of "
            f"step {step}. Use one of the same run."
        )
    return replace(checkpoint, guide=found)


def intact(
    config: Config, attempts: Iterable[Callable[[], T]], on_damage: Warn | None = None
) -> Iterator[T]:
    """Yield the result of each attempt to use a checkpoint, except for damaged ones.

    With `sample.checkpoints: all`, damaged checkpoints are skipped and reported by `on_damage`.
    Raises Corrupt with any other selection, or if all checkpoints are damaged.
    """
    damage, count = "", 0
    for attempt in attempts:
        try:
            found = attempt()
        except Corrupt as error:
            damage = f"{error} {REPAIR}"
            if config.sample.checkpoints != "all":
                hint = "sample.checkpoints: all skips damaged checkpoints."
                raise Corrupt(f"{damage} {hint}") from error
            if on_damage:
                on_damage(f"{error} Skipping this checkpoint. {REPAIR}")
        else:
            count += 1
            yield found
    if damage and not count:
        raise Corrupt(damage)


def parse_shard(text: str) -> tuple[int, int]:
    """Return (I, N) for the text "I/N", 0 <= I < N. Raises UserError."""
    if match := re.fullmatch(r"(\d{1,18})/(\d{1,18})", text):
        number, of = map(int, match.groups())
        if number < of:
            validate({"sample": {"shards": of}})  # N has the limits of sample.shards
            return number, of
    raise UserError(f"--shard: got {text!r}; must be I/N with I from 0 to N - 1, such as 0/4.")
