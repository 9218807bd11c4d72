"""Whether the samples are up to date. Also works where PyTorch is not installed."""

from __future__ import annotations

import functools
import itertools
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ddpm_core.checkpoint import Checkpoint, check_weights
from ddpm_core.config import Config
from ddpm_core.errors import UserError
from ddpm_core.sampling import gather, plan
from ddpm_core.sampling.plan import Recipe
from ddpm_core.sampling.shards import ShardStore
from ddpm_core.storage.workspace import Workspace

if TYPE_CHECKING:
    import torch


def recipe_on(device: torch.device, config: Config, checkpoint: Checkpoint) -> Recipe:
    """Return the recipe of a checkpoint's images on this device."""
    from ddpm_core.runtime.device import choose_precision, compiles_sampling

    settings = config.sample
    precision = choose_precision(settings.precision, device)
    # Compiling changes the rounding, so the decision depends on the whole run, not on a shard.
    compiled = compiles_sampling(settings.compile, device, settings.count * settings.evaluations)
    return plan.make_recipe(config, checkpoint, precision, compiled)


def expected_recipe(config: Config, workspace: Workspace, checkpoint: Checkpoint) -> Recipe:
    """Return the recipe of a checkpoint's images on the device of this process.

    Without PyTorch, as in the light image, other pods draw, and their device is unknown. Then the
    recipe is one that some device would have: of these, the one with the most shards in the
    workspace.

    Raises:
        UserError: the device of the settings does not exist.
    """
    if find_spec("torch"):
        from ddpm_core.runtime.device import choose_device

        return recipe_on(choose_device(config.device), config, checkpoint)

    def found(recipe: Recipe) -> tuple[bool, int]:
        store = ShardStore(workspace, recipe)
        finished = [shard for shard in plan.shards(config.sample) if not store.problem(shard)]
        return gather.complete(workspace, recipe), len(finished)

    settings = config.sample
    precisions = ["fp32", "bf16"] if settings.precision == "auto" else [settings.precision]
    compiled = [False, True] if settings.compile == "auto" else [bool(settings.compile)]
    choices = itertools.product(precisions, compiled)
    return max((plan.make_recipe(config, checkpoint, *choice) for choice in choices), key=found)


def stale(config: Config, workspace: Workspace) -> str | None:
    """Return why `sample` has work to do, or None if it is up to date."""
    try:
        checkpoints = plan.look_at_chosen(config, workspace)
        attempts = (functools.partial(_stale, config, workspace, c) for c in checkpoints)
        return next(filter(None, plan.intact(config, attempts)), None)
    except UserError as error:
        return str(error)


def _stale(config: Config, workspace: Workspace, checkpoint: Checkpoint) -> str:
    """Return what is missing for one checkpoint, or "". Raises Corrupt if it cannot be drawn."""
    recipe = expected_recipe(config, workspace, checkpoint)
    if gather.complete(workspace, recipe):
        return ""
    check_weights(workspace, checkpoint, config.sample.ema)
    return f"step {checkpoint.step}: {_missing(config, workspace, recipe)}"


def _missing(config: Config, workspace: Workspace, recipe: Recipe) -> str:
    """Return what is missing, for the number of shards with the fewest missing ones.

    Jobs may have started with another number of shards than the settings have.
    """
    counts = ShardStore(workspace, recipe).counts()
    candidates = []
    for of in counts:
        settings = config.sample.model_copy(update={"shards": of})
        candidates.append(gather.waiting(workspace, recipe, plan.shards(settings)))
    if not counts:
        return "no samples with these settings"
    missing = min(candidates, key=len)
    if not missing:
        return "the shards are complete, but not gathered"
    return f"missing {missing}"
