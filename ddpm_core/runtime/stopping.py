"""A request to stop, agreed by all workers without making a device wait."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from ddpm_core.console import say
from ddpm_core.runtime.distributed import WorkerLost, World

ASKED = 128 + signal.SIGTERM  # the exit status after a stop that all workers were asked for
LAG = 2  # steps between a wish and its being read: by then the device has long passed it
LOOK = 0.0005  # seconds between two looks at a GPU
GRACE = 20.0  # seconds that the step at work may take after the signal


class StopRequest:
    """SIGTERM, Ctrl-C, a closed terminal or torchrun's death, told to all by the next reduction.

    Each step's summed wish is read `LAG` steps later, on every worker at the same step. A second
    signal ends the process at once. `status` is the exit status that the stop calls for; 0: this
    worker was not asked, or not yet.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._wishes: dict[int, tuple[torch.Tensor, Any]] = {}
        self._current = torch.zeros(())
        self.status = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup wants a closed terminal
                self._previous[number] = signal.signal(number, self._asked)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def wish(self) -> torch.Tensor:
        """This worker's wish for the coming step, to be summed over all workers in place."""
        if not self.status and self._world.abandoned():
            self.status = ASKED
            say("torchrun is gone: finishing this step and saving.")
        self._current = torch.full((), float(self.status > 0), device=self._world.device)
        return self._current

    def note(self, step: int) -> None:
        """Keep the summed wish of the step just taken, for `agreed` to read."""
        if self._world.size == 1:
            return
        if self._world.device.type != "cuda":
            self._wishes[step] = self._current, None
            return
        host = torch.empty((), pin_memory=True).copy_(self._current, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._wishes[step] = host, event

    def agreed(self, step: int) -> bool:
        """Whether all workers stop before the step that follows `step`."""
        if self._world.size == 1:
            return self.status > 0
        wish, event = self._wishes.pop(step - LAG, (None, None))
        if event is not None:
            self._wait(event)
        return wish is not None and bool(wish > 0)

    def settle(self) -> None:
        """Wait until the device has done all that it was given, before something is read from it.

        Who waits within CUDA hears no signal; and a step in which another worker died never ends.
        """
        if self._world.size > 1 and self._world.device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._wait(event)

    def _wait(self, event: Any) -> None:
        """Until the device has passed an event; not for ever once this worker is to stop."""
        asked = 0.0
        while not event.query():
            time.sleep(LOOK)
            if self.status and not asked:
                asked = time.monotonic()
            if asked and time.monotonic() - asked > GRACE:
                error = TimeoutError(f"its step did not end within {GRACE:g} s of the signal")
                raise WorkerLost(self._world, error)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        self.status = 128 + number
        # The first process of a container can't be ended by a default action.
        signal.signal(number, _at_once if os.getpid() == 1 else signal.SIG_DFL)
        say(
            f"{signal.Signals(number).name}: finishing this step and saving; again to stop at once."
        )


def _at_once(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)
