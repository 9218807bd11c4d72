"""The story of training: set up, resume, then report, snapshot, leave or step, until it is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NoReturn

import torch

from ddpm_core.config import Config, Train
from ddpm_core.console import progress, say, warn
from ddpm_core.data.dataset import PackedDataset
from ddpm_core.errors import Interrupted, UserError
from ddpm_core.runtime.distributed import WorkerLost, World
from ddpm_core.runtime.stopping import ASKED, StopRequest
from ddpm_core.storage.lease import Lease, hold
from ddpm_core.storage.workspace import Workspace
from ddpm_core.tracking.tracker import Tracker
from ddpm_core.training import finite, resume, snapshot
from ddpm_core.training.agreement import check_agreement
from ddpm_core.training.batches import next_batch
from ddpm_core.training.explain import translate_errors
from ddpm_core.training.init import check_data_fits, check_init_stays
from ddpm_core.training.log import RunLog
from ddpm_core.training.optim import learning_rate
from ddpm_core.training.preview import preview
from ddpm_core.training.records import keeping_records
from ddpm_core.training.state import Totals, TrainState, to_contents, widest
from ddpm_core.training.step import step
from ddpm_core.training.throughput import Throughput


@dataclass
class Run:
    """What the loop works with: the state, its data, and where the results go."""

    config: Config
    workspace: Workspace
    world: World
    data: PackedDataset
    state: TrainState
    start: resume.Start
    stop: StopRequest
    writer: snapshot.Writer
    log: RunLog
    lease: Lease | None
    written: int  # the step of the newest snapshot
    since: float  # when the last row was logged
    before: int  # steps of the coming row that were taken before this process began
    snapshot_at: float  # when the newest snapshot was taken
    overdue: bool = False  # `snapshot_every` is a time, and it is over
    advance: Callable[..., None] = lambda *_, **__: None
    throughput: Throughput = field(init=False)

    def __post_init__(self) -> None:
        self.throughput = Throughput(self.world.size)


def train(
    config: Config,
    workspace: Workspace,
    data: PackedDataset,
    world: World,
    policy: resume.Policy,
) -> None:
    """Train to `train.steps`, from the newest whole snapshot of the same settings if there is one.

    Raises Interrupted after a request to stop, with everything saved, and UserError for what is
    the user's to mend.
    """
    check_data_fits(config, data)
    check_init_stays(config, workspace)
    with (
        translate_errors(config),
        leaving_together(world),
        hold_first(workspace, world) as lease,
        StopRequest(world) as stop,  # who waits for the lease has nothing to save, and ends at once
    ):
        start = resume.start(config, workspace, world, data, policy)
        settings, state = start.settings, start.state
        if state is None:
            if world.rank == 0:
                Tracker.catch_up(config, workspace, identity=settings["train_fingerprint"])
            return
        now, before = time.perf_counter(), state.totals.steps
        if start.replaces:
            prove(state, data, stop, start)
            if lease:
                lease.check(patient=True)
                resume.replace(workspace, start.others, settings["identity"])
        with keeping_records(config, workspace, lease, settings, start.step) as (log, writer):
            run = Run(
                config,
                workspace,
                world,
                data,
                state,
                start,
                stop,
                writer,
                log,
                lease,
                written=start.step,
                since=now,
                before=before,
                snapshot_at=now,
            )
            with progress("train", config.train.steps, "steps", state.step) as advance:
                run.advance = advance if world.rank == 0 else run.advance
                loop(run)


def prove(state: TrainState, data: PackedDataset, stop: StopRequest, start: resume.Start) -> None:
    """Take the first step of a run that moves another one away: settings that can't run move none.

    Returns once all workers have taken it. Raises UserError where it is not finite.
    """
    take_step(state, data, stop)
    stop.settle()
    if what := finite.problem(state) or finite.weights_problem(state):
        raise UserError(
            f"{what}. The run with different settings in this workspace stays as it is. "
            f"{finite.explanation(state, start.step, start.source)}"
        )
    state.world.barrier()


@contextmanager
def leaving_together(world: World) -> Iterator[None]:
    """After a request to stop, workers wait for the first, which has records to close.

    torchrun signals those that remain as soon as one has ended; for a worker that was asked to
    stop before, that is the second signal, which ends it at once, in the middle of its snapshot.
    """
    try:
        yield
    except WorkerLost:
        raise
    except Interrupted:
        world.barrier()
        raise


def loop(run: Run) -> None:
    """Everything that is written is written between steps, when the state is whole."""
    state, train = run.state, run.config.train
    while True:
        done = state.step >= train.steps
        stopping = run.stop.agreed(state.step)
        if state.totals.steps and (state.step % train.log_every == 0 or done):
            run.stop.settle()
            report(run)
        due = run.overdue or snapshot_due(train, state.step)
        if state.step > run.written and (due or done or stopping):
            take_snapshot(run)
        if done or stopping:
            break
        take_step(state, run.data, run.stop)
        run.advance()
    run.writer.wait()
    if run.world.rank == 0:
        for line in run.throughput.summary():
            say(f"train: {line}")
    if not done:
        kept = ", with its snapshot written" if run.written else ": nothing is written yet"
        raise Interrupted(
            f"Stopped at step {state.step} of {train.steps}{kept}. "
            "The same command goes on from there.",
            run.stop.status or ASKED,  # the wish may have been another worker's
        )


def take_step(state: TrainState, data: PackedDataset, stop: StopRequest) -> None:
    """Train on the next batch."""
    batch = next_batch(state.config, data, state.world, state.step)
    state.watch.mark("data")
    step(state, batch, stop.wish())
    stop.note(state.step)


def snapshot_due(train: Train, at: int) -> bool:
    """Whether step number `at` is one to keep."""
    every = train.snapshot_steps
    return (every is not None and at % every == 0) or train.is_milestone(at)


def report(run: Run) -> None:
    """One row of log.jsonl: means since the last one. Here values are read from the device."""
    state, totals = run.state, run.state.totals
    if what := finite.problem(state):
        fail(run, what)
    if run.lease:
        run.lease.check()
    values, now, done = totals.values(), time.perf_counter(), totals.steps - run.before
    row = {
        **means(run, values, state.step, totals.steps),
        "images_per_second": done * run.config.train.batch_size / (now - run.since),
        "world_size": run.world.size,
        **time_of_all(run, now),
        "time": time.time(),
    }
    run.since, run.before = now, 0
    state.history = [*state.history, row["loss"]][-100:]
    state.totals = Totals.zero(run.world.device)
    if run.world.rank == 0:
        run.log.append(row)
        run.advance(0, note=f"loss {row['loss']:.4f}")
    state.watch.mark("other")


def means(run: Run, values: dict[str, float], at: int, steps: int) -> dict[str, float]:
    """Return the part of a row that `values`, the totals of `steps` steps up to `at`, give."""
    train, scaler = run.config.train, run.state.scaler
    scaled = {"skip_rate": values["skipped"] / steps, "loss_scale": scaler.get_scale()}
    taken = max(1.0, steps - values["skipped"])
    return {
        "step": at,
        "epoch": at * train.batch_size / len(run.data),
        "loss": values["loss"] / steps,
        "grad_norm": values["grad_norm"] / taken,
        "clip_rate": values["clipped"] / taken,
        "lr": learning_rate(train.optimizer, at, train.steps),
        **(scaled if scaler.is_enabled() else {}),
    }


def time_of_all(run: Run, now: float) -> dict[str, float]:
    """Where each worker's time went since the last row; and on the first one's clock, what is due.

    One small exchange for both: all workers take a snapshot at the same step.
    """
    world, limit = run.world, run.config.train.snapshot_seconds
    overdue = limit is not None and now - run.snapshot_at >= limit
    mine = torch.cat([run.state.watch.take(), torch.tensor([overdue])])
    everyone = world.all_gather(mine.to(world.device, widest(world.device))).cpu().double()
    run.overdue = bool(everyone[0, -1])
    size, steps = run.config.train.batch_size, run.state.totals.steps - run.before
    images = [steps * len(replace(world, rank=rank).share(size)) for rank in range(world.size)]
    return run.throughput.row(everyone[:, :-1], images)


def fail(run: Run, what: str) -> NoReturn:
    """Log the steps before a failure, and raise UserError; nothing else of it is written."""
    state = run.state
    bad = int(state.bad_step)
    last = bad - 1 if bad else state.step
    if (steps := state.totals.steps - (state.step - last)) > 0:
        row = means(run, state.totals.values(), last, steps)
        state.history.append(row["loss"])
        if run.world.rank == 0:
            run.log.append({**row, "world_size": run.world.size, "time": time.time()})
    if before := ", ".join(f"{loss:.3g}" for loss in state.history[-5:]):
        what += f", after rows of {before}"
    newest = newest_snapshot(run)
    kept = f"The snapshot of step {newest} is whole. " if newest else "There is no snapshot yet. "
    if newest and bad == newest + 1 == run.start.step + 1:
        kept = ""  # that snapshot is the likely cause
    raise UserError(
        f"{what}. {kept}Nothing of the failure was saved. "
        f"{finite.explanation(state, run.start.step, run.start.source)}"
    )


def newest_snapshot(run: Run) -> int:
    """Return the step of the newest snapshot on disk, for all workers; 0: none.

    Waits for one that is being written.
    """
    if run.world.rank == 0:
        try:
            run.writer.wait(final=False)
        except UserError as error:
            warn(str(error))
    return run.world.broadcast(run.writer.newest or 0)


def take_snapshot(run: Run) -> None:
    """Copy the state to the host; the writer's thread puts it on disk, with a milestone's grid."""
    run.stop.settle()
    if what := finite.problem(run.state):
        fail(run, what)
    check_agreement(run.state, partial(newest_snapshot, run))
    if what := finite.weights_problem(run.state):  # on all workers alike
        fail(run, what)
    run.written, run.overdue, run.snapshot_at = run.state.step, False, time.perf_counter()
    if run.world.rank == 0:
        train, at = run.config.train, run.state.step
        drawn = train.is_milestone(at) and train.grid
        draw = partial(preview, run.config, run.world.device) if drawn else None
        run.writer.wait(final=False)  # before the copy, so that there are never two
        run.writer.submit(at, to_contents(run.state, {**run.start.settings, "step": at}), draw)
    run.state.watch.mark("snapshot")


def hold_first(workspace: Workspace, world: World) -> AbstractContextManager[Lease | None]:
    """The first worker holds the lease for all."""
    return hold(workspace) if world.rank == 0 else nullcontext()
