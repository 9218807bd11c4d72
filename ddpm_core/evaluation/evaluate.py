"""The verb evaluate: a row of scores for every sampled checkpoint, then tables, plots and report.

A row is kept as soon as it is measured and used again while the samples, the data, the extractor
and the settings are the same, so an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import errno
from typing import Any

import numpy as np

from ddpm_core.config import Config
from ddpm_core.console import say, warn
from ddpm_core.errors import Corrupt, UserError, require
from ddpm_core.evaluation import memorisation, pictures, verdict
from ddpm_core.evaluation.freshness import outlived, row_key, sampled
from ddpm_core.evaluation.metrics import SMALL
from ddpm_core.evaluation.outputs import write_outputs
from ddpm_core.evaluation.rows import evidence, problem_row
from ddpm_core.evaluation.scorer import Scorer
from ddpm_core.runtime import memory
from ddpm_core.sampling.gather import Samples, open_samples
from ddpm_core.sampling.plan import chosen_steps
from ddpm_core.scores import Row, Scored, is_as_measured, is_scored, with_checksum
from ddpm_core.storage import MANIFEST
from ddpm_core.storage.workspace import EVALUATION, SAMPLES, Workspace, samples_key, step_name
from ddpm_core.text import counted

ROWS = f"{EVALUATION}/rows"
MADE_UP = (KeyError, ValueError, TypeError, AttributeError)  # what a manifest from a stranger does
PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EIO)


class Unscorable(Exception):
    """Samples that cannot be scored as they are, and why."""


def evaluate(config: Config, workspace: Workspace) -> list[Row]:
    """Score what is not scored yet, and write all files; the rows, by step.

    A checkpoint without whole samples becomes a row with the problem; samples without a checkpoint
    are left out. Raises UserError where no checkpoint can be scored.
    """
    workspace.storage.sweep_staged()
    if not sampled(workspace):
        raise UserError(
            f"There are no samples in {workspace.uri} of a checkpoint that is there: run "
            "`ddpm sample` first."
        )
    for package in ("jinja2", "matplotlib", "torch_fidelity"):  # before a classifier is trained
        require(package, "eval")
    with memory.translate_errors(_advice(config)):
        return _evaluated(config, workspace)


def _advice(config: Config) -> str:
    settings = config.evaluate
    return (
        f"evaluate.metrics {list(settings.metrics)}: leave out prdc, which takes the most, then "
        f"kid and memorisation, or lower sample.count ({config.sample.count:,})."
    )


def _evaluated(config: Config, workspace: Workspace) -> list[Row]:
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
    return row if row.get("key") == _key(scorer, samples) and is_as_measured(row) else None


def _key(scorer: Scorer, samples: dict[str, Any]) -> str:
    return row_key(
        scorer.settings,
        samples["samples_fingerprint"],
        scorer.train.fingerprint,
        scorer.holdout.fingerprint,
        scorer.extractor.fingerprint,
    )


def _row(scorer: Scorer, workspace: Workspace, step: int) -> Row:
    """A new row: what is wrong with the samples is its problem, all other trouble ends the run."""
    try:
        samples = _opened(workspace, step)
        _must_fit(samples, scorer)
    except Unscorable as error:
        return problem_row(step, str(error))
    return _scored(scorer, workspace, step, samples)


def _opened(workspace: Workspace, step: int) -> Samples:
    """Samples that are whole. Raises Unscorable, also for a manifest that is none.

    A server that does not answer or a full disk says nothing of the samples: that is raised as it
    is, so that a checkpoint is not left out of the ranking for it.
    """
    if outlived(workspace, step):
        raise Unscorable(
            f"Its samples are of weights that it does not have: run `ddpm sample`, or remove "
            f"{samples_key(step)}."
        )
    try:
        return open_samples(workspace, step)
    except Corrupt as error:
        if getattr(error.__cause__, "errno", None) in PASSING:
            raise
        raise Unscorable(str(error)) from error
    except (*MADE_UP, FileNotFoundError, NotADirectoryError) as error:
        raise Unscorable(f"Its samples cannot be read: {error!r}.") from error


def _must_fit(samples: Samples, scorer: Scorer) -> None:
    """Raise Unscorable for too few samples, or of other data or another shape than the prepared."""
    if len(samples) < 2:
        there = "one" if len(samples) else "none"
        raise Unscorable(f"A score needs at least 2 images; there is {there}.")
    theirs, ours = samples.evidence["data_fingerprint"], scorer.train.fingerprint
    if theirs != ours:
        raise Unscorable(
            f"Its samples are of a network trained on the data {theirs}; the prepared data are "
            f"{ours}. Train and sample again, or prepare those data."
        )
    shape = (scorer.train.image_size, scorer.train.image_size, scorer.train.channels)
    for shard in samples.shards:
        if shard.dtype != np.uint8 or shard.shape[1:] != shape:
            raise Unscorable(
                f"Its samples are {shard.dtype} of {shard.shape[1:]}; the prepared images are "
                f"uint8 of {shape}."
            )


def _scored(scorer: Scorer, workspace: Workspace, step: int, samples: Samples) -> Row:
    scores = scorer.score(samples.shards, f"step {step}")
    first = _first(samples, memorisation.EXAMINED)
    pictures.write_grid(workspace, step, first)
    facts = repeats = None
    if scorer.remembers:
        facts, found = scorer.memorisation(first)
        repeats = scorer.collapse(first, samples.evidence["sampler"])
        pictures.write_neighbours(workspace, f"{step:08d}", first, found, scorer.train)
    row = {
        "step": step,
        **scores,
        "memorisation": facts,
        "collapse": repeats,
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
    return with_checksum(row)


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
        images = counted(min(counts), "image")
        warn(
            f"The distances are of {images}. Below {SMALL:,} they are too high by an "
            "amount that depends on their number: compare them with equal numbers alone."
        )
    if first:
        name, score = first["score_name"], first["score"]
        say(f"evaluate: the best is step {first['step']}, {name} = {score:.4g}.")
        diversity = verdict.diversity(first.get("collapse"))
        if diversity.level in ("bad", "caution"):
            warn(f"Step {first['step']}: {diversity.detail}")


def _track(config: Config, workspace: Workspace, rows: list[Row]) -> None:
    """Tell MLflow of new scores and of the report, which has them."""
    if not rows:
        return
    from ddpm_core.evaluation.mlflow_log import open_tracker, tell

    tracker = open_tracker(config, workspace, rows[-1])
    tell(tracker, workspace)
    tracker.close()
