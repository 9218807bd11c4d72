"""Start a training run on several workers, as a user does, and control its processes.

`torchrun` and `ddpm` are the real command lines. `forked` runs torchrun's agent and its workers in
processes forked from one that has imported torch: the same agent and rendezvous, without the
seconds that each import takes.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing.forkserver
import os
import signal
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from support.program import Program, environment

RESTARTS = 3
STARTS = "starts"  # a forked worker notes its process id in starts/RANK
# Detects a killed node within seconds; torchrun's own values are larger.
RENDEZVOUS = {"keep_alive_interval": 1, "keep_alive_max_attempt": 3, "last_call_timeout": 1}


class Attempt:
    """A started run; `folder` contains its params.yaml."""

    def __init__(
        self,
        folder: Path,
        start: str,
        size: int,
        endpoint: str = "",
        node: int = 0,
        restarts: int = RESTARTS,
        beside: Callable[[], None] | None = None,
        arguments: tuple[str, ...] = ("train",),
    ) -> None:
        """Start node number `node` of a run whose nodes connect at `endpoint`.

        Each forked worker calls `beside` before it begins, and runs `ddpm ARGUMENTS`.
        """
        self.folder, self.start, self.size, self.node = folder, start, size, node
        self._seen: set[int] = set()
        if start == "forked":
            given = (str(size), endpoint, str(node), str(restarts), *arguments)
            self._program: Any = Program(folder, given, partial(_agent, beside=beside))
        else:
            self._program = _Started(folder, _command_line(start, size, restarts))

    @property
    def pid(self) -> int:
        return int(self._program.pid)

    @property
    def returncode(self) -> int | None:
        code = self._program.returncode
        return None if code is None else int(code)

    def said(self) -> str:
        return str(self._program.said())

    def wait(self, limit: float) -> bool:
        return bool(self._program.wait(limit))

    def workers(self) -> dict[int, int]:
        """Return the process ID of each local rank that is running."""
        found = self._forked() if self.start == "forked" else _children(self.pid)
        self._seen |= set(found.values())
        return found

    def kill(self, number: int, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def kill_all(self) -> None:
        """Kill all processes, the agent first, so that it restarts no worker."""
        workers = self.workers()
        for pid in (self.pid, *workers.values()):
            self.kill(signal.SIGKILL, pid)
        self.wait(30)
        until(lambda: not self.left(), "the killed workers are gone")

    def left(self) -> list[int]:
        """Return the known workers that are still running."""
        return [pid for pid in self._seen if running(pid)]

    def close(self) -> None:
        """Kill every process that is left."""
        with contextlib.suppress(OSError):
            self.workers()
        for pid in (self.pid, *self._seen):
            self.kill(signal.SIGKILL, pid)
        self.wait(30)

    def _forked(self) -> dict[int, int]:
        found = {}
        for file in (self.folder / STARTS).glob(f"{self.node}-*"):
            with contextlib.suppress(ValueError):
                pid = int(file.read_text() or "0")
                if running(pid):
                    found[int(file.name.partition("-")[2])] = pid
        return found


def together(
    folder: Path,
    size: int,
    *arguments: str,
    beside: Callable[[], None] | None = None,
    status: int = 0,
) -> str:
    """Run `ddpm ARGUMENTS` on `size` forked workers of torchrun, and return the output."""
    attempt = Attempt(folder, "forked", size, restarts=0, beside=beside, arguments=arguments)
    try:
        assert attempt.wait(120), f"not ended within 120 s:\n{attempt.said()}"
        assert attempt.returncode == status, attempt.said()
        return attempt.said()
    finally:
        attempt.close()


class _Started:
    """The process of a command line, with the interface of a forked one."""

    def __init__(self, folder: Path, command: list[str]) -> None:
        self._output = folder.parent / f".said-{time.monotonic_ns()}"
        with self._output.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment(),
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def wait(self, limit: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(limit)
        return self._process.poll() is not None

    def said(self) -> str:
        return self._output.read_text(errors="replace")


def _command_line(start: str, size: int, restarts: int) -> list[str]:
    ours = ["-m", "ddpm_core.cli", "train"]
    if start == "ddpm":
        return [sys.executable, *ours, "-S", f"train.processes={size}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, f"--nproc-per-node={size}", f"--max-restarts={restarts}", *ours]


def _agent(
    folder: Path,
    arguments: tuple[str, ...],
    output: Path,
    beside: Callable[[], None] | None,
) -> None:
    """torchrun's agent, as `torchrun --nproc-per-node=SIZE` runs it, with forked workers."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    size, endpoint, node, restarts, *rest = arguments
    _move_in(folder, output)
    os.setsid()
    # This process inherits the fork server of the tests, and must not start another.
    multiprocessing.forkserver._forkserver.ensure_running = lambda: None  # type: ignore
    if endpoint:  # see docs/elastic.md
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=2 if endpoint else 1,
        nproc_per_node=int(size),
        run_id="nodes" if endpoint else uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=endpoint or "localhost:0",
        rdzv_configs=dict(RENDEZVOUS),
        max_restarts=int(restarts),
        start_method="forkserver",
        local_addr="localhost",
    )
    try:
        elastic_launch(config, _worker)(folder, node, tuple(rest), output, beside)
    except SignalException as stop:
        sys.exit(128 + stop.sigval)
    except ChildFailedError:
        sys.exit(1)


def _worker(
    folder: Path,
    node: str,
    arguments: tuple[str, ...],
    output: Path,
    beside: Callable[[], None] | None,
) -> None:
    _move_in(folder, output)
    note = folder / STARTS / f"{node}-{os.environ['LOCAL_RANK']}"
    note.parent.mkdir(exist_ok=True)
    note.write_text(str(os.getpid()))
    sys.argv = ["ddpm", *arguments]
    if beside:
        beside()
    from ddpm_core.cli import main

    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
    except BaseException:
        traceback.print_exc()
        raise


def _move_in(folder: Path, output: Path) -> None:
    gc.freeze()
    os.chdir(folder)
    os.environ.update(environment())
    written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(written, 1)
    os.dup2(written, 2)


def _children(agent: int) -> dict[int, int]:
    """Return the agent's children that have a rank in their environment."""
    found = {}
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{agent}/task").iterdir():
            for pid in (task / "children").read_text().split():
                with contextlib.suppress(OSError):
                    lines = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                    ranks = [line[11:] for line in lines if line.startswith(b"LOCAL_RANK=")]
                    if ranks and running(int(pid)):
                        found[int(ranks[0])] = int(pid)
    return found


def running(pid: int) -> bool:
    """Return whether a process is running; False for a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False


def until(
    condition: Callable[[], object], what: str, limit: float = 60.0, pause: float = 0.01
) -> None:
    """Check every `pause` seconds until it is true. Raises AssertionError after `limit` seconds."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {limit:g} s"
        time.sleep(pause)
