"""`ddpm export`: write a model of the workspace or the registry in the format of other programs."""

from __future__ import annotations

from pathlib import Path

from ddpm_core.checkpoint import Checkpoint, open_checkpoint, with_earlier
from ddpm_core.config import Config
from ddpm_core.errors import UserError
from ddpm_core.evaluation.grids import read_samples
from ddpm_core.registry.champion import sample_settings
from ddpm_core.registry.formats import FORMATS, write
from ddpm_core.registry.models import Registry
from ddpm_core.registry.package import CARD
from ddpm_core.registry.readme import Model
from ddpm_core.registry.register import scored_checkpoint
from ddpm_core.scores import Row, best, is_scored, must_be_unchanged, read_rows
from ddpm_core.storage.staging import output_folder
from ddpm_core.storage.workspace import SNAPSHOTS, Workspace


def export(config: Config, output: Path, kind: str, origin: str | None, step: int | None) -> str:
    """Write a model to the folder `output`, and return a message for the user.

    Args:
        config: Its workspace has the model, unless `origin` is given.
        output: Must be new or empty.
        kind: A name in formats.FORMATS.
        origin: models:/NAME/VERSION or models:/NAME@ALIAS, or None.
        step: A checkpoint of the workspace; None: the best one, or without scores the newest.

    Raises:
        UserError: There is no such model, or the format cannot represent it.
    """
    if kind not in FORMATS:
        raise UserError(f"--format: got {kind!r}; must be one of {', '.join(FORMATS)}.")
    if origin is not None and step is not None:
        raise UserError("--step and --model: got both. A version has one step; omit --step.")
    if origin is not None:
        model = registered(config, origin)
    else:
        model = trained(config, Workspace.open(config.workspace), step)
    with output_folder(output) as folder:
        notes = write(model, kind, folder)
    row = model.row
    score = f"{row.score_name} {row.score:.4g}" if row else "these weights have no scores"
    done = f"Exported step {model.checkpoint.step} to {output} as {kind}; {score}."
    return "\n".join([done, *notes, f"Add a license at the top of {output / CARD}."])


def trained(config: Config, workspace: Workspace, step: int | None) -> Model:
    """Return a checkpoint of the workspace, with its scores if they are those of `sample.ema`."""
    steps = workspace.steps(SNAPSHOTS)
    if not steps:
        raise UserError(f"{workspace.uri} has no checkpoint to export.", run=("train",))
    row = _row(workspace, steps, step)
    step = row.step if row else steps[-1] if step is None else step
    ema, name = config.sample.ema, config.registration.name
    checkpoint = open_checkpoint(workspace, step)
    checkpoint = with_earlier(workspace, checkpoint, ema, fetch=True)
    if row is None or row.evidence.weights != checkpoint.weights_hash(ema):
        return Model(name, checkpoint, config.sample.model_dump(mode="json", include={"ema"}))
    checkpoint = scored_checkpoint(workspace, row)
    grid = read_samples(workspace, step)
    return Model(name, checkpoint, sample_settings(row, checkpoint), row, grid)


def _row(workspace: Workspace, steps: list[int], step: int | None) -> Row | None:
    """Return the scores of a checkpoint, by default of the best one."""
    results = read_rows(workspace)
    must_be_unchanged(results.rows)
    scored = [row for row in results.rows if is_scored(row) and row.step in steps]
    if step is None:
        return best(scored, results.sample)
    return next((row for row in scored if row.step == step), None)


def registered(config: Config, origin: str) -> Model:
    """Return a version of a registered model, with its scores and images."""
    registry = Registry(config)
    version = registry.version(origin)
    checkpoint = Checkpoint.open(registry.checkpoint(version))
    row, grid = registry.evidence(version)
    sampled = checkpoint.params.sample.model_dump(mode="json")
    return Model(version.name, checkpoint, sampled, row, grid)
