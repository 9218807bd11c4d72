"""Who may train in a workspace: one run at a time.

The owner holds a lease in lease.json, renewed by a heartbeat and numbered by a fence that only
grows. A second run is refused with the owner named. The lease of a dead owner is taken over: at
once where the kernel says so (it released the owner's file lock), else when it has run out.
"""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from ddpm_core.console import warn
from ddpm_core.errors import UserError
from ddpm_core.workspace import Workspace

LEASE = "lease.json"
HEARTBEAT = 5.0  # seconds between renewals
LIFETIME = 30.0  # seconds that a lease holds without one


@contextmanager
def hold(workspace: Workspace) -> Iterator[Lease]:
    """Own the workspace for a while. Raises UserError, naming the owner, if it is taken."""
    lock = _lock(workspace)
    lease = Lease(workspace, _next_fence(workspace))
    lease.start()
    try:
        yield lease
    finally:
        lease.stop()
        lock.close()


class Lease:
    """A held lease; `check` tells whether it still is."""

    def __init__(self, workspace: Workspace, fence: int) -> None:
        self._workspace = workspace
        self._fence = fence
        self._id = uuid.uuid4().hex
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._lost = ""

    def start(self) -> None:
        self._renew()
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
        if not self._lost:
            with suppress(OSError):
                self._renew(0.0)

    def check(self) -> None:
        """Raises UserError if another run has taken the workspace over."""
        if self._lost:
            raise UserError(self._lost)

    def _beat(self) -> None:
        while not self._stopped.wait(HEARTBEAT):
            held = self._workspace.read_json(LEASE)
            if held and held.get("id") != self._id:
                self._lost = f"The workspace was taken over by {describe(held)}; this run stops."
                return
            try:
                self._renew()
            except OSError as error:
                warn(f"Cannot renew the lease of the workspace: {error.strerror}.")

    def _renew(self, now: float | None = None) -> None:
        """Write the lease; a renewal at time 0 gives it back, and keeps the fence's number."""
        self._workspace.write_json(
            LEASE,
            {
                "id": self._id,
                "fence": self._fence,
                "host": socket.gethostname(),
                "boot": _boot(),
                "pid": os.getpid(),
                "renewed": time.time() if now is None else now,
            },
        )


def describe(held: dict[str, Any]) -> str:
    return f"process {held.get('pid', '?')} on {held.get('host', '?')}"


def _lock(workspace: Workspace) -> IO[str]:
    """The kernel's lock of the workspace: gone with the process, however that ended."""
    file = workspace.path(".lock").open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UserError(_taken(workspace, workspace.read_json(LEASE))) from None
    return file


def _next_fence(workspace: Workspace) -> int:
    held = workspace.read_json(LEASE)
    age = time.time() - float(held.get("renewed", 0.0))
    if held and held.get("boot") != _boot() and 0 <= age < LIFETIME:
        raise UserError(
            f"{_taken(workspace, held)} If it is dead, its lease runs out in "
            f"{LIFETIME - age:.0f} seconds."
        )
    return int(held.get("fence", 0)) + 1


def _taken(workspace: Workspace, held: dict[str, Any]) -> str:
    return (
        f"The workspace {workspace.uri} is being trained in by {describe(held)}. "
        "Wait for it, stop it, or give another with -w."
    )


def _boot() -> str:
    """What tells this running machine from another: Linux's boot id, elsewhere the host name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
