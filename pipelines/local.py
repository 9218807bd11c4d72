"""The pipeline in processes of this machine, by kfp.local."""

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

GRACE = 120.0  # seconds that tasks have to save after a signal
PROCESS = {"backend": "process", "tracking": "", "job": {}}  # inputs of a run without a cluster


def run(pipeline: Any, root: Path, inputs: dict[str, Any]) -> int:
    """Run all tasks; artifacts go below `root`. The exit status: 1 where a task failed."""

    def work() -> int:
        from kfp import local
        from kfp.local import logging_utils

        # What it warns of: that the image's name is not python's, and that requests and limits
        # of pods mean nothing here.
        warnings.filterwarnings("ignore", module=r"kfp\.local\.")
        # It indents what tasks say by replacing print, ever more with parallel ones.
        logging_utils.indented_print = contextlib.nullcontext
        local.init(local.SubprocessRunner(use_venv=False), pipeline_root=str(root))
        try:
            pipeline(**inputs)
        except RuntimeError as error:
            print(f"local: {error} Its last lines above say why.", file=sys.stderr)
            return 1
        return 0

    return in_session(work)


def in_session(work: Callable[[], int]) -> int:
    """The status of `work`, done by a child whose tasks get the signals that come here.

    kfp.local passes none on, and its tasks would go on alone.
    """
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.setsid()
        status = 1
        try:
            status = work()
        except Exception:  # nobody hears of it after _exit
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
    _let_end(child)
    return 128 - status if status < 0 else status


def _let_end(group: int) -> None:
    """Wait for tasks that are still saving, and then no longer."""
    deadline = time.monotonic() + GRACE
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.05)
        os.killpg(group, signal.SIGKILL)
