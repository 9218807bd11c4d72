"""Stop on a signal: all workers agree on the step, and no device waits for the decision."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from ddpm_core.console import say
from ddpm_core.runtime.distributed import WorkerLost, World

STOP_STATUS = 128 + signal.SIGTERM  # the exit status where this worker itself got no signal
LAG = 2  # steps between setting a flag and reading it; by then the device has long computed it
POLL = 0.0005  # seconds between two looks at a CUDA event
GRACE = 20.0  # seconds that the current step may take after a signal


class StopRequest:
    """Turn SIGTERM, Ctrl-C, a closed terminal or torchrun's death into a stop of all workers.

    Each worker passes a flag into the reduction of every step. The sum is read `LAG` steps later,
    so every worker stops at the same step, and none waits for its device. A second signal ends
    the process at once. `status` is the exit status for this worker's signal; 0: none arrived.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._flags: dict[int, tuple[torch.Tensor, Any]] = {}
        self._current = torch.zeros(())
        self.status = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def flag(self) -> torch.Tensor:
        """Return 1 if this worker wants to stop, else 0, for the reduction to sum in place."""
        if not self.status and self._world.abandoned():
            self.status = STOP_STATUS
            say("torchrun is gone: finishing this step and saving.")
        self._current = torch.full((), float(self.status > 0), device=self._world.device)
        return self._current

    def note(self, step: int) -> None:
        """Keep the summed flag of the step just taken, for `agreed` to read."""
        if self._world.size == 1:
            return
        if self._world.device.type != "cuda":
            self._flags[step] = self._current, None
            return
        host = torch.empty((), pin_memory=True).copy_(self._current, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._flags[step] = host, event

    def agreed(self, step: int) -> bool:
        """Return whether all workers stop after step number `step`."""
        if self._world.size == 1:
            return self.status > 0
        flag, event = self._flags.pop(step - LAG, (None, None))
        if event is not None:
            self._wait(event)
        return flag is not None and bool(flag > 0)

    def settle(self) -> None:
        """Wait until the device has finished its work; call this before reading values from it.

        CUDA's own wait handles no signals, and never returns if another worker died in the step.
        """
        if self._world.size > 1 and self._world.device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._wait(event)

    def _wait(self, event: Any) -> None:
        """Wait for an event on the device. Raises WorkerLost GRACE seconds after a signal."""
        signalled = 0.0
        while not event.query():
            time.sleep(POLL)
            if self.status and not signalled:
                signalled = time.monotonic()
            if signalled and time.monotonic() - signalled > GRACE:
                error = TimeoutError(f"its step did not end within {GRACE:g} s of the signal")
                raise WorkerLost(self._world, error)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.status = 128 + number
        # The kernel does not apply a signal's default action to the first process of a container.
        signal.signal(number, _exit_now if os.getpid() == 1 else signal.SIG_DFL)
        say(
            f"{signal.Signals(number).name}: finishing this step and saving. "
            "Send it again to stop at once."
        )


def _exit_now(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)
