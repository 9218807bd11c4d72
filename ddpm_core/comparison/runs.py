"""Train, sample and score each run in its own workspace, several of them side by side.

Each step is the ordinary verb, which resumes what an interrupted comparison left. A run shares the
prepared data of the comparison by a link.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import ConfigDict, Field

from ddpm_core.comparison.experiment import SHARES, Experiment, Run
from ddpm_core.comparison.scoring import Spaces
from ddpm_core.config import Config
from ddpm_core.console import progress, say
from ddpm_core.data.dataset import data_fingerprint
from ddpm_core.errors import Interrupted, NotFinite
from ddpm_core.runtime.distributed import world
from ddpm_core.sampling.freshness import stale as samples_stale
from ddpm_core.sampling.gather import Samples, open_samples
from ddpm_core.sampling.run import sample
from ddpm_core.scores import count_label
from ddpm_core.storage.files import Schema
from ddpm_core.storage.workspace import DATA, SNAPSHOTS, Workspace, fingerprint
from ddpm_core.tracking.run import PARENT
from ddpm_core.tracking.tracker import Tracker
from ddpm_core.training.identity import stale as training_stale
from ddpm_core.training.identity import train_fingerprint
from ddpm_core.training.launch import train

SCORES = "scores.json"  # of a run
DDPM = "ddpm"  # folder of a run, with the images by full DDPM sampling
PARAMS = "params.yaml"
LOG = "output.log"  # what a run prints if several are side by side
WATCH = 1.0  # seconds between two looks at whether the main process is alive


class Score(Schema):
    """The scores of one checkpoint by one sampler. `key` identifies images and feature spaces."""

    model_config = ConfigDict(frozen=True)

    key: str
    share: float  # of the budget
    step: int
    sampler: str  # dpmpp or ddpm
    samples: int
    scores: dict[str, float]


class Outcome(Schema):
    """The scores of a run, or why it has none. `train` is the fingerprint of its training."""

    model_config = ConfigDict(frozen=True)

    train: str
    scores: list[Score] = Field(default_factory=list)
    problem: str = ""

    @property
    def final(self) -> dict[str, float]:
        """The scores by DPM-Solver++ at the end of the budget; {} if there are none."""
        found = (s.scores for s in self.scores if s.share == SHARES[-1] and s.sampler == "dpmpp")
        return next(found, {})


@dataclass(frozen=True)
class Shared:
    """What the runs of a stage share. `parent` is the comparison's run in MLflow, "" if none."""

    experiment: Experiment
    folder: Path
    parent: str = ""
    by_ddpm: int = 0  # images by full DDPM sampling

    def spaces(self) -> Spaces:
        """Open the feature spaces of the scores."""
        config = self.experiment.config(None, str(self.folder))
        return Spaces(config, Workspace.open(str(self.folder)))


def outcomes(runs: Sequence[Run], shared: Shared, spaces: Spaces) -> Iterator[tuple[Run, Outcome]]:
    """Finish all runs, `experiment.workers` at a time; yield each when it is finished.

    Raises Interrupted or KeyboardInterrupt after all running ones have saved their state.
    """
    if min(shared.experiment.workers, len(runs)) <= 1:
        for number, run in enumerate(runs, 1):
            say(f"compare: run {number} of {len(runs)}: {run.title}.")
            yield run, finish(run, shared, spaces)
        return
    # `spawn`, because CUDA does not work in forked processes.
    pool = ProcessPoolExecutor(
        shared.experiment.workers,
        multiprocessing.get_context("spawn"),
        _start_worker,
        (shared, torch.get_num_threads(), os.getpid()),
    )
    try:
        with progress("compare: runs", len(runs), "runs") as advance:
            futures = {pool.submit(_finish_in_worker, run): run for run in runs}
            for future in as_completed(futures):
                yield futures[future], future.result()
                advance(note=futures[future].title)
    except BaseException:
        for process in multiprocessing.active_children():
            process.terminate()  # training saves a snapshot first
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def finish(run: Run, shared: Shared, spaces: Spaces) -> Outcome:
    """Train, sample and score what is missing of a run.

    Values that are not finite end the run, and not the comparison: its outcome has the reason.
    """
    config = shared.experiment.run_config(run, shared.folder)
    workspace = Workspace.open(config.workspace)
    folder = Path(workspace.uri)
    _link(shared.folder / DATA, folder / DATA)
    workspace.storage.write(PARAMS, yaml.safe_dump(config.dump(), sort_keys=False).encode())
    identity = train_fingerprint(config, data_fingerprint(workspace))
    known = workspace.read_model(SCORES, Outcome)
    if known and known.problem and known.train == identity:
        return known
    try:
        if training_stale(config, workspace):
            arguments = ["train", "-p", str(folder / PARAMS)]
            train(config, os.environ, arguments)
        sets = _sampled(run, config, shared.by_ddpm)
    except NotFinite as error:
        outcome = Outcome(train=identity, problem=str(error))
    else:
        before = {score.key: score for score in known.scores} if known else {}
        found = [
            _scored(step, step / run.steps, sampler, samples, spaces, before)
            for step, sampler, samples in sets
        ]
        outcome = Outcome(train=identity, scores=found)
        if all(score.key in before for score in found):
            return outcome
    workspace.write_json(SCORES, outcome.model_dump())
    _track(run, config, workspace, outcome, identity, shared.parent)
    return outcome


def _scored(
    step: int, share: float, sampler: str, samples: Samples, spaces: Spaces, known: dict[str, Score]
) -> Score:
    """Return the scores of samples: the known ones with the same key, or new ones."""
    key = fingerprint([samples.manifest.samples_fingerprint, spaces.fingerprint])
    if key in known:
        return known[key]
    count = len(samples)
    say(f"compare: scoring {count:,} images of step {step} by {sampler}.")
    scores = spaces.score(samples.shards)
    return Score(key=key, share=share, step=step, sampler=sampler, samples=count, scores=scores)


def _sampled(run: Run, config: Config, by_ddpm: int) -> list[tuple[int, str, Samples]]:
    """Draw what is missing; return (step, sampler, samples) at each share, then by DDPM."""
    workspace = Workspace.open(config.workspace)
    _draw(config, workspace)
    sets = [(step, "dpmpp", open_samples(workspace, step)) for step in run.scored_steps]
    if by_ddpm:
        # Another workspace, because one keeps the images of a single sampler for each step.
        folder = Path(workspace.uri)
        for name in (DATA, SNAPSHOTS):
            _link(folder / name, folder / DDPM / name)
        changes = {
            "sampler": "ddpm",
            "steps": config.diffusion.timesteps,
            "count": by_ddpm,
            "checkpoints": (run.steps,),
        }
        settings = config.sample.model_copy(update=changes)
        place = {"workspace": str(folder / DDPM), "sample": settings}
        other = Workspace.open(str(folder / DDPM))
        _draw(config.model_copy(update=place), other)
        sets.append((run.steps, "ddpm", open_samples(other, run.steps)))
    return sets


def _draw(config: Config, workspace: Workspace) -> None:
    if samples_stale(config, workspace):
        with world(config.device, {}) as here:
            sample(config, workspace, here)


def _link(target: Path, link: Path) -> None:
    """Link a folder; relative, so that the comparison can be moved."""
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(os.path.relpath(target, link.parent))


def _track(
    run: Run, config: Config, workspace: Workspace, outcome: Outcome, identity: str, parent: str
) -> None:
    """Send the scores to the MLflow run of the training, below that of the comparison."""
    tracker = Tracker.open(config, workspace, identity)
    arm = {"method": run.arm.name, "seed": run.seed, "mlflow.runName": run.title}
    tracker.tags({**arm, **({PARENT: parent} if parent else {})})
    for score in outcome.scores:
        count = count_label(score.samples)
        named = {f"{score.sampler}/{name}_{count}": v for name, v in score.scores.items()}
        tracker.metrics(score.step, named)
    tracker.close(status="FAILED" if outcome.problem else "FINISHED")


# A worker process

_worker: dict[str, Any] = {}


def _start_worker(shared: Shared, threads: int, main: int) -> None:
    """Prepare a worker: its own session, so that Ctrl-C reaches the main process alone.

    `main` is that process, which may be gone already.
    """
    os.setsid()
    signal.signal(signal.SIGTERM, _leave)
    torch.set_num_threads(threads)
    threading.Thread(target=_leave_with, args=(main,), daemon=True).start()
    _worker.update(shared=shared, spaces=shared.spaces(), main=main)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _leave_with(main: int) -> None:
    """End this process as SIGTERM does, after the main process was killed."""
    while os.getppid() == main:
        time.sleep(WATCH)
    os.kill(os.getpid(), signal.SIGTERM)


def _finish_in_worker(run: Run) -> Outcome:
    shared: Shared = _worker["shared"]
    folder = shared.folder / run.key
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOG).open("ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        return finish(run, shared, _worker["spaces"])
    except Interrupted as stop:
        raise SystemExit(stop.status) from None
    finally:
        if os.getppid() != _worker["main"]:
            # The pool would catch SystemExit, and wait for more work from a process that is gone.
            os._exit(1)
