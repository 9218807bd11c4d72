"""The verb: the checkpoint with the best score becomes a version, and the champion if it may."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from ddpm_core.checkpoint import Checkpoint, open_checkpoint
from ddpm_core.config import Config, Sample
from ddpm_core.console import say
from ddpm_core.errors import UserError
from ddpm_core.evaluation.rows import Rows, best, differences
from ddpm_core.mlflow_run import shown
from ddpm_core.registry.card import write_card
from ddpm_core.registry.gate import Champion, Decision, decide
from ddpm_core.registry.models import Registry, asking, decision_of, row_of
from ddpm_core.registry.package import CARD, CHECKPOINT, evidence_key, upload, write_checkpoint
from ddpm_core.tracking import Tracker
from ddpm_core.workspace import EVALUATION, REGISTERED, RUN, SNAPSHOTS, Workspace

Row = dict[str, Any]
RESULTS = f"{EVALUATION}/results.json"
KEPT = ("step", "score_name", "score", "evidence", "memorisation")  # of a row, with a version


def register(config: Config, workspace: Workspace) -> dict[str, Any]:
    """Make the best checkpoint a version and move the alias if the gate allows it.

    A checkpoint that is registered with the same score and evidence already makes no second
    version. The result is also registered.json. Raises UserError where MLflow is away or nothing
    is scored.
    """
    row = best_row(workspace)
    if row["step"] not in workspace.steps(SNAPSHOTS):
        raise UserError(
            f"The best checkpoint, step {row['step']}, is gone: run `ddpm evaluate` first, which "
            "leaves it out."
        )
    checkpoint = open_checkpoint(workspace, int(row["step"]))
    if row["evidence"]["weights"] not in checkpoint.checksums.values():
        raise UserError(
            f"The checkpoint of step {row['step']} has changed since it was scored: run "
            "`ddpm sample` and `ddpm evaluate` first."
        )
    registry = Registry(config)
    run_id = tracked_run(config, workspace)
    with asking(registry.uri):
        decision = judge(config, workspace, registry, row)
        version = registry.find(identity(row))
        if version is None:
            version = publish(registry, checkpoint, row, decision, run_id)
        record = conclude(registry, version, decision, row)
    record |= {"run_id": run_id, "uri": registry.uri}
    workspace.write_json(REGISTERED, record)
    say(f"{registry.name} version {version.version}, step {row['step']}. {decision.why}")
    return record


def stale(config: Config, workspace: Workspace) -> str | None:
    """Why `register` has work to do; None where it is up to date."""
    try:
        row = best_row(workspace)
    except UserError as error:
        return str(error)
    wanted = {
        "name": config.registration.name,
        "alias": config.registration.alias,
        "uri": config.tracking.uri,
        **identity(row),
    }
    record = workspace.read_json(REGISTERED)
    if not record:
        return "nothing is registered yet"
    differing = [key for key, value in wanted.items() if record.get(key) != value]
    return f"what is registered differs in {', '.join(differing)}" if differing else None


def best_row(workspace: Workspace) -> Row:
    """What results.json says of the best checkpoint."""
    results = workspace.read_json(RESULTS, Rows)
    row = best(results.get("rows", []), results.get("sample", {}))
    if row is None:
        raise UserError(
            f"{workspace.uri} has no checkpoint with a score: run `ddpm evaluate` first."
        )
    return row


def identity(row: Row) -> dict[str, str]:
    """What makes two versions the same one: the weights, and what they were measured by."""
    return {
        "weights": str(row["evidence"]["weights"]),
        "score_name": str(row["score_name"]),
        "evidence_key": evidence_key(row["evidence"]),
    }


def tracked_run(config: Config, workspace: Workspace) -> str:
    """The MLflow run of the workspace, with all that MLflow lacked of it sent."""
    Tracker.open(config, workspace).close()
    known = workspace.read_json(RUN).get("mlflow", {})
    if known.get("uri") != config.tracking.uri or "run_id" not in known:
        raise UserError(f"MLflow at {shown(config.tracking.uri)} has no run of this workspace.")
    return str(known["run_id"])


def judge(config: Config, workspace: Workspace, registry: Registry, row: Row) -> Decision:
    """Ask the gate; a champion that was measured anew keeps that row as a tag."""
    version = registry.champion()
    if version is None:
        return decide(row, None, differences, dict)
    rows = [found for key in ("rescored", "row") if (found := row_of(version, key))]
    if any(identity(found) == identity(row) for found in rows):
        return Decision(True, decision_of(version) or "It is the champion.")

    def measure_anew() -> Row:
        from ddpm_core.registry.rescore import rescore

        say(f"register: the champion, version {version.version}, is sampled and scored anew.")
        return rescore(config, workspace, registry.checkpoint(version), row)

    decision = decide(row, Champion(version.version, list(rows)), differences, measure_anew)
    if decision.rescored:
        registry.tag(version, "rescored", json.dumps(short(decision.rescored)))
    return decision


def publish(
    registry: Registry, checkpoint: Checkpoint, row: Row, decision: Decision, run_id: str
) -> Any:
    """Upload the model and make a version of it."""
    with tempfile.TemporaryDirectory(prefix="ddpm-register-") as scratch:
        folder = Path(scratch)
        write_checkpoint(checkpoint, sampled(row, checkpoint), folder / CHECKPOINT)
        # The verdict may change with the champion: it stands in the tags, not in the card.
        card = write_card(registry.name, checkpoint, row)
        (folder / CARD).write_text(card, encoding="utf-8")
        facts = {"step": checkpoint.step, row["score_name"]: row["score"], **identity(row)}
        uri = upload(run_id, registry.name, checkpoint.step, folder, facts)
    return registry.create(uri, run_id, card, version_tags(checkpoint, row))


def sampled(row: Row, checkpoint: Checkpoint) -> dict[str, Any]:
    """The fields of params' `sample` that the score was made with."""
    evidence = row["evidence"]
    settings = {k: v for k, v in evidence["sampler"].items() if k in Sample.model_fields}
    return {"ema": checkpoint.params.sample.ema, **settings, "seed": evidence["seed"]}


def version_tags(checkpoint: Checkpoint, row: Row) -> dict[str, str]:
    return {
        "step": str(checkpoint.step),
        row["score_name"]: f"{row['score']:.6g}",
        "memorisation": str((row.get("memorisation") or {}).get("verdict", "unknown")),
        "data": str(row["evidence"]["data"]),
        **identity(row),
        "row": json.dumps(short(row)),
    }


def short(row: Row) -> Row:
    """What the gate needs of a row."""
    return {key: row[key] for key in KEPT if key in row}


def conclude(registry: Registry, version: Any, decision: Decision, row: Row) -> dict[str, Any]:
    """Tell the version the decision and move the alias; the record of it."""
    registry.tag(version, "decision", decision.why)
    if decision.promote:
        registry.promote(version)
    return {
        "name": registry.name,
        "alias": registry.alias,
        "version": str(version.version),
        "promoted": decision.promote,
        "why": decision.why,
        "step": row["step"],
        "score": row["score"],
        **identity(row),
    }
