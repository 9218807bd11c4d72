"""Run `ddpm` as a user does: in a separate process and folder.

The processes are forked from one that has imported torch, which takes seconds. They are real
processes with separate memory, and tests can kill them.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

# The device of tests for CUDA. DDPM_TEST_GPU=cpu runs them without a GPU.
GPU = os.environ.get("DDPM_TEST_GPU", "cuda")

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "ddpm_core.cli",
        "ddpm_core.data.prepare",
        "ddpm_core.training.launch",
        "ddpm_core.sampling.run",
        "ddpm_core.chain",
        "torch.distributed.run",
        "boto3",
    ]
)

TINY = """
seed: 3
workspace: workspace
prepare: {image_size: 8, workers: 1}
model: {channels: 8, multipliers: [1], blocks: 1, attention: [8]}
diffusion: {timesteps: 50}
train:
  steps: 12
  batch_size: 8
  log_every: 2
  snapshot_every: 4
  milestone_every: 6
  keep: 2
  grid: 4
  optimizer: {warmup: 2}
  ema: [0.9]
sample: {count: 20, batch_size: 8, steps: 4}
tracking: {uri: ""}
"""


def write_params(folder: Path, text: str = TINY) -> Path:
    file = folder / "params.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def prepare_run(folder: Path, text: str) -> Path:
    """Write params and prepare data in a folder; return the folder."""
    write_params(folder, text)
    ddpm(folder, "prepare")
    return folder


def new_run(begun: Path, name: str, text: str, *parts: str) -> Path:
    """Return a new run below `begun`, with links to these parts of its workspace."""
    folder = begun / name
    (folder / "workspace").mkdir(parents=True)
    for part in parts or ("data",):
        (folder / "workspace" / part).symlink_to(begun / "workspace" / part)
    write_params(folder, text)
    return folder


def settings(*given: str) -> list[str]:
    """Return `section.key=value` settings as command line arguments."""
    return [part for one in given for part in ("-S", one)]


def environment() -> dict[str, str]:
    """Return the environment of the tests with one thread and a fixed terminal width."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}


def command(*arguments: str) -> list[str]:
    """Return the command line for a process that is not forked."""
    return [sys.executable, "-m", "ddpm_core.cli", *arguments]


def _run(folder: Path, arguments: tuple[str, ...], output: Path) -> None:
    gc.freeze()  # memory that the collector does not touch stays shared
    os.setsid()
    os.chdir(folder)
    os.environ.update(environment())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup makes the tests ignore it
    written = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(written, 1)
    os.dup2(written, 2)
    sys.argv = ["ddpm", *arguments]
    from ddpm_core.cli import main

    main()


def run_in(added: dict[str, str], folder: Path, arguments: tuple[str, ...], output: Path) -> None:
    """Run the program with more environment variables, which may include TMPDIR."""
    os.environ.update(added)
    tempfile.tempdir = None
    _run(folder, arguments, output)


class Program:
    """A running `ddpm ARGUMENTS`; its output goes to a file beside its folder."""

    def __init__(
        self, folder: Path, arguments: tuple[str, ...], target: Callable[..., None] = _run
    ) -> None:
        """Fork a process that calls `target(folder, arguments, output file)`."""
        self._output = folder.parent / f".said-{time.monotonic_ns()}"
        self._process = _context.Process(target=target, args=(folder, arguments, self._output))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self, limit: float) -> bool:
        """Return whether the program ended within `limit` seconds."""
        self._process.join(limit)
        return self._process.exitcode is not None

    def ended(self, limit: float = 120.0) -> str:
        """Wait for the end and return the output. Raises AssertionError after `limit` seconds."""
        if not self.wait(limit):
            self.send_signal(signal.SIGKILL)
            raise AssertionError(f"ddpm did not end in {limit} seconds; output:\n{self.said()}")
        return self.said()

    def said(self) -> str:
        """Return the output so far, of stdout and stderr."""
        return self._output.read_text(errors="replace") if self._output.exists() else ""


def ddpm(folder: Path, *arguments: str, status: int | None = 0) -> str:
    """Run `ddpm ARGUMENTS`, check its exit status, and return its output."""
    program = Program(folder, arguments)
    said = program.ended()
    assert status is None or program.returncode == status, said
    return said


def start(folder: Path, *arguments: str, **environment: str) -> Program:
    """Start `ddpm ARGUMENTS` in a separate session."""
    return Program(folder, arguments, partial(run_in, environment))


def wait_until(
    condition: Callable[[], bool], program: Program, limit: float = 60.0, pause: float = 0.004
) -> bool:
    """Return whether the condition became true while the program was running."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        if program.wait(pause):
            return condition()
    return True
