"""The verb evaluate: score every sampled checkpoint, then write tables, plots and the report.

Each row of scores is kept as soon as it is measured. It is used again while the samples, the data,
the extractor and the settings are the same, so an interrupted run continues where it stopped.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any

import numpy as np

from ddpm_core.config import Config
from ddpm_core.console import say, warn
from ddpm_core.errors import Corrupt, UserError, require
from ddpm_core.evaluation import grids, memorisation, plots, tables, verdict
from ddpm_core.evaluation.freshness import OUTPUTS, is_orphaned, row_key, sampled
from ddpm_core.evaluation.metrics import SMALL
from ddpm_core.evaluation.report import render_report
from ddpm_core.evaluation.scorer import Scorer
from ddpm_core.runtime import memory
from ddpm_core.sampling.gather import Samples, SamplesManifest, open_samples
from ddpm_core.sampling.images import Pixels
from ddpm_core.sampling.plan import chosen_steps
from ddpm_core.scores import (
    SAME,
    AnyRow,
    Evidence,
    Row,
    Unscored,
    best,
    is_scored,
    named_metrics,
    ranked,
    read_rows,
)
from ddpm_core.storage import MANIFEST
from ddpm_core.storage.workspace import (
    EVALUATION,
    METRICS,
    RESULTS,
    SAMPLES,
    TABLE,
    Workspace,
    samples_key,
    step_name,
)
from ddpm_core.text import counted
from ddpm_core.tracking import tensorboard
from ddpm_core.tracking.tracker import Tracker

ROWS = f"{EVALUATION}/rows"
REPORTED = ("report.html", "evaluation_results.csv", "results.json")  # files that MLflow gets
# What reading an invalid manifest raises.
INVALID = (KeyError, ValueError, TypeError, AttributeError)
# Errors of the machine, not of the file that is read.
MACHINE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EIO)


class Unscorable(Exception):
    """Samples that cannot be scored, with the reason."""


def evaluate(config: Config, workspace: Workspace) -> list[AnyRow]:
    """Score checkpoints that have no current score, write all files, and return the rows by step.

    A checkpoint with incomplete or unsuitable samples gets a row with the reason. Samples without
    a checkpoint are left out.

    Raises:
        UserError: there are no samples, or no checkpoint can be scored.
    """
    workspace.storage.sweep_staged()
    if not sampled(workspace):
        raise UserError(
            f"{workspace.uri} has no samples of an existing checkpoint.", run=("sample",)
        )
    for package in ("jinja2", "matplotlib", "torch_fidelity"):  # fail before a training starts
        require(package, "eval")
    with memory.translate_errors(_advice(config)):
        return _evaluated(config, workspace)


def _advice(config: Config) -> str:
    settings = config.evaluate
    return (
        f"evaluate.metrics {list(settings.metrics)}: remove prdc, which takes the most memory, "
        f"then kid and memorisation, or lower sample.count ({config.sample.count:,})."
    )


def _evaluated(config: Config, workspace: Workspace) -> list[AnyRow]:
    scorer = Scorer(config, workspace)
    rows: list[AnyRow] = []
    new: list[Row] = []
    for step in _steps(config, workspace):
        row: AnyRow | None = _kept(scorer, workspace, step)
        if row is None:
            row = _measure(scorer, workspace, step)
            # Written at once, so that an interrupted run does not measure it again.
            workspace.write_json(f"{ROWS}/{step_name(step)}.json", row.plain())
            new += [row] if is_scored(row) else []
        rows.append(row)
    first = _write(config, workspace, scorer, rows)
    _print_summary(rows, new, first)
    if new:
        tracker = open_tracker(config, workspace, new[-1])
        send(tracker, workspace)
        tracker.close()
    send_events(config, workspace, bool(new))
    if not any(map(is_scored, rows)):
        raise UserError(f"No checkpoint could be scored. Step {rows[0].step}: {rows[0].problem}")
    return rows


def _steps(config: Config, workspace: Workspace) -> list[int]:
    """Return the sampled checkpoints, and those that `sample.checkpoints` asks for."""
    named = config.sample.checkpoints
    if isinstance(named, tuple):
        expected = set(named)
    else:  # this evaluation decides which checkpoint is `best`
        expected = set() if named == "best" else set(chosen_steps(config, workspace))
    steps = sampled(workspace)
    for step in set(workspace.steps(SAMPLES)) - set(steps):
        warn(f"Skipping the samples of step {step}: its checkpoint is missing.")
    return sorted(expected.union(steps))


def _kept(scorer: Scorer, workspace: Workspace, step: int) -> Row | None:
    """Return the row of an earlier run if nothing that it depends on has changed."""
    row = workspace.read_model(f"{ROWS}/{step_name(step)}.json", Row)
    samples = workspace.read_json(f"{samples_key(step)}/{MANIFEST}").get("samples_fingerprint")
    if row is None or samples is None or is_orphaned(workspace, step):
        return None
    current = row.key == _key(scorer, samples) and row.is_unchanged()
    return row if is_scored(row) and current else None


def _key(scorer: Scorer, samples: str) -> str:
    """Return the key of a row; `samples` is the fingerprint of the samples."""
    return row_key(
        scorer.settings,
        samples,
        scorer.train.fingerprint,
        scorer.holdout.fingerprint,
        scorer.extractor.fingerprint,
    )


def _measure(scorer: Scorer, workspace: Workspace, step: int) -> AnyRow:
    """Return a new row. Unsuitable samples make an Unscored row, all other errors end the run."""
    try:
        samples = _open(workspace, step)
        _must_fit(samples, scorer)
    except Unscorable as error:
        return Unscored.because(step, str(error))
    return _score(scorer, workspace, step, samples)


def _open(workspace: Workspace, step: int) -> Samples:
    """Return complete samples. Raises Unscorable, also for an invalid manifest.

    A server that does not respond or a full disk says nothing about the samples. Such errors are
    raised as they are, so that they do not remove a checkpoint from the ranking.
    """
    if is_orphaned(workspace, step):
        raise Unscorable(
            "Its samples were drawn with weights that the checkpoint does not have: run "
            f"`ddpm sample`, or remove {samples_key(step)}."
        )
    try:
        return open_samples(workspace, step)
    except Corrupt as error:
        if getattr(error.__cause__, "errno", None) in MACHINE:
            raise
        raise Unscorable(str(error)) from error
    except (*INVALID, FileNotFoundError, NotADirectoryError) as error:
        raise Unscorable(f"Its samples cannot be read: {error!r}.") from error


def _must_fit(samples: Samples, scorer: Scorer) -> None:
    """Raise Unscorable unless there are 2 images, with the data and shape of the prepared ones."""
    if len(samples) < 2:
        raise Unscorable(f"It has {counted(len(samples), 'sample')}; a score requires at least 2.")
    trained_on, prepared = samples.manifest.data_fingerprint, scorer.train.fingerprint
    if trained_on != prepared:
        raise Unscorable(
            f"Its network was trained on the data {trained_on}, but the prepared data are "
            f"{prepared}: train and sample again, or prepare the original data."
        )
    shape = (scorer.train.image_size, scorer.train.image_size, scorer.train.channels)
    for shard in samples.shards:
        if shard.dtype != np.uint8 or shard.shape[1:] != shape:
            raise Unscorable(
                f"Its samples are {shard.dtype} images of shape {shard.shape[1:]}; the prepared "
                f"images are uint8 of shape {shape}."
            )


def _score(scorer: Scorer, workspace: Workspace, step: int, samples: Samples) -> Row:
    """Measure the samples of a step and write their image grids."""
    measured = scorer.score(samples.shards, f"step {step}")
    first = _first(samples, memorisation.EXAMINED)
    grids.write_samples(workspace, step, first)
    copies = repeats = None
    if scorer.checks_memorisation:
        copies, found = scorer.memorisation(first)
        repeats = scorer.collapse(first, samples.manifest.sampler)
        grids.write_neighbours(workspace, f"{step:08d}", first, found, scorer.train)
    row = Row(
        **measured,
        step=step,
        memorisation=copies,
        collapse=repeats,
        evidence=_evidence(scorer, samples.manifest),
        problem=None,
        key=_key(scorer, samples.manifest.samples_fingerprint),
    )
    return row.with_checksum()


def _first(samples: Samples, most: int) -> Pixels:
    parts, left = [], most
    for shard in samples.shards:
        parts.append(np.asarray(shard[:left]))
        left -= len(parts[-1])
    return np.concatenate(parts)


def _evidence(scorer: Scorer, samples: SamplesManifest) -> Evidence:
    extractor = scorer.extractor
    # Unset without a guide, so that the checksums of earlier rows stay.
    guide = {"guide": samples.guide.model_dump()} if samples.guide else {}
    return Evidence(
        data=scorer.train.fingerprint,
        holdout_data=scorer.holdout.fingerprint,
        reference_count=len(scorer.train),
        extractor=extractor.name,
        extractor_fingerprint=extractor.fingerprint,
        extractor_accuracy=extractor.accuracy,
        space=extractor.space,
        count=samples.count,
        sampler=samples.sampler,
        seed=samples.seed,
        weights=samples.weights,
        samples=samples.samples_fingerprint,
        train=samples.train_fingerprint,
        **guide,
    )


def _write(
    config: Config, workspace: Workspace, scorer: Scorer, rows: Sequence[AnyRow]
) -> Row | None:
    """Write all files of an evaluation; return the best row."""
    grids.write_real(workspace, scorer.train)
    results = tables.results(config, workspace, scorer, rows)
    listed = ranked(rows, results["sample"])
    workspace.write_json(RESULTS, results)
    workspace.storage.write(TABLE, tables.results_csv(rows).encode())
    workspace.storage.write(f"{EVALUATION}/best_scores.csv", tables.best_csv(listed).encode())
    workspace.write_json(METRICS, tables.metrics(listed))
    for name, image in plots.draw(listed).items():
        workspace.storage.write(f"{EVALUATION}/{name}", image)
    render_report(workspace)
    # Last, because results without sizes mark an evaluation that did not finish.
    sizes = {name: workspace.storage.size(name) for name in OUTPUTS}
    workspace.write_json(RESULTS, {**results, "sizes": sizes})
    return best(listed)


def _print_summary(rows: Sequence[AnyRow], new: Sequence[Row], first: Row | None) -> None:
    for row in rows:
        if row.problem:
            warn(f"step {row.step} is not scored: {row.problem}")
    fewest = min((row.evidence.count for row in new), default=SMALL)
    if fewest < SMALL:
        warn(
            f"The distances are measured with {counted(fewest, 'image')}. Below {SMALL:,} images "
            "they are biased upwards: compare only distances with equal counts."
        )
    if first:
        say(f"evaluate: the best is step {first.step}, {first.score_name} = {first.score:.4g}.")
        diversity = verdict.diversity(first.collapse)
        if diversity.level in ("bad", "caution"):
            warn(f"Step {first.step}: {diversity.detail}")


def open_tracker(config: Config, workspace: Workspace, row: Row, quiet: bool = False) -> Tracker:
    """Open the MLflow run of the training that a scored checkpoint belongs to.

    If the server has changed or the run was deleted, a new run gets settings, scores and report
    too.
    """

    def record(tracker: Tracker) -> None:
        tracker.params(workspace.read_json(RESULTS).get("run") or {})
        send(tracker, workspace)

    return Tracker.open(config, workspace, row.evidence.train, record, quiet=quiet)


def send(tracker: Tracker, workspace: Workspace) -> None:
    """Send all scores to MLflow, each with its step, and the report with the ranking."""
    results = read_rows(workspace)
    for row in sorted(filter(is_scored, results.rows), key=lambda row: row.step):
        tracker.scores(_measurement(row.evidence), row.step, named_metrics(row))
    for row in ranked(results.rows, results.sample)[-1:]:
        for name in REPORTED:
            path = workspace.path(f"{EVALUATION}/{name}")
            tracker.report(path, EVALUATION, _measurement(row.evidence))


def _measurement(evidence: Evidence) -> dict[str, Any]:
    """Return the evidence that all scores of one curve have in common."""
    return {name: evidence[name] for name in (*SAME, "seed")}


def send_events(config: Config, workspace: Workspace, new: bool) -> None:
    """Write the scores for TensorBoard. Without `new` ones, only if their files are missing."""
    if config.tracking.tensorboard is None:
        return
    results = read_rows(workspace)
    by_training: dict[str, list[Row]] = {}
    for row in sorted(filter(is_scored, results.rows), key=lambda row: row.step):
        by_training.setdefault(row.evidence.train, []).append(row)
    for training, rows in by_training.items():
        scored = [(_measurement(row.evidence), (row.step, named_metrics(row))) for row in rows]
        tensorboard.write_scores(tensorboard.folder_of(config, workspace, training), scored, new)
