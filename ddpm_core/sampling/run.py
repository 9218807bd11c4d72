"""The verb `sample`: images of the chosen checkpoints, in shards that any worker may draw.

Images are drawn chunk by chunk, each on disk as it is done, so that an interrupted worker loses one
at most. When the last shard of a checkpoint is there, they are checked and listed in one manifest.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ddpm_core.checkpoint import Checkpoint, check_weights, fetch_weights
from ddpm_core.config import Config
from ddpm_core.console import progress, say, warn
from ddpm_core.data.captions import is_cut
from ddpm_core.errors import UserError
from ddpm_core.runtime import memory
from ddpm_core.runtime.device import (
    choose_device,
    choose_precision,
    compiles_sampling,
    translate_compile_errors,
)
from ddpm_core.runtime.distributed import World
from ddpm_core.sampling import gather, plan
from ddpm_core.sampling.plan import Shard
from ddpm_core.sampling.sampler import ImageSampler
from ddpm_core.sampling.shards import ShardStore
from ddpm_core.storage import MANIFEST
from ddpm_core.storage.workspace import SAMPLES, Workspace, samples_key, snapshot_key
from ddpm_core.text import counted

ATTEMPTS = 3  # at a shard whose chunks vanish while it is drawn


def sample(
    config: Config, workspace: Workspace, world: World, shard: tuple[int, int] | None = None
) -> None:
    """Draw what is missing. `shard` (number, of) draws one shard alone, as an independent job.

    Several workers of one world take the chunks in turn, whatever the shards; none waits for
    another, and the last one to end puts all together.
    """
    settings = config.sample
    if world.rank == 0:
        workspace.storage.sweep_staged()
    if shard is not None:
        settings = settings.model_copy(update={"shards": shard[1]})
        config = config.model_copy(update={"sample": settings})
    mine = [s for s in plan.shards(settings) if shard is None or s.number == shard[0]]
    checkpoints = plan.look_at_chosen(config, workspace, warn)
    if world.rank == 0:
        tell_cut(settings.prompts or ())
    attempts = [functools.partial(drawer_of, config, workspace, world, c) for c in checkpoints]
    work = list(plan.whole(config, attempts, warn))
    if shard is None and world.rank == 0:
        forget_others(workspace, [c.step for c in checkpoints])
    drawers = [drawer for drawer in work if drawer]
    if not drawers:
        images, found = counted(settings.count, "image"), counted(len(work), "checkpoint")
        say(f"sample: up to date, {images} of each of {found}.")
        return
    if world.rank == 0:
        tell_replaced(workspace, [drawer.recipe for drawer in drawers])
    total = len(drawers) * sum(len(images) for _, images in drawers[0].share(mine))
    with progress("sample", total, "images") as advance:
        for drawer in drawers:
            with still_there(config, workspace, drawer.recipe["step"]):
                drawer.draw(mine, functools.partial(advance, note=f"step {drawer.recipe['step']}"))
                gather.try_gather(config, workspace, drawer.recipe)


@contextlib.contextmanager
def still_there(config: Config, workspace: Workspace, step: int) -> Iterator[None]:
    """A checkpoint that training removes meanwhile is left out where all are chosen."""
    try:
        yield
    except UserError as error:
        if workspace.storage.exists(snapshot_key(step)):
            raise
        told = f"The checkpoint of step {step} was removed while it was sampled"
        if config.sample.checkpoints != "all":
            raise UserError(f"{told}: run `ddpm sample` again.") from error
        warn(f"{told}, by training, which keeps the newest and the milestones. It is left out.")


class Drawer:
    """Draws the shards of one checkpoint; its network is loaded when first needed."""

    def __init__(
        self,
        config: Config,
        workspace: Workspace,
        world: World,
        checkpoint: Checkpoint,
        recipe: dict[str, Any],
    ) -> None:
        self._config = config
        self._world = world
        self._checkpoint = checkpoint
        self._sampler: ImageSampler | None = None
        self._parts = ShardStore(workspace, recipe)
        self.recipe = recipe

    def share(self, shards: Sequence[Shard]) -> list[tuple[int, range]]:
        """This worker's chunks of some shards, each with its images."""
        chunks = [(number, shard.images(number)) for shard in shards for number in shard.chunks]
        return chunks[self._world.rank :: self._world.size]

    def draw(self, shards: Sequence[Shard], advance: Callable[[int], None]) -> None:
        """Put shards on disk, unless they are there already; with others, as many as are ready."""
        for _ in range(ATTEMPTS):
            lacking = [shard for shard in shards if self._parts.problem(shard)]
            wanted = {number for shard in lacking for number in shard.chunks}
            for number, images in self.share(shards):
                if number in wanted:
                    self._put(number, images)
                advance(len(images))
            unfinished = [shard for shard in lacking if not self._parts.finish(shard)]
            if not unfinished or self._world.size > 1:
                return
            advance = _nothing
        raise UserError(
            f"{self._parts.key} loses the images that are drawn: does something else remove them?"
        )

    def _put(self, number: int, images: range) -> None:
        """Draw a chunk, unless an earlier run has; all of its batch, whatever is kept of it."""
        size = self._config.sample.batch_size
        advice = f"sample.batch_size {size}: lower it, for all shards alike."
        if self._parts.chunk(number, len(images)) is None:
            with memory.translate_errors(advice), translate_compile_errors("sample.compile"):
                drawn = self._loaded().images(range(images.start, images.start + size))
            self._parts.write_chunk(number, drawn[: len(images)])

    def _loaded(self) -> ImageSampler:
        if self._sampler is None:
            model = self._checkpoint.load(self._config.sample.ema, self._world.device)
            self._sampler = ImageSampler(
                model,
                self._checkpoint.data,
                self._config.sample,
                self._checkpoint.params.diffusion,
                compiled=self.recipe.get("compiled", False),
            )
        return self._sampler


def _nothing(count: int) -> None:
    """Images that are drawn once more are not counted twice."""


def tell_cut(prompts: Sequence[str]) -> None:
    for prompt in filter(is_cut, prompts):
        warn(f"sample.prompts: {prompt!r:.100} is longer than 64 bytes, and cut as captions are.")


def drawer_of(
    config: Config, workspace: Workspace, world: World, checkpoint: Checkpoint
) -> Drawer | None:
    """None where all is drawn. Raises Corrupt where the weights are not what was written."""
    recipe = recipe_on(world.device, config, checkpoint)
    if gather.complete(workspace, recipe, thorough=True):
        return None
    fetched = fetch_weights(workspace, checkpoint, config.sample.ema)
    return Drawer(config, workspace, world, fetched, recipe)


def recipe_on(device: torch.device, config: Config, checkpoint: Checkpoint) -> dict[str, Any]:
    """What the images of a checkpoint depend on, as this device draws them."""
    settings = config.sample
    precision = choose_precision(settings.precision, device)
    # For all shards alike, as it changes rounding.
    compiled = compiles_sampling(settings.compile, device, settings.count * settings.steps)
    return plan.recipe(config, checkpoint, precision, compiled)


def forget_others(workspace: Workspace, steps: list[int]) -> None:
    """Remove the samples of checkpoints that are no longer among the chosen ones."""
    for step in workspace.steps(SAMPLES):
        if step not in steps and not workspace.storage.exists(snapshot_key(step)):
            warn(f"The samples of step {step} are removed: its checkpoint is gone.")
            workspace.storage.remove(samples_key(step))


def tell_replaced(workspace: Workspace, recipes: Sequence[dict[str, Any]]) -> None:
    """Say which finished samples give way to those that are drawn now."""
    replaced = []
    for recipe in recipes:
        there = workspace.read_json(f"{samples_key(recipe['step'])}/{MANIFEST}")
        if there.get("samples_fingerprint") not in (None, recipe["samples_fingerprint"]):
            replaced.append(str(recipe["step"]))
    if replaced:
        warn(
            f"The samples of step {', '.join(replaced)} are of other settings or weights, and are "
            "replaced. For images beside those that are scored ask the registered model, or sample "
            "a copy of the workspace (-w)."
        )


def stale(config: Config, workspace: Workspace) -> str | None:
    """Why `sample` has work to do; None where it is up to date."""
    try:
        checkpoints = plan.look_at_chosen(config, workspace)
        device = choose_device(config.device)
        attempts = (functools.partial(_stale, config, workspace, device, c) for c in checkpoints)
        return next(filter(None, plan.whole(config, attempts)), None)
    except UserError as error:
        return str(error)


def _stale(
    config: Config, workspace: Workspace, device: torch.device, checkpoint: Checkpoint
) -> str:
    """What one checkpoint lacks, if that can be drawn; else raises Corrupt."""
    recipe = recipe_on(device, config, checkpoint)
    if gather.complete(workspace, recipe):
        return ""
    check_weights(workspace, checkpoint, config.sample.ema)
    return f"the checkpoint of step {checkpoint.step} has {_lack(config, workspace, recipe)}"


def _lack(config: Config, workspace: Workspace, recipe: dict[str, Any]) -> str:
    """Which shards are missing of those that jobs have begun with, of whatever number."""
    counts = ShardStore(workspace, recipe).counts()
    lacks = []
    for of in counts:
        settings = config.sample.model_copy(update={"shards": of})
        lacks.append(gather.waiting(workspace, recipe, plan.shards(settings)))
    if not counts:
        return "no samples of these settings"
    missing = min(lacks, key=len)
    if not missing:
        return "samples that are still to be gathered, with the pictures to look at"
    return f"not all of its samples: there is no {missing}"
