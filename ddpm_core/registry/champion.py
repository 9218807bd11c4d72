"""The champion on the server: compare it with a candidate, score it again, and replace it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ddpm_core.checkpoint import GUIDE, Checkpoint
from ddpm_core.config import Config, Sample
from ddpm_core.console import progress, say
from ddpm_core.errors import Corrupt, UserError
from ddpm_core.evaluation.scorer import Scorer
from ddpm_core.registry.gate import (
    Champion,
    Decision,
    Unfit,
    best_of,
    decide,
    failed,
    verdicts,
    version_key,
)
from ddpm_core.registry.models import PROMOTED, Registry, compact_json, number, rows_of
from ddpm_core.runtime import memory
from ddpm_core.runtime.device import compiles_sampling, translate_compile_errors
from ddpm_core.sampling.images import Pixels
from ddpm_core.sampling.loading import load_guide, load_moments
from ddpm_core.sampling.sampler import ImageSampler
from ddpm_core.scores import Row
from ddpm_core.storage.workspace import Workspace


def judge(
    config: Config, workspace: Workspace, registry: Registry, version: Any | None, row: Row
) -> Decision:
    """Decide between a candidate's row and the champion, the version `version`.

    If the champion has to be scored again, its new row becomes a tag.
    """
    if version is None:
        return decide(row, None, lambda: row)
    has_files = registry.has_files(version)
    rows = rows_of(version) if has_files else []  # a model that cannot be loaded has no score
    if not failed(verdicts(row)) and any(version_key(old) == version_key(row) for old in rows):
        why = str(version.tags.get("decision", ""))
        by_hand = "It is the champion: the alias was moved to it."
        return Decision(True, why if why.startswith("Promoted") else by_hand)

    def score_again() -> Row:
        if not has_files:
            raise Unfit("its files are gone.")
        say(f"register: sampling and scoring the champion, version {version.version}, again.")
        return rescore(config, workspace, registry.checkpoint(version), row)

    champion = Champion(number(version), rows, failed(version.tags))
    decision = decide(row, champion, score_again)
    if decision.rescored:
        registry.tag(version, "rescored", compact_json(decision.rescored))
    return decision


def tag_fault(registry: Registry, champion: Any | None, row: Row, decision: Decision) -> Decision:
    """Tag the champion with a failed check of the candidate if both are the same network.

    A network that memorises does so with any sampler. A collapse can depend on the sampler, so it
    counts only for a champion with the same evidence.

    Returns:
        The decision, which then also mentions the champion.
    """
    found = verdicts(row)
    check, same = failed(found), version_key(row)
    if check == "memorisation":
        same = {"weights": same["weights"]}
    if not check or not champion or any(champion.tags.get(key) != same[key] for key in same):
        return decision
    registry.tag(champion, check, found[check])
    note = (
        f"The champion, version {number(champion)}, is the same network. The next version that "
        "passes this check replaces it."
    )
    return replace(decision, why=f"{decision.why} {note}")


def promote(
    registry: Registry, version: Any, decision: Decision, row: Row, before: dict[str, str]
) -> Decision:
    """Move the alias to a version, or to a better one that is being registered at the same time.

    MLflow moves an alias without comparing its old value, so two processes could undo each other's
    move. Each therefore announces its version before it moves the alias, and reads the other
    announcements afterwards. The last one to move the alias sees all announcements, and leaves the
    alias with the best version.

    The worse version can still win if a process dies between its move and its look, if another
    process takes longer from its announcement to its move than all of this took, or if the scores
    do not compare.

    Args:
        registry: The registered model.
        version: The version to promote.
        decision: The gate's decision for it.
        row: The measurement of the version.
        before: The announcements that existed when the champion was first read.
    """
    registry.announce(version)
    placed = None
    # Each move can be undone by a process that has not seen it, so look again after each move.
    while number(best := best_announced(registry, version, row, before)) != number(placed):
        registry.promote(best)
        placed = best
    if number(placed) == number(version):
        return decision
    why = f"Not promoted: version {number(placed)}, registered at the same time, is better."
    registry.tag(version, "decision", why)
    return Decision(False, why)


def best_announced(registry: Registry, version: Any, row: Row, before: dict[str, str]) -> Any:
    """Return the best of `version`, measured by `row`, and those announced after `before`."""
    announced = {number(version): version} | {
        number(other): other
        for other in registry.versions()
        if other.tags.get(PROMOTED) != before.get(number(other))
    }
    rivals = [Champion(key, rows_of(other)) for key, other in announced.items()]
    return announced[best_of(row, number(version), rivals)]


def rescore(config: Config, workspace: Workspace, folder: Path, candidate: Row) -> Row:
    """Return the row of the checkpoint in `folder`, measured as `candidate` was.

    Raises:
        Unfit: the checkpoint cannot draw such images.
        UserError: the data, the extractor or the metric are no longer those of the candidate.
    """
    evidence = candidate.evidence
    scorer = Scorer(config, workspace)
    require_equal("data", scorer.train.fingerprint, evidence.data)
    try:
        checkpoint = Checkpoint.open(folder)
    except Corrupt as error:
        raise Unfit(str(error)) from error
    data = checkpoint.training_data
    shape = (data.image_size, data.channels)
    if shape != (scorer.train.image_size, scorer.train.channels):
        raise Unfit(
            f"it draws images of {shape[0]} pixels and {shape[1]} channels, the data have "
            f"{scorer.train.image_size} and {scorer.train.channels}."
        )
    require_equal("extractor", scorer.extractor.fingerprint, evidence.extractor_fingerprint)
    require_equal("score", scorer.score_name(evidence.count), candidate.score_name)
    # The candidate's sampler and seed, with the champion's own weights.
    sampled = {**sample_settings(candidate, checkpoint), "ema": checkpoint.params.sample.ema}
    settings = Sample.model_validate({**config.sample.model_dump(mode="json"), **sampled})
    count = evidence.count
    guide = load_guide(checkpoint, settings.ema, scorer.device) if settings.guide else None
    if settings.guide and guide is None:
        raise Unfit("it was registered without the earlier network that guides the candidate.")
    try:
        sampler = ImageSampler(
            checkpoint.load(settings.ema, scorer.device),
            data,
            settings,
            checkpoint.params.diffusion,
            compiled=compiles_sampling(
                settings.compile, scorer.device, count * settings.evaluations
            ),
            moments=load_moments(checkpoint),
            guide=guide,
        )
    except UserError as error:  # such as a class that the checkpoint does not have
        raise Unfit("; ".join(map(str, error.problems)) or str(error)) from error
    advice = f"sample.batch_size {settings.batch_size}: lower it."
    with memory.translate_errors(advice), translate_compile_errors("sample.compile"):
        images = draw(sampler, count, settings.batch_size)
    # The same data, extractor, sampler and count, so that the scores compare.
    changes = {
        "weights": checkpoint.weights_hash(settings.ema),
        "train": checkpoint.train_fingerprint,
        "samples": None,
        **({"guide": {"weights": checkpoint.checksums[GUIDE]}} if guide else {}),
    }
    measured = scorer.score([images], "the champion")
    return Row(**measured, step=checkpoint.step, evidence=evidence.model_copy(update=changes))


def require_equal(what: str, now: str, scored: str) -> None:
    """Raise UserError if the champion would be measured differently than the candidate was."""
    if now != scored:
        raise UserError(
            f"The {what} is now {now}, but the checkpoints in this workspace were scored with "
            f"{scored}.",
            run=("evaluate",),
        )


def sample_settings(row: Row, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the settings of params' `sample` that the score of a row was measured with."""
    used = {k: v for k, v in row.evidence.sampler.items() if k in Sample.model_fields}
    return {"ema": checkpoint.params.sample.ema, **used, "seed": row.evidence.seed}


def draw(sampler: ImageSampler, count: int, batch_size: int) -> Pixels:
    """Draw the images 0 to `count` - 1, in the same batches as `ddpm sample`.

    Returns:
        uint8 of shape (count, height, width, channels).
    """
    parts = []
    with progress("register: sampling the champion", count, "images") as advance:
        for start in range(0, count, batch_size):
            # A whole batch, then cut: the batch size affects the last bits of an image.
            images = sampler.images(range(start, start + batch_size))[: count - start]
            parts.append(images)
            advance(len(images))
    return np.concatenate(parts)
