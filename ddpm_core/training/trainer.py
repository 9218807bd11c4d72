"""Train: resume or start, then step, log and snapshot until the last step or a request to stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

import torch

from ddpm_core.config import Config, Train
from ddpm_core.console import progress, say, warn
from ddpm_core.data.dataset import PackedDataset
from ddpm_core.errors import Interrupted, NotFinite, UserError
from ddpm_core.runtime import memory
from ddpm_core.runtime.device import translate_compile_errors
from ddpm_core.runtime.distributed import WorkerLost, World
from ddpm_core.runtime.stopping import STOP_STATUS, StopRequest
from ddpm_core.storage.lease import Lease, hold
from ddpm_core.storage.workspace import Workspace
from ddpm_core.tracking.validation import sentence
from ddpm_core.training import checks, resume, snapshot
from ddpm_core.training.init import check_data_fits, check_init_stays
from ddpm_core.training.log import RunLog
from ddpm_core.training.optim import learning_rate
from ddpm_core.training.probe import make_probe, observe
from ddpm_core.training.records import catch_up, keep_records, preview
from ddpm_core.training.state import Totals, TrainState, to_contents, widest
from ddpm_core.training.step import next_batch, step
from ddpm_core.training.throughput import Throughput
from ddpm_core.training.validation import Validation, is_due


@dataclass
class Run:
    """A training run in progress: its state, its data, and where its results go."""

    config: Config
    world: World
    data: PackedDataset
    state: TrainState
    start: resume.Start
    stop: StopRequest
    writer: snapshot.Writer
    log: RunLog
    lease: Lease | None
    row_time: float  # when the last row was logged
    earlier_steps: int  # steps of the coming row that a previous process took
    validation: Validation | None
    snapshot_time: float = field(init=False)  # when the newest snapshot was taken
    written: int = field(init=False)  # its step
    overdue: bool = False  # `snapshot_every` is a time, and it has passed
    advance: Callable[..., None] = lambda *_, **__: None  # moves the progress bar
    throughput: Throughput = field(init=False)

    def __post_init__(self) -> None:
        self.snapshot_time, self.written = self.row_time, self.start.step
        self.throughput = Throughput(self.world.size)


def train(
    config: Config,
    workspace: Workspace,
    data: PackedDataset,
    world: World,
    policy: resume.Policy,
) -> None:
    """Train up to `train.steps`, resuming from the newest complete snapshot of the same settings.

    Raises:
        Interrupted: a request to stop arrived; everything is saved.
        UserError: the settings, the data or the machine need a change by the user.
    """
    check_data_fits(config, data)
    check_init_stays(config, workspace)
    with (
        translate_errors(config),
        leave_together(world),
        hold_on_rank_0(workspace, world) as lease,
        StopRequest(world) as stop,  # after the lease: a signal ends a worker that waits for it
    ):
        start = resume.start(config, workspace, world, data, policy)
        settings, state = start.settings, start.state
        if state is None:
            if world.rank == 0:
                catch_up(config, workspace, settings.train_fingerprint)
            return
        state.probe = make_probe(state, workspace, data)
        began, earlier_steps = time.perf_counter(), state.totals.steps
        if start.replaces:
            take_trial_step(state, data, stop, start)
            if lease:
                lease.check(patient=True)
                resume.replace(workspace, start.other_run, settings.identity)
        with keep_records(config, workspace, lease, settings, start.step) as (log, writer):
            validation = Validation.create(state, workspace, data)
            run = Run(
                *(config, world, data, state, start, stop, writer, log, lease),
                *(began, earlier_steps, validation),
            )
            with progress("train", config.train.steps, "steps", state.step) as advance:
                run.advance = advance if world.rank == 0 else run.advance
                loop(run)
            if world.rank == 0 and (found := sentence(config, workspace, log.path)):
                say(f"train: {found}")


def take_trial_step(
    state: TrainState, data: PackedDataset, stop: StopRequest, start: resume.Start
) -> None:
    """Take the first step of a run that replaces another one in the workspace.

    Only after it succeeds on all workers is the other run moved away, so settings that cannot run
    move nothing. Raises UserError if a value is not finite.
    """
    take_step(state, data, stop)
    stop.settle()
    if problem := checks.loss_problem(state) or checks.weights_problem(state):
        raise UserError(
            f"{problem}. The run with different settings in this workspace stays as it is. "
            f"{checks.explanation(state, start.step, start.source)}"
        )
    state.world.barrier()


def loop(run: Run) -> None:
    """Alternate steps with log rows and snapshots, until the last step or a request to stop.

    Everything is written between steps, when the state is consistent.
    """
    state, train = run.state, run.config.train
    while True:
        done = state.step >= train.steps
        stopping = run.stop.agreed(state.step)
        if state.totals.steps and (state.step % train.log_every == 0 or done):
            run.stop.settle()
            log_row(run)
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
        saved = " after writing a snapshot" if run.written else "; there is no snapshot yet"
        raise Interrupted(
            f"Stopped at step {state.step} of {train.steps}{saved}. "
            "To resume, run the same command again.",
            run.stop.status or STOP_STATUS,  # the signal may have reached another worker only
        )


def take_step(state: TrainState, data: PackedDataset, stop: StopRequest) -> None:
    """Train on the next batch."""
    batch = next_batch(state.config, data, state.world, state.step)
    state.watch.mark("data")
    step(state, batch, stop.flag())
    stop.note(state.step)
    observe(state)


# A row of the log


def log_row(run: Run) -> None:
    """Append the means since the last row to log.jsonl; reads values from the device."""
    state, totals = run.state, run.state.totals
    if problem := checks.loss_problem(state):
        fail(run, problem)
    if run.lease:
        run.lease.check()
    values, now, done = totals.values(), time.perf_counter(), totals.steps - run.earlier_steps
    row: dict[str, Any] = {
        **means(run, values, state.step, totals.steps),
        "images_per_second": done * run.config.train.batch_size / (now - run.row_time),
        "world_size": run.world.size,
        **gather_times(run, now),
        **validate(run),
        "steps": run.config.train.steps,
        "memory": memory.most_used(run.world.device.type),
        "time": time.time(),
    }
    run.row_time, run.earlier_steps = now, 0
    state.history = [*state.history, row["loss"]][-100:]
    state.totals = Totals.zero(run.world.device)
    if run.world.rank == 0:
        run.log.append(row)
        run.advance(0, note=f"loss {row['loss']:.4f}")
    state.watch.mark("other")


def validate(run: Run) -> dict[str, float]:
    """Return the held-out losses for a row if they are due since the row before; else {}."""
    state, train = run.state, run.config.train
    if run.validation is None:
        return {}
    due = is_due(train.validate_every, state.step, state.totals.steps)
    return run.validation.measure(state) if due or state.step == train.steps else {}


def means(run: Run, values: dict[str, float], at: int, steps: int) -> dict[str, float]:
    """Return the part of a row that follows from `values`, totals of `steps` steps up to `at`."""
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


def gather_times(run: Run, now: float) -> dict[str, float]:
    """Return where each worker's time went since the last row, for the row.

    In the same exchange, all workers learn whether a snapshot is overdue by the clock of rank 0,
    so that they take it at the same step.
    """
    world, limit = run.world, run.config.train.snapshot_seconds
    overdue = limit is not None and now - run.snapshot_time >= limit
    own = torch.cat([run.state.watch.take(), torch.tensor([overdue])])
    times = world.all_gather(own.to(world.device, widest(world.device))).cpu().double()
    run.overdue = bool(times[0, -1])
    size, steps = run.config.train.batch_size, run.state.totals.steps - run.earlier_steps
    images = [steps * len(replace(world, rank=rank).share(size)) for rank in range(world.size)]
    return run.throughput.row(times[:, :-1], images)


# A snapshot


def snapshot_due(train: Train, at: int) -> bool:
    """Return whether the settings ask for a snapshot of step number `at`."""
    every = train.snapshot_steps
    return (every is not None and at % every == 0) or train.is_milestone(at)


def take_snapshot(run: Run) -> None:
    """Check the state and copy it to the host; the writer's thread puts it on disk."""
    run.stop.settle()
    if problem := checks.loss_problem(run.state):
        fail(run, problem)
    checks.check_agreement(run.state, partial(newest_snapshot, run))
    if problem := checks.weights_problem(run.state):  # the same on all workers, as they agree
        fail(run, problem)
    run.written, run.overdue, run.snapshot_time = run.state.step, False, time.perf_counter()
    if run.world.rank == 0:
        train, at = run.config.train, run.state.step
        drawn = train.is_milestone(at) and train.grid
        draw = partial(preview, run.config, run.world.device) if drawn else None
        run.writer.wait(final=False)  # before the copy, so that memory never holds two
        run.writer.submit(at, to_contents(run.state, run.start.settings), draw)
    run.state.watch.mark("snapshot")


def newest_snapshot(run: Run) -> int:
    """Return the step of the newest snapshot on disk, on all workers; 0 if there is none.

    Waits for one that is being written.
    """
    if run.world.rank == 0:
        try:
            run.writer.wait(final=False)
        except UserError as error:
            warn(str(error))
    return run.world.broadcast(run.writer.newest or 0)


# Errors


def fail(run: Run, problem: str) -> NoReturn:
    """Log the steps before a value that is not finite, save nothing else, and raise NotFinite."""
    state = run.state
    bad = int(state.bad_step)
    last = bad - 1 if bad else state.step  # step() stops adding to the totals at the bad step
    if (steps := state.totals.steps - (state.step - last)) > 0:
        row = means(run, state.totals.values(), last, steps)
        state.history.append(row["loss"])
        if run.world.rank == 0:
            run.log.append({**row, "world_size": run.world.size, "time": time.time()})
    if losses := ", ".join(f"{loss:.3g}" for loss in state.history[-5:]):
        problem += f", after logged losses of {losses}"
    newest = newest_snapshot(run)
    kept = (
        f"The snapshot of step {newest} is complete. " if newest else "There is no snapshot yet. "
    )
    if newest and bad == newest + 1 == run.start.step + 1:
        kept = ""  # that snapshot is the likely cause
    raise NotFinite(
        f"{problem}. {kept}Nothing of the failure was saved. "
        f"{checks.explanation(state, run.start.step, run.start.source)}"
    )


@contextmanager
def translate_errors(config: Config) -> Iterator[None]:
    """Raise UserError in place of an error of memory or of torch.compile."""
    train, model = config.train, config.model
    advice = (
        f"train.batch_size {train.batch_size} in train.microbatches {train.microbatches}, "
        f"model.channels {model.channels} times {list(model.multipliers)}: raise microbatches "
        "(the result stays the same to rounding), or lower batch_size or channels."
    )
    with memory.translate_errors(advice), translate_compile_errors("train.compile"):
        yield


@contextmanager
def leave_together(world: World) -> Iterator[None]:
    """After a request to stop, let the other workers wait until rank 0 has closed its records.

    torchrun sends SIGTERM to the remaining workers as soon as one has ended. For a worker that
    already got a signal this is the second one, which would end it in the middle of its snapshot.
    """
    try:
        yield
    except WorkerLost:
        raise
    except Interrupted:
        world.barrier()
        raise


def hold_on_rank_0(workspace: Workspace, world: World) -> AbstractContextManager[Lease | None]:
    """Hold the lease of the workspace on rank 0, for all workers."""
    return hold(workspace) if world.rank == 0 else nullcontext()
