"""The verb `register`: turn the best checkpoint into a version, and let the gate decide on it."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from ddpm_core.checkpoint import Checkpoint, open_checkpoint
from ddpm_core.config import Config
from ddpm_core.console import say
from ddpm_core.errors import UserError
from ddpm_core.evaluation.evaluate import open_tracker
from ddpm_core.registry.card import as_description, write_card
from ddpm_core.registry.champion import judge, promote, sample_settings, tag_fault
from ddpm_core.registry.gate import verdicts, version_key
from ddpm_core.registry.models import Registry, compact_json, missing, mlflow_errors, number
from ddpm_core.registry.package import CARD, CHECKPOINT, model_name, upload, write_checkpoint
from ddpm_core.scores import Row, best, must_be_unchanged, read_rows
from ddpm_core.storage.files import Count, Schema, read_tensors
from ddpm_core.storage.staging import named
from ddpm_core.storage.workspace import REGISTERED, SNAPSHOTS, Workspace
from ddpm_core.text import masked, throughout
from ddpm_core.tracking.client import transfer_timeout, within
from ddpm_core.tracking.record import read_record


class Registration(Schema):
    """What registered.json says of a version. A file of an older version may have fewer fields."""

    model_config = ConfigDict(frozen=True)

    version: str
    promoted: bool
    why: str = ""
    name: str = ""
    alias: str = ""
    uri: str = ""  # of MLflow, without passwords
    run_id: str = ""
    step: Count = 0
    score: float = 0.0
    # As in gate.version_key and gate.verdicts.
    weights: str = ""
    score_name: str = ""
    evidence_key: str = ""
    memorisation: str = ""
    collapse: str = ""


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
    version = registry.find(version_key(row)) or publish(registry, checkpoint, row, run_id)
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


# What a difference in these fields of registered.json means. Any other one is the score.
_MEANINGS = {
    "name": "register.name",
    "alias": "register.alias",
    "uri": "tracking.uri",
    "memorisation": "the verdict on copies of training images",
    "collapse": "the verdict on repeated samples",
}


def stale(config: Config, workspace: Workspace) -> str | None:
    """Return why `register` has work to do, or None if it is up to date.

    If MLflow is unavailable, registered.json alone decides.
    """
    if not config.tracking.uri:
        return "tracking.uri is empty, but registered models are stored in MLflow"
    try:
        row = best_row(workspace)
    except UserError as error:
        return str(error)
    registration = read_registration(workspace)
    if registration is None:
        return "nothing is registered yet"
    current = {
        "name": config.registration.name,
        "alias": config.registration.alias,
        "uri": masked(config.tracking.uri),
        **version_key(row),
        **verdicts(row),
    }
    changes = [
        _MEANINGS.get(key, "the best checkpoint or its score")
        for key, value in current.items()
        if getattr(registration, key) != value
    ]
    if changes:
        return f"changed since the last registration: {', '.join(dict.fromkeys(changes))}"
    return missing(
        config.tracking.uri,
        registration.name,
        registration.version,
        registration.weights,
        registration.alias if registration.promoted else None,
    )


def read_registration(workspace: Workspace) -> Registration | None:
    """Return the content of registered.json, or None if it is missing or invalid."""
    record = workspace.read_json(REGISTERED, Registration)
    return Registration.model_validate(throughout(masked, record)) if record else None


def best_row(workspace: Workspace) -> Row:
    """Return the row of the best checkpoint in results.json.

    Raises:
        UserError: there is none, or a score was changed.
    """
    results = read_rows(workspace)
    must_be_unchanged(results.rows)
    row = best(results.rows, results.sample)
    if row is None:
        raise UserError(
            f"{workspace.uri} has no checkpoint with a score. Run `ddpm evaluate` first."
        )
    return row


def scored_checkpoint(workspace: Workspace, row: Row) -> Checkpoint:
    """Return the checkpoint of a row. Raises UserError if it is gone, changed or not finite."""
    step = int(row["step"])
    if step not in workspace.steps(SNAPSHOTS):
        raise UserError(
            f"The best checkpoint, step {step}, is gone. Run `ddpm evaluate` first, which skips it."
        )
    checkpoint = open_checkpoint(workspace, step)
    if row["evidence"]["weights"] not in checkpoint.checksums.values():
        raise UserError(
            f"The checkpoint of step {step} has changed since it was scored. Run `ddpm sample` "
            "and `ddpm evaluate` first."
        )
    checkpoint = with_guide(workspace, checkpoint, row)
    # Older versions of this program could sample and score weights that are not finite.
    read_tensors(
        checkpoint.folder / checkpoint.weights_name(sample_settings(row, checkpoint)["ema"])
    )
    checkpoint.moments()
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
        guide = open_checkpoint(workspace, step)
        ema = sample_settings(row, checkpoint)["ema"]
        if guide.weights_hash(ema) == weights:
            return replace(checkpoint, guide=guide)
    raise UserError(
        f"The checkpoint of step {step}, which guided the samples that were scored (sample.guide), "
        "is gone or has changed. Run `ddpm sample` and `ddpm evaluate` first."
    )


def tracked_run(config: Config, workspace: Workspace, row: Row) -> str:
    """Send everything to the workspace's MLflow run, and return the ID of that run."""
    tracker = open_tracker(config, workspace, row, quiet=True)
    tracker.close()
    uri = masked(config.tracking.uri)
    if tracker.trouble:
        raise UserError(f"MLflow at {uri} is unavailable: {tracker.trouble}")
    record = read_record(workspace)
    if masked(record.uri) != uri or not record.run_id:
        raise UserError(f"MLflow at {uri} has no run of this workspace.")
    return record.run_id


def publish(registry: Registry, checkpoint: Checkpoint, row: Row, run_id: str) -> Any:
    """Return a new version of the model, uploaded unless an earlier attempt has done that.

    If another process has created a version of the same model meanwhile, the older one stays.
    """
    # The decision may change with the champion, so it becomes a tag and is not on the card.
    card = write_card(registry.name, checkpoint, row)
    name, key = model_name(registry.name, checkpoint.step), version_key(row)
    uri = registry.uploaded(run_id, name, key) or _upload(registry, checkpoint, row, run_id, card)
    version = registry.find(key)  # another process may have created it during the upload
    if version is None:
        tags = {
            "step": str(checkpoint.step),
            row["score_name"]: f"{row['score']:.6g}",
            "data": str(row["evidence"]["data"]),
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


def _upload(registry: Registry, checkpoint: Checkpoint, row: Row, run_id: str, card: str) -> str:
    """Upload the model with its card; return its models:/ URI."""
    params = {
        "step": checkpoint.step,
        row["score_name"]: row["score"],
        **version_key(row),
        **verdicts(row),
    }
    with tempfile.TemporaryDirectory(prefix="ddpm-register-") as scratch:
        folder = Path(scratch)
        with named(folder, folder):
            write_checkpoint(checkpoint, sample_settings(row, checkpoint), folder / CHECKPOINT)
            (folder / CARD).write_text(card, encoding="utf-8")
            timeout = transfer_timeout(sum(file.stat().st_size for file in folder.rglob("*")))
            with mlflow_errors(registry.uri):
                name, step = registry.name, checkpoint.step
                return within(timeout, upload, run_id, name, step, folder, params)
