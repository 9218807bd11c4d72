"""How `train` is started: alone, as a worker under torchrun, or as several workers at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import typer

from ddpm_core import distributed
from ddpm_core.config import Config
from ddpm_core.errors import Interrupted
from ddpm_core.training.budget import describe
from ddpm_core.training.resume import Policy
from ddpm_core.training.trainer import train as train_here
from ddpm_core.workspace import Workspace


def train(
    config: Config,
    environment: Mapping[str, str],
    arguments: Sequence[str],
    strict: bool = False,
    from_step: int | None = None,
    dry_run: bool = False,
) -> None:
    """Train here if this is a worker or the only one; else start the workers."""
    workspace = Workspace.open(config.workspace)
    count = distributed.processes(config.train.processes, config.device)
    if dry_run:
        typer.echo(describe(config, workspace, count))
        return
    if count > 1 and "WORLD_SIZE" not in environment:
        status = distributed.launch(count, arguments)
        if status:
            raise Interrupted(f"Training by {count} processes ended with status {status}.", status)
        return
    with distributed.world(config.device, environment) as world:
        train_here(config, workspace, world, Policy(strict, from_step))
