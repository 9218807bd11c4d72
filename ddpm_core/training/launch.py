"""How `train` is started: alone, as a worker under torchrun, or as several workers at once."""

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
from ddpm_core.training.trainer import train as train_here

FROM_STEP = "--from-step"
GRACE = 120  # seconds that workers asked to stop have to save; torchrun's own is 30


def train(
    config: Config,
    environment: Mapping[str, str],
    arguments: Sequence[str],
    strict: bool = False,
    from_step: int | None = None,
    dry_run: bool = False,
) -> None:
    """Train here if this is a worker or the only one; else start the workers."""
    workspace = Workspace.open(config.workspace)
    worker = "WORLD_SIZE" in environment  # whoever started it has decided how many there are
    count = (
        int(environment["WORLD_SIZE"])
        if worker
        else devices.processes(config.train.processes, config.device)
    )
    if dry_run:
        typer.echo(describe(config, workspace, count))
        return
    if count > 1 and not worker:
        with told_without(from_step):
            launch(count, arguments, config.train.restarts)
        return
    if int(environment.get("TORCHELASTIC_RESTART_COUNT", 0)):
        from_step = None  # was honoured by the first start
    with told_without(from_step):
        devices.choose_device(config.device)
        data = open_dataset(workspace)  # before the workers meet, so that none waits while it comes
        with distributed.world(config.device, environment, config.train.worker_timeout) as world:
            train_here(config, workspace, data, world, Policy(strict, from_step))


@contextmanager
def told_without(from_step: int | None) -> Iterator[None]:
    """After a stop, say that --from-step is not for the command that goes on."""
    try:
        yield
    except Interrupted as stop:
        if from_step is None or isinstance(stop, distributed.WorkerLost):
            raise
        raise Interrupted(
            f"{stop} Leave out --from-step {from_step}, which would begin there once more.",
            stop.status,
        ) from stop


def launch(count: int, arguments: Sequence[str], restarts: int) -> None:
    """Run `ddpm ARGUMENTS` as `count` workers under torchrun, in this process.

    Raises Interrupted with the exit status that they ended with. After a death, a hang or a stop
    of one worker (a status of 128 or more) all start again, `restarts` times at most. A status
    below is the user's to mend: nothing would be better at the next attempt. --from-step is for
    the first start alone: what was trained since then is newer.
    """
    for left in range(restarts, -1, -1):
        status = _attempt(count, arguments)
        if status == 0:
            return
        if status < 128 or left == 0:
            break
        say(f"A worker ended with status {status}; all start again, at most {left} times.")
        arguments = without_step(arguments)
    raise Interrupted(f"Training by {count} processes ended with status {status}.", status)


def without_step(arguments: Sequence[str]) -> list[str]:
    """A command line without --from-step, in either of its spellings."""
    kept: list[str] = []
    given = iter(arguments)
    for one in given:
        if one == FROM_STEP:
            next(given, None)
        elif not one.startswith(f"{FROM_STEP}="):
            kept.append(one)
    return kept


def importing_alike() -> dict[str, str]:
    """The environment in which another Python looks for modules where this one does.

    With `-m` it would look in the current directory first, where a file may have any module's name.
    """
    return {} if {"", str(Path.cwd())} & set(sys.path) else {"PYTHONSAFEPATH": "1"}


def _attempt(count: int, arguments: Sequence[str]) -> int:
    """One start of all workers, until all or any have ended; their status.

    Raises Interrupted after a signal, which goes on to the workers: they save and leave.
    """
    # Imported here, since a worker that trains alone starts sooner without them.
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(GRACE))
    os.environ.update(importing_alike())
    options = ["--standalone", f"--nproc-per-node={count}", "--max-restarts=0"]
    handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        parsed = torchrun.parse_args([*options, "-m", "ddpm_core.cli", *arguments])  # type: ignore[no-untyped-call]
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as nohup wants a closed terminal
            parsed.signals_to_handle = "SIGTERM,SIGINT,SIGQUIT"
        torchrun.run(parsed)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        mended = [code for code in codes if 0 < code < 128]
        code = mended[0] if mended else error.get_first_failure()[1].exitcode
        return 128 - code if code < 0 else code
    except SignalException as stop:
        raise Interrupted(
            f"{stop.sigval.name}: the {count} processes were stopped. "
            "The same command goes on from the newest snapshot.",
            128 + stop.sigval,
        ) from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return 0
