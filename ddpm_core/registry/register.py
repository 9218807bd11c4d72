"""The verb: the checkpoint with the best score becomes a version, and the champion if it may."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddpm_core.checkpoint import Checkpoint, open_checkpoint
from ddpm_core.config import Config, Sample
from ddpm_core.console import say
from ddpm_core.errors import UserError
from ddpm_core.evaluation.evaluate import open_tracker
from ddpm_core.masking import masked, throughout
from ddpm_core.registry.card import as_description, write_card
from ddpm_core.registry.gate import (
    FAULTS,
    Champion,
    Decision,
    Unfit,
    best_of,
    decide,
    failed,
    verdicts,
)
from ddpm_core.registry.models import PROMOTED, Registry, asking, lost, rows_of
from ddpm_core.registry.package import CARD, CHECKPOINT, model_name, upload, write_checkpoint
from ddpm_core.scores import Row, best, must_be_unchanged, read_rows
from ddpm_core.storage.files import Schema, read_tensors
from ddpm_core.storage.staging import named
from ddpm_core.storage.workspace import REGISTERED, RUN, SNAPSHOTS, Workspace, fingerprint
from ddpm_core.tracking.client import transfer_limit, within

KEPT = ("step", "score_name", "score", "evidence", *FAULTS)  # of a row, with a version


class Registered(Schema):
    """What is read of registered.json beside all that the present is compared with."""

    version: str
    promoted: bool


def register(config: Config, workspace: Workspace) -> dict[str, Any]:
    """Make the best checkpoint a version and move the alias if the gate allows it.

    A checkpoint that is registered with the same score and evidence already makes no second
    version. The result is also registered.json. Raises UserError where MLflow is
    away or nothing is scored.
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
    # Images may have been drawn, and scored, before values that are not finite were refused.
    read_tensors(checkpoint.folder / checkpoint.weights_name(sampled(row, checkpoint)["ema"]))
    registry = Registry(config)
    run_id = tracked_run(config, workspace, row)
    before, champion = registry.announced(), registry.champion()
    decision = judge(config, workspace, registry, champion, row)
    version = registry.find(network(row)) or publish(registry, checkpoint, row, run_id)
    while number(now := registry.champion()) != number(champion):  # another was registered
        champion = now
        decision = judge(config, workspace, registry, champion, row)
    decision = denounced(registry, champion, row, decision)
    registry.tag(version, "decision", decision.why)
    for check, found in verdicts(row).items():
        if found not in ("unknown", version.tags.get(check)):  # asked only now
            registry.tag(version, check, found)
    if decision.promote:
        decision = promote(registry, version, decision, row, before)
    record = recorded(registry, version, decision, row)
    record |= {"run_id": run_id, "uri": masked(registry.uri)}
    workspace.write_json(REGISTERED, record)
    say(f"{registry.name} version {version.version}, step {row['step']}. {decision.why}")
    return record


# By the key of a record: what is another one now than when a version was registered.
_DIFFERS = {
    "name": "register.name",
    "alias": "register.alias",
    "uri": "tracking.uri",
    "memorisation": "the verdict on copies of training images",
    "collapse": "the verdict on samples that repeat one another",
}


def stale(config: Config, workspace: Workspace) -> str | None:
    """Why `register` has work to do; None where it is up to date, as far as MLflow answers."""
    if not config.tracking.uri:
        return "tracking.uri is empty, and registered models are kept in MLflow"
    try:
        row = best_row(workspace)
    except UserError as error:
        return str(error)
    wanted = {
        "name": config.registration.name,
        "alias": config.registration.alias,
        "uri": masked(config.tracking.uri),
        **identity(row),
    }
    record = throughout(masked, workspace.read_json(REGISTERED, Registered))
    if not record:
        return "nothing is registered yet"
    differing = [
        _DIFFERS.get(key, "the best checkpoint or its score")
        for key, value in wanted.items()
        if record.get(key) != value
    ]
    told = " and ".join(dict.fromkeys(differing))
    if told:
        return f"{told}: another one now than was registered"
    return lost(config.tracking.uri, record)


def best_row(workspace: Workspace) -> Row:
    """What results.json says of the best checkpoint. Raises UserError for a changed score."""
    results = read_rows(workspace)
    must_be_unchanged(results.rows)
    row = best(results.rows, results.sample)
    if row is None:
        raise UserError(
            f"{workspace.uri} has no checkpoint with a score: run `ddpm evaluate` first."
        )
    return row


def network(row: Row) -> dict[str, str]:
    """What makes two versions the same one: the weights, and what they were measured by."""
    return {
        "weights": str(row["evidence"]["weights"]),
        "score_name": str(row["score_name"]),
        "evidence_key": fingerprint(row.evidence.plain()),
    }


def identity(row: Row) -> dict[str, str]:
    """The same, and the verdicts of the checks: with others there is something to do."""
    return {**network(row), **verdicts(row)}


def tracked_run(config: Config, workspace: Workspace, row: Row) -> str:
    """The MLflow run of the workspace, with all that MLflow lacked of it sent."""
    tracker = open_tracker(config, workspace, row, quiet=True)
    tracker.close()
    if tracker.trouble:
        where = masked(config.tracking.uri)
        raise UserError(f"MLflow at {where} cannot be used: {tracker.trouble}")
    known = workspace.read_json(RUN).get("mlflow", {})
    if masked(str(known.get("uri"))) != masked(config.tracking.uri) or "run_id" not in known:
        raise UserError(f"MLflow at {config.tracking.uri} has no run of this workspace.")
    return str(known["run_id"])


def number(version: Any | None) -> str:
    return "" if version is None else str(version.version)


def judge(
    config: Config, workspace: Workspace, registry: Registry, version: Any | None, row: Row
) -> Decision:
    """Ask the gate about a champion; one that was measured anew keeps that row as a tag."""
    if version is None:
        return decide(row, None, lambda: row)
    whole = registry.has_files(version)
    rows = rows_of(version) if whole else []  # no score counts of what nobody can load
    if not failed(verdicts(row)) and any(network(found) == network(row) for found in rows):
        told = str(version.tags.get("decision", ""))
        moved = "It is the champion: the alias was moved to it."
        return Decision(True, told if told.startswith("Promoted") else moved)

    def measure_anew() -> Row:
        from ddpm_core.registry.rescore import rescore

        if not whole:
            raise Unfit("its files are gone.")
        say(f"register: the champion, version {version.version}, is sampled and scored anew.")
        return rescore(config, workspace, registry.checkpoint(version), row)

    decision = decide(row, Champion(number(version), rows, failed(version.tags)), measure_anew)
    if decision.rescored:
        registry.tag(version, "rescored", json.dumps(short(decision.rescored)))
    return decision


def denounced(registry: Registry, champion: Any | None, row: Row, decision: Decision) -> Decision:
    """The decision; where the champion is the network that has the fault, both say so.

    A network that copies does so however it is sampled; whether samples repeat one another depends
    on the sampler too, so that this is only said of a champion with the same evidence.
    """
    found = verdicts(row)
    check, same = failed(found), network(row)
    if check == "memorisation":
        same = {"weights": same["weights"]}
    if not check or not champion or any(champion.tags.get(key) != same[key] for key in same):
        return decision
    registry.tag(champion, check, found[check])
    told = (
        f"The champion, version {number(champion)}, is the same network: it gives way to the next "
        "that passes this check."
    )
    return replace(decision, why=f"{decision.why} {told}")


def publish(registry: Registry, checkpoint: Checkpoint, row: Row, run_id: str) -> Any:
    """Make a version of the model, and upload it unless an earlier try has.

    Where another process has made one meanwhile, that is the version: of two the older stays.
    """
    # The verdict may change with the champion: it stands in the tags, not in the card.
    card = write_card(registry.name, checkpoint, row)
    name, wanted = model_name(registry.name, checkpoint.step), network(row)
    uri = registry.uploaded(run_id, name, wanted) or packed(registry, checkpoint, row, run_id, card)
    version = registry.find(wanted)
    if version is None:
        tags = version_tags(checkpoint, row)
        made = registry.create(uri, run_id, as_description(card), tags)
        version = registry.find(wanted) or made
        if number(version) != number(made):
            registry.remove(made)
    if version.source != uri and version.source.startswith("models:/"):
        registry.discard(uri)
    return version


def packed(registry: Registry, checkpoint: Checkpoint, row: Row, run_id: str, card: str) -> str:
    """Upload the model with its card; its models:/ URI."""
    with tempfile.TemporaryDirectory(prefix="ddpm-register-") as scratch:
        folder = Path(scratch)
        facts = {"step": checkpoint.step, row["score_name"]: row["score"], **identity(row)}
        with named(folder, folder):
            write_checkpoint(checkpoint, sampled(row, checkpoint), folder / CHECKPOINT)
            (folder / CARD).write_text(card, encoding="utf-8")
            limit = transfer_limit(sum(file.stat().st_size for file in folder.rglob("*")))
            with asking(registry.uri):
                return within(limit, upload, run_id, registry.name, checkpoint.step, folder, facts)


def sampled(row: Row, checkpoint: Checkpoint) -> dict[str, Any]:
    """The fields of params' `sample` that the score was made with."""
    evidence = row["evidence"]
    settings = {k: v for k, v in evidence["sampler"].items() if k in Sample.model_fields}
    return {"ema": checkpoint.params.sample.ema, **settings, "seed": evidence["seed"]}


def version_tags(checkpoint: Checkpoint, row: Row) -> dict[str, str]:
    return {
        "step": str(checkpoint.step),
        row["score_name"]: f"{row['score']:.6g}",
        "data": str(row["evidence"]["data"]),
        **identity(row),
        "row": json.dumps(short(row)),
    }


def short(row: Row) -> dict[str, Any]:
    """What the gate needs of a row."""
    plain = row.plain()
    return {key: plain[key] for key in KEPT if key in plain}


def promote(
    registry: Registry, version: Any, decision: Decision, row: Row, before: dict[str, str]
) -> Decision:
    """Move the alias to a version, or to a better one that others register at the moment.

    `before` are the announcements that were there when the champion was first asked for. MLflow
    moves an alias without asking where it was, so two at once could undo each other's move. Each
    announces its version before it moves the alias, and looks at the others' announcements after
    it: who moves it last sees them all, and leaves it with the best. It can still end with the
    worse one where a process is killed between its move and that look, where another needs longer
    from its announcement to its move than all of this took, and where their scores don't compare.
    """
    registry.announce(version)
    placed = None
    while number(first := best_announced(registry, version, row, before)) != number(placed):
        registry.promote(first)
        placed = first
    if number(placed) == number(version):
        return decision
    why = f"Not promoted: version {number(placed)}, registered at the same time, is better."
    registry.tag(version, "decision", why)
    return Decision(False, why)


def best_announced(registry: Registry, version: Any, row: Row, before: dict[str, str]) -> Any:
    """The best of `version`, measured by `row`, and those that were announced after `before`."""
    there = {number(version): version} | {
        number(other): other
        for other in registry.versions()
        if other.tags.get(PROMOTED) != before.get(number(other))
    }
    rivals = [Champion(one, rows_of(other)) for one, other in there.items()]
    return there[best_of(row, number(version), rivals)]


def recorded(registry: Registry, version: Any, decision: Decision, row: Row) -> dict[str, Any]:
    """What registered.json says of a version."""
    return {
        "name": registry.name,
        "alias": registry.alias,
        "version": number(version),
        "promoted": decision.promote,
        "why": decision.why,
        "step": row["step"],
        "score": row["score"],
        **identity(row),
    }
