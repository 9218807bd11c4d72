"""The verb `sample`: images of the chosen checkpoints, in shards that any worker may draw.

A shard is drawn chunk by chunk, each on disk as it is done, so that an interrupted run loses one
at most. When the last shard of a checkpoint is there, they are checked and listed in one manifest.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from ddpm_core.checkpoint import Checkpoint
from ddpm_core.config import Config
from ddpm_core.console import progress, say, warn
from ddpm_core.distributed import World, choose_device
from ddpm_core.errors import UserError
from ddpm_core.generate import gather, plan
from ddpm_core.generate.images import Generator
from ddpm_core.generate.plan import Shard
from ddpm_core.images import Pixels
from ddpm_core.precision import choose
from ddpm_core.storage import Corrupt
from ddpm_core.workspace import SAMPLES, Workspace, samples_key, step_name


def sample(
    config: Config, workspace: Workspace, world: World, shard: tuple[int, int] | None = None
) -> None:
    """Draw what is missing. `shard` (number, of) draws one shard alone, as an independent job."""
    settings = config.sample
    if shard is not None:
        settings = settings.model_copy(update={"shards": shard[1]})
        config = config.model_copy(update={"sample": settings})
    numbers = range(settings.shards) if shard is None else [shard[0]]
    mine = [s for s in plan.shards(settings) if s.number in numbers]
    mine = [s for i, s in enumerate(mine) if i % world.size == world.rank]
    checkpoints = plan.open_chosen(config, workspace)
    precision = choose(settings.precision, world.device)
    work = [(c, plan.recipe(config, c, precision)) for c in checkpoints]
    if shard is None and world.rank == 0:
        forget_others(workspace, [c.step for c in checkpoints])
    total = sum(s.stop - s.start for s in mine) * len(work)
    missing = [(c, r) for c, r in work if not gather.complete(workspace, r)]
    if not missing:
        say(f"sample: up to date, {settings.count} images of each of {len(work)} checkpoints.")
        return
    with progress("sample", total, "images") as advance:
        for checkpoint, recipe in work:
            if (checkpoint, recipe) not in missing:
                advance(sum(s.stop - s.start for s in mine))
                continue
            drawer = Drawer(config, workspace, world, checkpoint, recipe)
            for one in mine:
                drawer.draw(one, lambda n, at=checkpoint.step: advance(n, note=f"step {at}"))
            world.barrier()
            if world.rank == 0:
                gather.try_gather(config, workspace, recipe)


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
        self._workspace = workspace
        self._device = world.device
        self._checkpoint = checkpoint
        self._recipe = recipe
        self._generator: Generator | None = None
        self._folder = samples_key(checkpoint.step)

    def draw(self, shard: Shard, advance: Any) -> None:
        """Put a shard on disk, unless it is there already."""
        if gather.shard_is_whole(self._workspace, self._recipe, shard):
            advance(shard.stop - shard.start)
            return
        place = f"{self._folder}/parts-{self._recipe['samples_fingerprint']}"
        chunks = []
        for number in shard.chunks:
            kept = shard.images(number)
            chunks.append(self._chunk(f"{place}/chunk-{number:06d}.npy", kept))
            advance(len(kept))
        gather.write_shard(self._workspace, self._recipe, shard, chunks)
        for number in shard.chunks:
            self._workspace.storage.remove(f"{place}/chunk-{number:06d}.npy")

    def _chunk(self, key: str, kept: range) -> Pixels:
        """The images of a chunk: from disk if an earlier run drew them."""
        storage = self._workspace.storage
        try:
            there: Pixels = np.load(io.BytesIO(storage.read(key)), allow_pickle=False)
            if len(there) == len(kept):
                return there
        except (OSError, ValueError):
            pass
        size = self._config.sample.batch_size
        images = self._loaded().images(range(kept.start, kept.start + size))[: len(kept)]
        storage.write(key, gather.npy(images))
        return images

    def _loaded(self) -> Generator:
        if self._generator is None:
            model = self._checkpoint.load(self._config.sample.ema, self._device)
            self._generator = Generator(
                model, self._checkpoint.data, self._config.sample, self._checkpoint.params.diffusion
            )
        return self._generator


def forget_others(workspace: Workspace, steps: list[int]) -> None:
    """Remove the samples of checkpoints that are no longer among the chosen ones."""
    for step in workspace.steps(SAMPLES):
        if step not in steps and not workspace.storage.exists(f"snapshots/{step_name(step)}"):
            warn(f"The samples of step {step} are removed: its checkpoint is gone.")
            workspace.storage.remove(samples_key(step))


def stale(config: Config, workspace: Workspace) -> str | None:
    """Why `sample` has work to do; None where it is up to date."""
    try:
        checkpoints = plan.open_chosen(config, workspace)
    except (UserError, Corrupt) as error:
        return str(error)
    precision = choose(config.sample.precision, choose_device(config.device))
    for checkpoint in checkpoints:
        if not gather.complete(workspace, plan.recipe(config, checkpoint, precision)):
            return f"the checkpoint of step {checkpoint.step} has no samples of these settings"
    return None
