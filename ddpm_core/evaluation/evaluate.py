"""The verb evaluate: a row of scores for every sampled checkpoint, then tables, plots and report.

A row is kept as soon as it is measured and used again while the samples, the data, the extractor
and the settings are the same, so an interrupted run goes on where it stopped.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ddpm_core.config import Config
from ddpm_core.console import say, warn
from ddpm_core.errors import UserError, require
from ddpm_core.evaluation import memorisation, pictures
from ddpm_core.evaluation.freshness import outlived, row_key, sampled
from ddpm_core.evaluation.metrics import SMALL
from ddpm_core.evaluation.outputs import write_outputs
from ddpm_core.evaluation.rows import evidence, problem_row
from ddpm_core.evaluation.scorer import Scorer
from ddpm_core.generate.gather import Samples, open_samples
from ddpm_core.generate.plan import chosen_steps
from ddpm_core.ranking import Row, Scored, is_scored
from ddpm_core.storage import MANIFEST
from ddpm_core.workspace import EVALUATION, SAMPLES, Workspace, samples_key, step_name

ROWS = f"{EVALUATION}/rows"


def evaluate(config: Config, workspace: Workspace) -> list[Row]:
    """Score what is not scored yet, and write all files; the rows, by step.

    A checkpoint without whole samples becomes a row with the problem; samples without a checkpoint
    are left out. Raises UserError where no checkpoint can be scored.
    """
    if not sampled(workspace):
        raise UserError(
            f"There are no samples in {workspace.uri} of a checkpoint that is there: run "
            "`ddpm sample` first."
        )
    for package in ("jinja2", "matplotlib", "torch_fidelity"):  # before a classifier is trained
        require(package, "eval")
    scorer = Scorer(config, workspace)
    rows, new = [], []
    for step in _steps(config, workspace):
        row = _kept(scorer, workspace, step)
        if row is None:
            row = _row(scorer, workspace, step)
            new.append(row)
            workspace.write_json(f"{ROWS}/{step_name(step)}.json", row)
        rows.append(row)
    first = write_outputs(config, workspace, scorer, rows)
    _tell(rows, new, first)
    _track(config, workspace, [row for row in new if is_scored(row)])
    if not any(map(is_scored, rows)):
        raise UserError(
            f"No checkpoint could be scored. Step {rows[0]['step']}: {rows[0]['problem']}"
        )
    return rows


def _steps(config: Config, workspace: Workspace) -> list[int]:
    """Sampled checkpoints, and those that `sample.checkpoints` says should have been."""
    named = config.sample.checkpoints
    if isinstance(named, tuple):
        expected = set(named)
    else:  # which one is best is found out here
        expected = set() if named == "best" else set(chosen_steps(config, workspace))
    there = sampled(workspace)
    for step in set(workspace.steps(SAMPLES)) - set(there):
        warn(f"The samples of step {step} are left out: its checkpoint is gone.")
    return sorted(expected.union(there))


def _kept(scorer: Scorer, workspace: Workspace, step: int) -> Row | None:
    """The row of an earlier run, if nothing that it depends on has changed."""
    row = workspace.read_json(f"{ROWS}/{step_name(step)}.json", Scored)
    samples = workspace.read_json(f"{samples_key(step)}/{MANIFEST}")
    if not is_scored(row) or "samples_fingerprint" not in samples or outlived(workspace, step):
        return None
    return row if row.get("key") == _key(scorer, samples) else None


def _key(scorer: Scorer, samples: dict[str, Any]) -> str:
    return row_key(
        scorer.settings,
        samples["samples_fingerprint"],
        scorer.train.fingerprint,
        scorer.holdout.fingerprint,
        scorer.extractor.fingerprint,
    )


def _row(scorer: Scorer, workspace: Workspace, step: int) -> Row:
    try:
        samples = _opened(workspace, step)
        _must_fit(samples, scorer)
        return _scored(scorer, workspace, step, samples)
    except UserError as error:
        return problem_row(step, str(error))


def _opened(workspace: Workspace, step: int) -> Samples:
    """Samples that are whole. Raises UserError, also for a manifest that is none."""
    if outlived(workspace, step):
        raise UserError(
            f"Its samples are of weights that it does not have: run `ddpm sample`, or remove "
            f"{samples_key(step)}."
        )
    try:
        return open_samples(workspace, step)
    except (KeyError, ValueError, TypeError, AttributeError, OSError) as error:
        raise UserError(f"Its samples cannot be read: {error!r}.") from error


def _must_fit(samples: Samples, scorer: Scorer) -> None:
    """Raise UserError for samples of other data, or of another shape, than the prepared ones."""
    theirs, ours = samples.evidence["data_fingerprint"], scorer.train.fingerprint
    if theirs != ours:
        raise UserError(
            f"Its samples are of a network trained on the data {theirs}; the prepared data are "
            f"{ours}. Train and sample again, or prepare those data."
        )
    shape = (scorer.train.image_size, scorer.train.image_size, scorer.train.channels)
    for shard in samples.shards:
        if shard.dtype != np.uint8 or shard.shape[1:] != shape:
            raise UserError(
                f"Its samples are {shard.dtype} of {shard.shape[1:]}; the prepared images are "
                f"uint8 of {shape}."
            )


def _scored(scorer: Scorer, workspace: Workspace, step: int, samples: Samples) -> Row:
    scores = scorer.score(samples.shards, f"step {step}")
    first = _first(samples, memorisation.EXAMINED)
    pictures.write_grid(workspace, step, first)
    memory = None
    if scorer.remembers:
        memory, found = scorer.memorisation(first)
        pictures.write_neighbours(workspace, f"{step:08d}", first, found, scorer.train)
    return {
        "step": step,
        **scores,
        "memorisation": memory,
        "evidence": evidence(
            samples.evidence,
            scorer.train.fingerprint,
            scorer.holdout.fingerprint,
            len(scorer.train),
            scorer.extractor,
        ),
        "problem": None,
        "key": _key(scorer, samples.evidence),
    }


def _first(samples: Samples, most: int) -> Any:
    parts, left = [], most
    for shard in samples.shards:
        parts.append(np.asarray(shard[:left]))
        left -= len(parts[-1])
    return np.concatenate(parts)


def _tell(rows: list[Row], new: list[Row], first: Row | None) -> None:
    for row in rows:
        if row["problem"]:
            warn(f"step {row['step']} is not scored: {row['problem']}")
    counts = [row["evidence"]["count"] for row in new if is_scored(row)]
    if counts and min(counts) < SMALL:
        warn(
            f"The distances are of {min(counts)} images. Below {SMALL:,} they are too high by an "
            "amount that depends on their number: compare them with equal numbers alone."
        )
    if first:
        name, score = first["score_name"], first["score"]
        say(f"evaluate: the best is step {first['step']}, {name} = {score:.4g}.")


def _track(config: Config, workspace: Workspace, rows: list[Row]) -> None:
    """Tell MLflow of new scores and of the report, which has them."""
    if not rows:
        return
    from ddpm_core.evaluation.mlflow_log import open_tracker, tell

    tracker = open_tracker(config, workspace, rows[-1])
    tell(tracker, workspace)
    tracker.close()
