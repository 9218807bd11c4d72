"""Start training: in this process, as a worker of torchrun, or as several new workers."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer

from ddpm_core.config import Config
from ddpm_core.console import say
from ddpm_core.data.dataset import open_dataset
from ddpm_core.errors import Interrupted
from ddpm_core.runtime import device as devices
from ddpm_core.runtime import distributed
from ddpm_core.storage.workspace import Workspace
from ddpm_core.training.dry_run import describe
from ddpm_core.training.resume import Policy
from ddpm_core.training.trainer import train as train_in_process

FROM_STEP = "--from-step"
SHUTDOWN_TIMEOUT = 120  # seconds for workers to save after a signal; torchrun's default is 30


def train(
    config: Config,
    environment: Mapping[str, str],
    arguments: Sequence[str],
    strict: bool = False,
    from_step: int | None = None,
    dry_run: bool = False,
) -> None:
    """Train in this process if it is a worker or the only one; else start the workers."""
    workspace = Workspace.open(config.workspace)
    worker = "WORLD_SIZE" in environment  # torchrun has decided the number of workers
    count = (
        int(environment["WORLD_SIZE"])
        if worker
        else devices.worker_count(config.train.processes, config.device)
    )
    if dry_run:
        typer.echo(describe(config, workspace, count))
        return
    if count > 1 and not worker:
        with advise_on_from_step(from_step):
            launch(count, arguments, config.train.restarts)
        return
    if int(environment.get("TORCHELASTIC_RESTART_COUNT", 0)):
        from_step = None  # the first start has used it
    with advise_on_from_step(from_step):
        devices.choose_device(config.device)
        data = open_dataset(workspace)  # before connecting, so no worker times out on a download
        with distributed.world(config.device, environment, config.train.worker_timeout) as world:
            train_in_process(config, workspace, data, world, Policy(strict, from_step))


@contextmanager
def advise_on_from_step(from_step: int | None) -> Iterator[None]:
    """Add to the message of a stop that --from-step must be left out to resume."""
    try:
        yield
    except Interrupted as stop:
        if from_step is None or isinstance(stop, distributed.WorkerLost):
            raise
        raise Interrupted(
            f"{stop} Leave out --from-step {from_step}, which would start from that step again.",
            stop.status,
        ) from stop


def launch(count: int, arguments: Sequence[str], restarts: int) -> None:
    """Run `ddpm ARGUMENTS` as `count` workers under torchrun, in this process.

    If a worker dies, hangs or is stopped (status 128 or more), all start again, up to `restarts`
    times. A lower status is an error that the user must fix, so no restart would help. Restarts
    leave out --from-step, since newer snapshots exist by then. Raises Interrupted with the exit
    status of the workers.
    """
    for left in range(restarts, -1, -1):
        status = _attempt(count, arguments)
        if status == 0:
            return
        if status < 128 or left == 0:
            break
        say(f"A worker ended with status {status}. Restarting all; {left} restarts left.")
        arguments = without_step(arguments)
    raise Interrupted(f"Training by {count} processes ended with status {status}.", status)


def without_step(arguments: Sequence[str]) -> list[str]:
    """Return a command line without --from-step N or --from-step=N."""
    kept: list[str] = []
    given = iter(arguments)
    for argument in given:
        if argument == FROM_STEP:
            next(given, None)
        elif not argument.startswith(f"{FROM_STEP}="):
            kept.append(argument)
    return kept


def same_import_path() -> dict[str, str]:
    """Return environment variables with which `python -m` imports the same modules as this process.

    By default `-m` searches the current directory first, where a file may shadow any module.
    """
    return {} if {"", str(Path.cwd())} & set(sys.path) else {"PYTHONSAFEPATH": "1"}


def _attempt(count: int, arguments: Sequence[str]) -> int:
    """Start all workers, wait until all or any have ended, and return their exit status.

    A signal is passed on to the workers, which save and exit; then raises Interrupted.
    """
    # Imported here because a single worker starts faster without them.
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_TIMEOUT))
    os.environ.update(same_import_path())
    # torchrun itself restarts nothing, because the arguments change: see `launch`.
    options = ["--standalone", f"--nproc-per-node={count}", "--max-restarts=0"]
    handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        parsed = torchrun.parse_args([*options, "-m", "ddpm_core.cli", *arguments])  # type: ignore[no-untyped-call]
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup ignores SIGHUP
            parsed.signals_to_handle = "SIGTERM,SIGINT,SIGQUIT"
        torchrun.run(parsed)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        errors = [code for code in codes if 0 < code < 128]  # which the user must fix
        code = errors[0] if errors else error.get_first_failure()[1].exitcode
        return 128 - code if code < 0 else code
    except SignalException as stop:
        raise Interrupted(
            f"{stop.sigval.name}: stopped the {count} processes. "
            "To resume from the newest snapshot, run the same command again.",
            128 + stop.sigval,
        ) from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return 0
