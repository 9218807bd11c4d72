"""Where the time of training goes, per phase and worker."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

PHASES = {
    "data": "reading images",
    "compute": "forward and backward",
    "reduce": "all-reduce",
    "optimizer": "optimizer and averages",
    "snapshot": "snapshots",
    "other": "the rest",
}
# The phases that show which worker is slow; the all-reduce includes the wait for other workers.
_BUSY = [list(PHASES).index(phase) for phase in ("data", "compute", "optimizer")]


class Stopwatch:
    """Measures the seconds of each phase on one worker; on CUDA by events, without waiting."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._events: list[tuple[str, Any, Any]] = []
        self._last = self._now()

    def mark(self, phase: str) -> None:
        """Count the time since the last mark as this phase."""
        now = self._now()
        if self._device.type == "cuda":
            self._events.append((phase, self._last, now))
        else:
            self._seconds[phase] += now - self._last
        self._last = now

    def take(self) -> Tensor:
        """Return the seconds of each phase since the last call: float64 (phases,), on the CPU."""
        if self._events:
            self._events[-1][2].synchronize()
        for phase, begin, end in self._events:
            self._seconds[phase] += begin.elapsed_time(end) / 1000
        taken = torch.tensor(list(self._seconds.values()), dtype=torch.float64)
        self._seconds, self._events = dict.fromkeys(PHASES, 0.0), []
        return taken

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


class Throughput:
    """Adds up the seconds and images of all workers since the run began."""

    def __init__(self, workers: int) -> None:
        self._seconds = torch.zeros(workers, len(PHASES), dtype=torch.float64)
        self._images = [0] * workers

    def row(self, seconds: Tensor, images: Sequence[int]) -> dict[str, float]:
        """Return the fields of a log row for seconds (workers, phases) and images per worker.

        `share/PHASE` is the share of rank 0. With several workers, `worker-N/share/PHASE` is that
        of each, `slowest_worker` the rank that the others wait for, and `slowest_ratio` its time
        for a batch divided by that of the fastest worker.
        """
        self._seconds += seconds
        self._images = [have + new for have, new in zip(self._images, images, strict=True)]
        shares = _shares(seconds)
        row = {f"share/{phase}": float(s) for phase, s in zip(PHASES, shares[0], strict=True)}
        if len(seconds) > 1:
            for worker, own in enumerate(shares):
                row |= {
                    f"worker-{worker}/share/{phase}": float(s)
                    for phase, s in zip(PHASES, own, strict=True)
                }
            busy = seconds[:, _BUSY].sum(1)
            row["slowest_worker"] = float(busy.argmax())
            row["slowest_ratio"] = float(busy.max() / busy.min().clamp_min(1e-9))
        return row

    def summary(self) -> list[str]:
        """Return one line per worker: images/s while it does not wait, and the shares.

        Empty before the first row of the log.
        """
        if not self._seconds.any():
            return []
        busy = self._seconds[:, _BUSY].sum(1).clamp_min(1e-9)
        lines = []
        for worker, shares in enumerate(_shares(self._seconds)):
            parts = ", ".join(
                f"{label} {float(share):.0%}"
                for label, share in zip(PHASES.values(), shares, strict=True)
            )
            rate = self._images[worker] / float(busy[worker])
            lines.append(f"worker {worker}: {rate:,.0f} images/s when it does not wait; {parts}.")
        return lines


def _shares(seconds: Tensor) -> Tensor:
    return seconds / seconds.sum(1, keepdim=True).clamp_min(1e-9)
