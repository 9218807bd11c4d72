"""Whether scores still belong to what lies in the workspace; reads files, loads no network."""

from __future__ import annotations

from typing import Any

from ddpm_core.config import Config, Evaluate
from ddpm_core.errors import UserError
from ddpm_core.evaluation.features import chosen
from ddpm_core.evaluation.rows import Results
from ddpm_core.evaluation.shared import FOLDER
from ddpm_core.evaluation.weights import locate
from ddpm_core.scores import is_as_measured, is_scored, ranked, wanted
from ddpm_core.storage import MANIFEST, sha256_of
from ddpm_core.storage.manifest import Manifest
from ddpm_core.storage.workspace import (
    DATA,
    METRICS,
    REPORT,
    RESULTS,
    SAMPLES,
    SNAPSHOTS,
    TABLE,
    Workspace,
    fingerprint,
    samples_key,
    snapshot_key,
)
from ddpm_core.text import masked, throughout

RECIPE = 5  # raised when the same samples would give other scores, or another verdict


# The files that an evaluation is asked for; their sizes stand in results.json.
OUTPUTS = (REPORT, TABLE, METRICS)


def row_key(settings: Evaluate, samples: str, data: str, holdout: str, extractor: str) -> str:
    """What a row of scores depends on, as one fingerprint."""
    facts = [sorted(settings.metrics), settings.neighbours, samples, data, holdout, extractor]
    return fingerprint([RECIPE, *facts])


def sampled(workspace: Workspace) -> list[int]:
    """The steps that have samples, whole or not, and a checkpoint."""
    trained = set(workspace.steps(SNAPSHOTS))
    return [step for step in workspace.steps(SAMPLES) if step in trained]


def outlived(workspace: Workspace, step: int) -> bool:
    """Whether samples are of weights that the checkpoint of their step does not have.

    A run of other settings leaves such, and nobody could have the model that a score of them means.
    """
    weights = workspace.read_json(f"{samples_key(step)}/{MANIFEST}").get("weights")
    files = workspace.read_json(f"{snapshot_key(step)}/{MANIFEST}", Manifest).get("files", {})
    return bool(weights and files) and all(file["sha256"] != weights for file in files.values())


def stale(config: Config, workspace: Workspace) -> str | None:
    """Why `evaluate` has work to do; None where it is up to date."""
    results = workspace.read_json(RESULTS, Results)
    if not results.get("rows"):
        return "nothing is scored yet"
    damage = _damage(workspace, results)
    if damage:
        return damage
    data = workspace.read_json(f"{DATA}/{MANIFEST}")
    settings = config.evaluate
    extractor = _extractor(settings, workspace)
    if results["extractor"]["fingerprint"] not in ("", extractor):  # "": nothing has a score
        return "the scores are of another extractor"
    rows = {int(row["step"]): row for row in results["rows"]}
    there = [step for step in sampled(workspace) if not outlived(workspace, step)]
    gone = [
        step for step, row in rows.items() if row.get("score") is not None and step not in there
    ]
    if gone:
        return f"the samples of step {gone[0]}, or their checkpoint, are gone"
    fixed = (data.get("fingerprint", ""), data.get("holdout_fingerprint", ""), extractor)
    for step in there:
        samples = workspace.read_json(f"{samples_key(step)}/{MANIFEST}").get("samples_fingerprint")
        if samples and rows.get(step, {}).get("key") != row_key(settings, samples, *fixed):
            return _difference(step, rows.get(step), samples, data, settings, results)
    if _listed(results, wanted(config.sample, results)) != _listed(results, results.get("sample")):
        return "the checkpoints are ranked for other settings of sample"
    return None


def _damage(workspace: Workspace, results: dict[str, Any]) -> str | None:
    """Which file is absent or cut, or whose score was changed since it was written."""
    sizes = results.get("sizes")
    if not sizes:
        return "the last evaluation did not end, or was of an older version"
    for name in OUTPUTS:
        size = workspace.storage.size(name)
        if size is None:
            return f"{name} is missing"
        if size != sizes.get(name):
            return f"{name} has {size} bytes; {sizes.get(name)} were written"
    changed = [r for r in results["rows"] if is_scored(r) and not is_as_measured(r)]
    return f"the score of step {changed[0]['step']} was changed" if changed else None


def _listed(results: dict[str, Any], sample: dict[str, Any] | None) -> list[int]:
    return [int(row["step"]) for row in ranked(results["rows"], sample or {})]


def _difference(
    step: int,
    row: dict[str, Any] | None,
    samples: str,
    data: dict[str, Any],
    settings: Evaluate,
    results: dict[str, Any],
) -> str:
    """Which part of a row's key has changed."""
    if row is None:
        return f"the samples of step {step} are not scored yet"
    if row.get("problem"):
        return f"step {step} could not be scored"
    before, now = results.get("settings"), settings.model_dump(mode="json")
    if throughout(masked, before) != throughout(masked, now):
        return "the settings of evaluate have changed"
    if row["evidence"].get("data") != data.get("fingerprint"):
        return "the data have changed"
    if row["evidence"].get("samples") != samples:
        return f"the samples of step {step} are new"
    return f"the score of step {step} is of other held-out images or of an older version"


def _extractor(settings: Evaluate, workspace: Workspace) -> str:
    """The fingerprint of the extractor that would be used; "" where there is none yet."""
    if chosen(settings) == "in_domain":
        return str(workspace.read_json(f"{FOLDER}/extractor.json").get("sha256", ""))[:16]
    try:
        return sha256_of(locate(settings.inception_weights or "", workspace))[:16]
    except (UserError, OSError):
        return ""
