"""Check whether the scores are up to date. Reads files only, and imports no torch."""

from __future__ import annotations

from typing import Any

from ddpm_core.config import Config, Evaluate
from ddpm_core.data.dataset import read_manifest
from ddpm_core.errors import UserError
from ddpm_core.evaluation.weights import extractor_name, locate
from ddpm_core.scores import (
    AnyRow,
    Results,
    Unscored,
    is_scored,
    ranked,
    read_results,
    settings_to_rank,
)
from ddpm_core.storage import MANIFEST, sha256_of
from ddpm_core.storage.manifest import Manifest
from ddpm_core.storage.workspace import (
    EVALUATION,
    METRICS,
    REPORT,
    SAMPLES,
    SNAPSHOTS,
    TABLE,
    Workspace,
    fingerprint,
    samples_key,
    snapshot_key,
)
from ddpm_core.text import masked, throughout

RECIPE = 5  # increase it when a change gives the same samples other scores or another verdict
EXTRACTOR = f"{EVALUATION}/extractor"  # the folder of the in-domain extractor
OUTPUTS = (REPORT, TABLE, METRICS)  # files whose sizes are in results.json


def row_key(settings: Evaluate, samples: str, data: str, holdout: str, extractor: str) -> str:
    """Return a fingerprint of everything that a row of scores depends on."""
    facts = [sorted(settings.metrics), settings.neighbours, samples, data, holdout, extractor]
    return fingerprint([RECIPE, *facts])


def sampled(workspace: Workspace) -> list[int]:
    """Return the steps that have samples, complete or not, and a checkpoint."""
    trained = set(workspace.steps(SNAPSHOTS))
    return [step for step in workspace.steps(SAMPLES) if step in trained]


def is_orphaned(workspace: Workspace, step: int) -> bool:
    """Return whether the samples of a step were drawn with other weights than its checkpoint has.

    A run with different settings leaves such samples behind. A score of them would belong to a
    model that no longer exists.
    """
    weights = workspace.read_json(f"{samples_key(step)}/{MANIFEST}").get("weights")
    snapshot = workspace.read_model(f"{snapshot_key(step)}/{MANIFEST}", Manifest)
    if not weights or snapshot is None or not snapshot.files:
        return False
    return all(file.sha256 != weights for file in snapshot.files.values())


def stale(config: Config, workspace: Workspace) -> str | None:
    """Return why `evaluate` must run, or None if its output is up to date."""
    results = read_results(workspace)
    if results is None:
        return "nothing is scored yet"
    damage = _damage(workspace, results)
    if damage:
        return damage
    data = read_manifest(workspace)
    fingerprints = (data.fingerprint, data.holdout_fingerprint) if data else ("", "")
    settings = config.evaluate
    extractor = _extractor(settings, workspace)
    if results.extractor.fingerprint not in ("", extractor):  # "": no checkpoint has a score
        return "the scores use a different extractor"
    rows = {row.step: row for row in results.rows}
    steps = [step for step in sampled(workspace) if not is_orphaned(workspace, step)]
    gone = [step for step, row in rows.items() if row.score is not None and step not in steps]
    if gone:
        return f"the samples or the checkpoint of step {gone[0]} are missing"
    for step in steps:
        samples = workspace.read_json(f"{samples_key(step)}/{MANIFEST}").get("samples_fingerprint")
        row = rows.get(step)
        if samples and (
            row is None or row.get("key") != row_key(settings, samples, *fingerprints, extractor)
        ):
            return _difference(step, row, samples, fingerprints[0], settings, results)
    if _ranking(results, settings_to_rank(config.sample, results)) != _ranking(
        results, results.sample
    ):
        return "the checkpoints are ranked for different settings of sample"
    return None


def _damage(workspace: Workspace, results: Results) -> str | None:
    """Return which file is missing or truncated, or which score was edited."""
    if not results.sizes:
        return "the last evaluation did not finish, or was made by an older version"
    for name in OUTPUTS:
        size = workspace.storage.size(name)
        if size is None:
            return f"{name} is missing"
        if size != results.sizes.get(name):
            return f"{name} has {size} bytes, expected {results.sizes.get(name)}"
    for row in filter(is_scored, results.rows):
        if not row.is_unchanged():
            return f"the score of step {row.step} was edited"
    return None


def _ranking(results: Results, sample: dict[str, Any]) -> list[int]:
    return [row.step for row in ranked(results.rows, sample)]


def _difference(
    step: int,
    row: AnyRow | None,
    samples: str,
    data: str,
    settings: Evaluate,
    results: Results,
) -> str:
    """Return which part of a row's key has changed.

    `samples` and `data` are the present fingerprints of the samples and of the training images.
    """
    if row is None:
        return f"the samples of step {step} are not scored yet"
    if isinstance(row, Unscored):
        return f"step {step} could not be scored"
    now = settings.model_dump(mode="json")
    if throughout(masked, results.settings) != throughout(masked, now):
        return "the settings of evaluate have changed"
    if row.evidence.data != data:
        return "the data have changed"
    if row.evidence.samples != samples:
        return f"the samples of step {step} are new"
    return (
        f"the score of step {step} was measured with different held-out images or by an older "
        "version"
    )


def _extractor(settings: Evaluate, workspace: Workspace) -> str:
    """Return the fingerprint of the extractor that a run would use; "" if there is none yet."""
    if extractor_name(settings) == "in_domain":
        return str(workspace.read_json(f"{EXTRACTOR}/extractor.json").get("sha256", ""))[:16]
    try:
        return sha256_of(locate(settings.inception_weights or "", workspace))[:16]
    except (UserError, OSError):
        return ""
