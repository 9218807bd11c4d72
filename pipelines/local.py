"""Run the pipeline in processes on this machine, with kfp.local."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

GRACE = 120.0  # seconds for tasks to save after a signal
PROCESS = {"backend": "process", "tracking": "", "job": {}}  # inputs of a run without a cluster


def run(pipeline: Any, root: Path, inputs: dict[str, Any]) -> int:
    """Run all tasks with artifacts below `root`; return the exit status, 1 if a task failed."""

    def work() -> int:
        from kfp import local
        from kfp.local import logging_utils

        # kfp.local warns that the image is not a Python image, and that requests and limits of
        # pods have no effect.
        warnings.filterwarnings("ignore", module=r"kfp\.local\.")
        # kfp.local indents the tasks' output by replacing print, more and more with parallel tasks.
        logging_utils.indented_print = contextlib.nullcontext
        local.init(local.SubprocessRunner(use_venv=False), pipeline_root=str(root))
        try:
            pipeline(**inputs)
        except RuntimeError as error:
            print(f"local: {error} For the cause see its last lines above.", file=sys.stderr)
            return 1
        return 0

    return in_session(work)


def in_session(work: Callable[[], int]) -> int:
    """Run `work` in a child process, forward signals to all its tasks, and return its status.

    kfp.local itself does not forward signals, so its tasks would keep running.
    """
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.setsid()
        status = 1
        try:
            status = work()
        except Exception:  # os._exit prints nothing
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def forward(number: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, forward)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    _await_tasks(child)
    return 128 - status if status < 0 else status


def _await_tasks(group: int) -> None:
    """Wait GRACE seconds for tasks that are still saving, then kill them."""
    deadline = time.monotonic() + GRACE
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.05)
        os.killpg(group, signal.SIGKILL)
