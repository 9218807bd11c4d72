"""The verb `register`: turn the best checkpoint into a version, and let the gate decide on it."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddpm_core.checkpoint import Checkpoint, open_checkpoint, with_earlier
from ddpm_core.config import Config
from ddpm_core.console import say
from ddpm_core.errors import Unavailable, UserError
from ddpm_core.evaluation.evaluate import open_tracker
from ddpm_core.evaluation.grids import read_samples
from ddpm_core.interop.diffusers import refusal
from ddpm_core.registry.card import as_description, write_card
from ddpm_core.registry.champion import judge, promote, sample_settings, tag_fault
from ddpm_core.registry.formats import write, write_evidence
from ddpm_core.registry.freshness import Registration, best_row
from ddpm_core.registry.gate import verdicts, version_key
from ddpm_core.registry.models import Registry, compact_json, mlflow_errors, number
from ddpm_core.registry.package import (
    CARD,
    CHECKPOINT,
    DIFFUSERS,
    model_name,
    upload,
    write_checkpoint,
)
from ddpm_core.registry.readme import Model
from ddpm_core.sampling.loading import load_moments
from ddpm_core.scores import Row
from ddpm_core.storage.staging import named
from ddpm_core.storage.workspace import REGISTERED, SNAPSHOTS, Workspace
from ddpm_core.text import masked
from ddpm_core.tracking.client import transfer_timeout, within
from ddpm_core.tracking.record import read_record


def register(config: Config, workspace: Workspace) -> Registration:
    """Make the best checkpoint a version, and move the alias to it if the gate allows it.

    A checkpoint that is already registered with the same score and evidence gets no second
    version. The result is also written to registered.json.

    Raises:
        UserError: MLflow is unavailable, nothing is scored, or the checkpoint has changed since.
    """
    row = best_row(workspace)
    checkpoint = scored_checkpoint(workspace, row)
    registry = Registry(config)
    run_id = tracked_run(config, workspace, row)
    announcements, champion = registry.announcements(), registry.champion()
    # Judge before the upload, which would be in vain if the champion cannot be measured now.
    decision = judge(config, workspace, registry, champion, row)
    version = registry.find(version_key(row))
    if version is None:
        sampled, grid = sample_settings(row, checkpoint), read_samples(workspace, row.step)
        model = Model(registry.name, checkpoint, sampled, row, grid)
        version = publish(registry, model, row, run_id)
    # Another process may have promoted a version meanwhile: judge until the champion stays.
    while number(now := registry.champion()) != number(champion):
        champion = now
        decision = judge(config, workspace, registry, champion, row)
    decision = tag_fault(registry, champion, row, decision)
    registry.tag(version, "decision", decision.why)
    for check, verdict in verdicts(row).items():
        if verdict not in ("unknown", version.tags.get(check)):  # the check was made later
            registry.tag(version, check, verdict)
    if decision.promote:
        # Others may promote a version at this very moment, which the loop above cannot see.
        decision = promote(registry, version, decision, row, announcements)
    registration = Registration(
        name=registry.name,
        alias=registry.alias,
        uri=masked(registry.uri),
        run_id=run_id,
        version=number(version),
        promoted=decision.promote,
        why=decision.why,
        step=row["step"],
        score=row["score"],
        **version_key(row),
        **verdicts(row),
    )
    workspace.write_json(REGISTERED, registration.model_dump())
    say(f"{registry.name} version {version.version}, step {row['step']}. {decision.why}")
    return registration


def scored_checkpoint(workspace: Workspace, row: Row) -> Checkpoint:
    """Return the checkpoint of a row. Raises UserError if it is gone, changed or not finite."""
    step = row.step
    if step not in workspace.steps(SNAPSHOTS):
        raise UserError(
            f"The best checkpoint, step {step}, is gone. `evaluate` skips it.", run=("evaluate",)
        )
    checkpoint = open_checkpoint(workspace, step)
    ema = sample_settings(row, checkpoint)["ema"]
    checkpoint = with_earlier(workspace, checkpoint, ema, fetch=True)
    if row.evidence.weights not in {*checkpoint.checksums.values(), checkpoint.weights_hash(ema)}:
        raise UserError(
            f"The checkpoint of step {step} has changed since it was scored.",
            run=("sample", "evaluate"),
        )
    checkpoint = with_guide(workspace, checkpoint, row)
    # Older versions of this program could sample and score weights that are not finite.
    checkpoint.tensors(ema)
    load_moments(checkpoint)
    return checkpoint


def with_guide(workspace: Workspace, checkpoint: Checkpoint, row: Row) -> Checkpoint:
    """Return the checkpoint with the guide that its samples had, if they had one.

    The guide's weights are registered, too, because the score would not be true without them.
    Raises UserError if they are gone or have changed.
    """
    if row.evidence.guide is None:
        return checkpoint
    step, weights = row.evidence.guide["step"], row.evidence.guide["weights"]
    if step in workspace.steps(SNAPSHOTS):
        ema = sample_settings(row, checkpoint)["ema"]
        guide = with_earlier(workspace, open_checkpoint(workspace, step), ema, fetch=True)
        if guide.weights_hash(ema) == weights:
            return replace(checkpoint, guide=guide)
    raise UserError(
        f"The checkpoint of step {step}, which guided the samples that were scored (sample.guide), "
        "is gone or has changed.",
        run=("sample", "evaluate"),
    )


def tracked_run(config: Config, workspace: Workspace, row: Row) -> str:
    """Send everything to the workspace's MLflow run, and return the ID of that run."""
    tracker = open_tracker(config, workspace, row, quiet=True)
    tracker.close()
    uri = masked(config.tracking.uri)
    if tracker.trouble:
        raise Unavailable(f"MLflow at {uri} is unavailable: {tracker.trouble}")
    record = read_record(workspace)
    if masked(record.uri) != uri or not record.run_id:
        raise UserError(f"MLflow at {uri} has no run of this workspace.")
    return record.run_id


def publish(registry: Registry, model: Model, row: Row, run_id: str) -> Any:
    """Return a new version of the model, uploaded unless an earlier attempt has done that.

    If another process has created a version of the same model meanwhile, the older one stays.
    """
    # The decision may change with the champion, so it becomes a tag and is not on the card.
    card = write_card(registry.name, model.checkpoint, row)
    step, key = model.checkpoint.step, version_key(row)
    uri = registry.uploaded(run_id, model_name(registry.name, step), key)
    uri = uri or _upload(registry, model, row, run_id, card)
    version = registry.find(key)  # another process may have created it during the upload
    if version is None:
        tags = {
            "step": str(step),
            row["score_name"]: f"{row['score']:.6g}",
            "data": row.evidence.data,
            **key,
            **verdicts(row),
            "row": compact_json(row),
        }
        created = registry.create(uri, run_id, as_description(card), tags)
        version = registry.find(key) or created
        if number(version) != number(created):
            registry.remove(created)
    # The other process has uploaded the model too, so this upload is not needed.
    if version.source != uri and version.source.startswith("models:/"):
        registry.discard(uri)
    return version


def _upload(registry: Registry, model: Model, row: Row, run_id: str, card: str) -> str:
    """Upload the model with its card; return its models:/ URI."""
    step = model.checkpoint.step
    params = {"step": step, row["score_name"]: row["score"], **version_key(row), **verdicts(row)}
    with tempfile.TemporaryDirectory(prefix="ddpm-register-") as scratch:
        folder = Path(scratch)
        with named(folder, folder):
            write_checkpoint(model.checkpoint, model.sampled, folder / CHECKPOINT)
            (folder / CARD).write_text(card, encoding="utf-8")
            write_evidence(model, folder)
            _write_for_diffusers(model, folder / DIFFUSERS)
            timeout = transfer_timeout(sum(file.stat().st_size for file in folder.rglob("*")))
            with mlflow_errors(registry.uri):
                return within(timeout, upload, run_id, registry.name, step, folder, params)


def _write_for_diffusers(model: Model, folder: Path) -> None:
    """Write the folder that diffusers loads, or report why diffusers has no such network."""
    checkpoint = model.checkpoint
    if why_not := refusal(checkpoint.network, checkpoint.params.diffusion):
        say(f"register: this version has no folder for diffusers. {why_not}")
    else:
        folder.mkdir()
        write(model, "diffusers", folder)
