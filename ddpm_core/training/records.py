"""The records of a run besides its snapshots: its log, image grids, and copies of both.

The copies are in MLflow and, with tracking.tensorboard, in event files.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ddpm_core.checkpoint import MOMENTS, WEIGHTS, Settings, ema_name
from ddpm_core.config import Config, Sample
from ddpm_core.console import warn
from ddpm_core.errors import Interrupted
from ddpm_core.models.config import UNetConfig
from ddpm_core.models.unet import UNet
from ddpm_core.sampling.images import grid_png
from ddpm_core.sampling.loading import read_moments
from ddpm_core.sampling.sampler import ImageSampler
from ddpm_core.storage import Mirror
from ddpm_core.storage.lease import Lease
from ddpm_core.storage.workspace import GRID, LOG, Workspace, snapshot_key, step_name
from ddpm_core.tracking.rows import read_rows
from ddpm_core.tracking.tensorboard import Events, folder_of, write_rows
from ddpm_core.tracking.tracker import Tracker
from ddpm_core.training import snapshot
from ddpm_core.training.log import RunLog

PREVIEW_STEPS = 20  # of the sampler, for a milestone's grid


@contextmanager
def keep_records(
    config: Config,
    workspace: Workspace,
    lease: Lease | None,
    settings: Settings,
    resumed_from: int,
) -> Iterator[tuple[RunLog, snapshot.Writer]]:
    """Open the log and the snapshot writer, on rank 0 also MLflow and TensorBoard; close them.

    Rank 0 is the worker with the `lease`. `resumed_from` is the step of the snapshot that the run
    resumes from; 0: none.
    """
    log = RunLog(workspace.storage.scratch() / LOG)
    mirror = tracker = events = None
    if lease:
        identity = settings.train_fingerprint
        events = Events(folder_of(config, workspace, identity), resumed_from + 1)
        mirror = workspace.storage.mirror(LOG, lease.fence)
        log = RunLog(mirror.path, events.row)
        log.recover(config.train.steps)
        for row in read_rows(log.path):  # the run repeats these steps, but not their rows
            events.row(row)
        events.flush()
        mirror.start()
        tracker = Tracker.open(config, workspace, identity, log=log.path)
        tracker.params(config.record())

    def may_write() -> None:
        # The log is stored before the snapshot: a run that resumes from it never repeats its rows.
        if lease and mirror:
            lease.check(patient=True)
            log.flush()
            mirror.push()
        if events:
            events.flush()  # a run that resumes from the snapshot writes only later rows

    def written(step: int) -> None:
        snapshot.prune(workspace, config.train)
        grid = workspace.path(f"{snapshot_key(step)}/{GRID}")
        if tracker and events and grid.exists():
            tracker.artifact(grid, f"training/{step_name(step)}")
            events.image(step, "grid", grid.read_bytes())

    writer = snapshot.Writer(workspace, may_write, written, resumed_from or None)
    status = "FAILED"
    try:
        yield log, writer
        status = "FINISHED"
    except Interrupted:
        status = "KILLED"
        raise
    finally:
        writer.close()
        if mirror:
            _close_log(log, mirror)
        if tracker and events:
            events.close()
            tracker.close(status=status)


def catch_up(config: Config, workspace: Workspace, identity: str) -> None:
    """Complete the copies of the records of a run that has ended.

    MLflow gets what an earlier command could not send; TensorBoard gets all rows if it has none.
    """
    Tracker.catch_up(config, workspace, identity)
    folder = folder_of(config, workspace, identity)
    if folder is not None:
        write_rows(folder, read_rows(workspace.path(LOG)))


def _close_log(log: RunLog, mirror: Mirror) -> None:
    """Store the last rows; a failure is a warning, since the last snapshot does not need them."""
    for action in (log.flush, mirror.close):
        try:
            action()
        except OSError as error:
            warn(f"Cannot store the last rows of the log: {error.strerror}.")


def preview(
    config: Config, device: torch.device, contents: snapshot.SnapshotContents
) -> dict[str, bytes]:
    """Draw `train.grid` images with a snapshot's first average, or its raw weights: grid.png."""
    settings, ema = contents.settings, config.train.ema
    network = UNetConfig.from_dict(settings.network)
    model = UNet(network)
    model.load_state_dict(dict(contents.tensors[ema_name(ema[0]) if ema else WEIGHTS]))
    model = model.to(device).eval().requires_grad_(False)
    count, steps = config.train.grid, min(PREVIEW_STEPS, config.diffusion.timesteps)
    sample = Sample(count=count, batch_size=count, steps=steps)
    found = contents.tensors.get(MOMENTS)
    moments = read_moments(found, network, MOMENTS) if found else None
    sampler = ImageSampler(model, settings.data, sample, config.diffusion, moments=moments)
    return {GRID: grid_png(sampler.images(range(count)))}
