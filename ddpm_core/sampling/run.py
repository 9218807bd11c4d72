"""Run the verb `sample`: draw images of the selected checkpoints, in shards, with any worker.

Each chunk of images is stored as soon as it is drawn, so that an interrupted worker loses one chunk
at most. When all shards of a checkpoint are finished, they are checked and listed in one manifest.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

from ddpm_core.checkpoint import Checkpoint, fetch_weights
from ddpm_core.config import Config
from ddpm_core.console import progress, say, warn
from ddpm_core.data.captions import is_cut
from ddpm_core.errors import UserError
from ddpm_core.runtime import memory
from ddpm_core.runtime.device import translate_compile_errors
from ddpm_core.runtime.distributed import World
from ddpm_core.sampling import gather, plan
from ddpm_core.sampling.freshness import recipe_on
from ddpm_core.sampling.loading import load_sampler
from ddpm_core.sampling.plan import Recipe, Shard
from ddpm_core.sampling.sampler import ImageSampler
from ddpm_core.sampling.shards import ShardStore
from ddpm_core.storage import MANIFEST
from ddpm_core.storage.workspace import SAMPLES, Workspace, samples_key, snapshot_key
from ddpm_core.text import counted

ATTEMPTS = 3  # at a shard whose chunks disappear while it is drawn


def sample(
    config: Config, workspace: Workspace, world: World, shard: tuple[int, int] | None = None
) -> None:
    """Draw the missing images.

    The workers of one world take chunks in turn, across all shards. None waits for another, and the
    last one to finish gathers the samples.

    Args:
        shard: (number, of) to draw that shard alone, as an independent job.

    Raises:
        UserError: A checkpoint is missing, damaged or cannot draw with the settings, or the device
            has too little memory.
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
        warn_truncated(settings.prompts or ())
    attempts = [functools.partial(drawer_of, config, workspace, world, c) for c in checkpoints]
    work = list(plan.intact(config, attempts, warn))
    if shard is None and world.rank == 0:
        remove_orphans(workspace, [c.step for c in checkpoints])
    drawers = [drawer for drawer in work if drawer]
    if not drawers:
        images, found = counted(settings.count, "image"), counted(len(work), "checkpoint")
        say(f"sample: up to date, {images} of each of {found}.")
        return
    if world.rank == 0:
        warn_replaced(workspace, [drawer.recipe for drawer in drawers])
    total = len(drawers) * sum(len(images) for _, images in drawers[0].share(mine))
    with progress("sample", total, "images") as advance:
        for drawer in drawers:
            step = drawer.recipe.step
            with skip_removed(config, workspace, step):
                drawer.draw(mine, functools.partial(advance, note=f"step {step}"))
                gather.try_gather(config, workspace, drawer.recipe)


@contextlib.contextmanager
def skip_removed(config: Config, workspace: Workspace, step: int) -> Iterator[None]:
    """Skip a checkpoint that training removes while it is sampled.

    Raises UserError unless sample.checkpoints is all.
    """
    try:
        yield
    except UserError as error:
        if workspace.storage.exists(snapshot_key(step)):
            raise
        message = f"The checkpoint of step {step} was removed while it was sampled"
        if config.sample.checkpoints != "all":
            raise UserError(f"{message}.", run=("sample",)) from error
        warn(f"{message}: training keeps only the newest and the milestones. Skipping it.")


class Drawer:
    """Draws the shards of one checkpoint. Loads its network at the first missing chunk."""

    def __init__(
        self,
        config: Config,
        workspace: Workspace,
        world: World,
        checkpoint: Checkpoint,
        recipe: Recipe,
    ) -> None:
        self._config = config
        self._world = world
        self._checkpoint = checkpoint
        self._sampler: ImageSampler | None = None
        self._parts = ShardStore(workspace, recipe)
        self.recipe = recipe

    def share(self, shards: Sequence[Shard]) -> list[tuple[int, range]]:
        """Return this worker's chunks of some shards: (number, images) each."""
        chunks = [(number, shard.images(number)) for shard in shards for number in shard.chunks]
        return chunks[self._world.rank :: self._world.size]

    def draw(self, shards: Sequence[Shard], advance: Callable[[int], None]) -> None:
        """Draw this worker's chunks, then finish every shard whose chunks are all drawn.

        Finished shards are kept. `advance(n)` is called after n images.
        """
        for _ in range(ATTEMPTS):
            outdated = [shard for shard in shards if self._parts.problem(shard)]
            wanted = {number for shard in outdated for number in shard.chunks}
            for number, images in self.share(shards):
                if number in wanted:
                    self._draw_chunk(number, images)
                advance(len(images))
            unfinished = [shard for shard in outdated if not self._parts.finish(shard)]
            if not unfinished or self._world.size > 1:
                return
            advance = _nothing
        raise UserError(
            f"Images disappear from {self._parts.key} while they are drawn. Check whether another "
            "program removes files there."
        )

    def _draw_chunk(self, number: int, images: range) -> None:
        """Draw and store a chunk unless an earlier run has.

        The batch always has its full size, because the size can change the rounding.
        """
        size = self._config.sample.batch_size
        advice = f"sample.batch_size {size}: lower it, for all shards alike."
        if self._parts.chunk(number, len(images)) is None:
            with memory.translate_errors(advice), translate_compile_errors("sample.compile"):
                drawn = self._loaded().images(range(images.start, images.start + size))
            self._parts.write_chunk(number, drawn[: len(images)])

    def _loaded(self) -> ImageSampler:
        if self._sampler is None:
            self._sampler = load_sampler(
                self._checkpoint, self._config.sample, self._world.device, self.recipe.compiled
            )
        return self._sampler


def _nothing(count: int) -> None:
    """Do not count images that are drawn a second time."""


def warn_truncated(prompts: Sequence[str]) -> None:
    """Warn about prompts that are longer than the network can read."""
    for prompt in filter(is_cut, prompts):
        warn(
            f"sample.prompts: {prompt!r:.100} is longer than 64 bytes. It is cut, as captions are."
        )


def drawer_of(
    config: Config, workspace: Workspace, world: World, checkpoint: Checkpoint
) -> Drawer | None:
    """Return a drawer for a checkpoint, or None if its samples are complete.

    Raises Corrupt if the weights are damaged.
    """
    recipe = recipe_on(world.device, config, checkpoint)
    if gather.complete(workspace, recipe, thorough=True):
        return None
    fetched = fetch_weights(workspace, checkpoint, config.sample.ema)
    return Drawer(config, workspace, world, fetched, recipe)


def remove_orphans(workspace: Workspace, steps: list[int]) -> None:
    """Remove the samples of checkpoints that no longer exist and are not selected."""
    for step in workspace.steps(SAMPLES):
        if step not in steps and not workspace.storage.exists(snapshot_key(step)):
            warn(f"Removing the samples of step {step}: its checkpoint no longer exists.")
            workspace.storage.remove(samples_key(step))


def warn_replaced(workspace: Workspace, recipes: Sequence[Recipe]) -> None:
    """Print which finished samples will be replaced."""
    replaced = []
    for recipe in recipes:
        manifest = workspace.read_json(f"{samples_key(recipe.step)}/{MANIFEST}")
        if manifest.get("samples_fingerprint") not in (None, recipe.samples_fingerprint):
            replaced.append(str(recipe.step))
    if replaced:
        warn(
            f"Replacing the samples of step {', '.join(replaced)}, which have different settings "
            "or weights. To keep the scored images, draw others from the registered model, or in a "
            "copy of the workspace (-w)."
        )
