"""Who may train in a workspace, or replace its data: one at a time.

The owner holds a lease in lease.json, renewed by a heartbeat and numbered by a fence that only
grows; each change replaces the version that was read, and no other. A second run is refused with
the owner named. The lease of a dead owner is taken over: at once where this machine knows it is
dead, else when it was not renewed for as long as it lasts.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from ddpm_core.console import Outage, say
from ddpm_core.errors import Corrupt, UserError
from ddpm_core.storage import Changed, Locked, Tagged, Unreachable
from ddpm_core.storage.files import Count, Schema, parse_object, validated
from ddpm_core.storage.workspace import Workspace

LEASE = "lease.json"
HEARTBEAT = 5.0  # seconds between renewals
LIFETIME = 30.0  # seconds that a lease holds without one
LOOK = 0.5  # seconds between two looks at a lease that may have run out


@contextmanager
def hold(workspace: Workspace) -> Iterator[Lease]:
    """Own the workspace for a while, swept of what killed runs left.

    Raises UserError, naming the owner, if it is taken.
    """
    with _locked(workspace) as locked:
        lease = Lease(workspace, _free(workspace, locked))
        with _told(workspace):
            lease.start()
        try:
            workspace.storage.sweep()
            yield lease
        finally:
            lease.stop()


class Held(Schema):
    """What lease.json says; an older one may say less."""

    id: str | None = None
    fence: Count = 0
    renewed: float = 0.0


class Lease:
    """A held lease; `check` tells whether it still is."""

    def __init__(self, workspace: Workspace, found: Tagged | None) -> None:
        """`found` is the lease that this one follows."""
        self._workspace = workspace
        self.fence = int(read(found).get("fence", 0)) + 1
        self._tag = found.tag if found else None
        self._id = uuid.uuid4().hex
        self._facts = _process(os.getpid())
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._lock = threading.Lock()
        self._renewed = time.monotonic()
        self._lost = ""
        self._outage = Outage()

    def start(self) -> None:
        """Raises UserError if another run was quicker."""
        try:
            self._renew()
        except Changed:
            held = read(self._workspace.storage.read_tagged(LEASE))
            raise UserError(_taken(self._workspace, held)) from None
        self._thread.start()

    def stop(self) -> None:
        """Give it back; the fence's number stays."""
        self._stopped.set()
        self._thread.join()
        if not self._lost:
            with suppress(OSError, Changed):
                self._renew(0.0)

    def check(self, patient: bool = False) -> None:
        """Raises UserError if another run has taken the workspace over.

        Who is `patient` also asks a storage that did not answer a moment ago.
        """
        # A process that was stopped for a while may get here before its heart beats.
        if time.monotonic() - self._renewed > LIFETIME / 2 and (patient or not self._outage.on):
            self._try_renew()
        if self._lost:
            raise UserError(self._lost)

    def _beat(self) -> None:
        while not self._stopped.wait(HEARTBEAT) and not self._lost:
            self._try_renew()

    def _try_renew(self) -> None:
        with self._lock:
            try:
                self._follow()
                self._renew()
            except Changed:
                with suppress(OSError):
                    self._note_loss()
            except OSError as error:
                self._outage.begins(f"Cannot renew the lease of the workspace: {error.strerror}.")
            else:
                self._outage.ends("The lease of the workspace is renewed again.")

    def _follow(self) -> None:
        """Accept a version of ours whose answer was lost. Raises Changed for another's."""
        found = self._workspace.storage.read_tagged(LEASE)
        if found and read(found).get("id") not in (self._id, None):
            raise Changed
        self._tag = found.tag if found else None

    def _note_loss(self) -> None:
        held = read(self._workspace.storage.read_tagged(LEASE))
        if held.get("id") != self._id:
            self._lost = f"The workspace was taken over by {describe(held)}; this run stops."

    def _renew(self, now: float | None = None) -> None:
        """Write the lease; a renewal at time 0 gives it back."""
        record = {
            "id": self._id,
            "fence": self.fence,
            "host": socket.gethostname(),
            "renewed": time.time() if now is None else now,
            **self._facts,
        }
        data = (json.dumps(record, indent=1, sort_keys=True) + "\n").encode()
        self._tag = self._workspace.storage.write_if(LEASE, data, self._tag)
        self._renewed = time.monotonic()


def read(found: Tagged | None) -> dict[str, Any]:
    """What a lease says; an absent or damaged one says nothing."""
    try:
        return validated(parse_object(found.data, LEASE), Held, LEASE) if found else {}
    except Corrupt:
        return {}


@contextmanager
def _locked(workspace: Workspace) -> Iterator[bool]:
    """The storage's own lock; whether it has one."""
    with ExitStack() as stack:
        try:
            with _told(workspace):
                locked = stack.enter_context(workspace.storage.lock())
        except Locked:
            raise UserError(_taken(workspace, workspace.read_json(LEASE))) from None
        yield locked


@contextmanager
def _told(workspace: Workspace) -> Iterator[None]:
    """Raises UserError where the lease, the first file that a run writes, can't be written."""
    try:
        yield
    except Unreachable:
        raise
    except OSError as error:
        raise UserError(
            f"Cannot write to the workspace {workspace.uri}: {error.strerror or error}."
        ) from error


def describe(held: dict[str, Any]) -> str:
    return f"process {held.get('pid', '?')} on {held.get('host', '?')}"


def _free(workspace: Workspace, locked: bool) -> Tagged | None:
    """The lease as it was left, once nobody holds it. Raises UserError if somebody does.

    One that may be alive is watched: a renewal shows that it is, and no clocks are compared.
    """
    found = workspace.storage.read_tagged(LEASE)
    held = read(found)
    if found is None or not _may_live(held, locked):
        return found
    if _lives(held):
        raise UserError(_taken(workspace, held))
    patience = max(LIFETIME - found.age, 2.4 * HEARTBEAT)
    say(
        f"The workspace {workspace.uri} may be in use by {describe(held)}; if its lease is not "
        f"renewed for {patience:.0f} seconds, it is taken over."
    )
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        time.sleep(LOOK)
        now = workspace.storage.read_tagged(LEASE)
        if now is None or not _may_live(read(now), locked):
            return now
        if now.tag != found.tag:
            raise UserError(_taken(workspace, read(now)))
    return found


def _may_live(held: dict[str, Any], locked: bool) -> bool:
    """Whether the owner may still be at work, for all that is known here."""
    if not float(held.get("renewed") or 0.0):
        return False
    here = _process(os.getpid())
    if held.get("boot") != here["boot"]:
        return True
    if locked:
        return False  # the kernel released its lock
    if not here["started"]:
        return True  # without /proc, as on macOS, no process can be told from another
    return held.get("space") != here["space"] or _lives(held)


def _lives(held: dict[str, Any]) -> bool:
    """Whether the owner is a process that can be seen from here."""
    pid = held.get("pid")
    facts = _process(pid) if isinstance(pid, int) else {}
    return bool(facts.get("started")) and all(held.get(key) == facts[key] for key in facts)


def _taken(workspace: Workspace, held: dict[str, Any]) -> str:
    return (
        f"The workspace {workspace.uri} is in use by {describe(held)}. "
        "Wait for it, stop it, or give another with -w."
    )


def _process(pid: int) -> dict[str, Any]:
    """What tells a process from all others: machine, name space, number, and when it started."""
    facts: dict[str, Any] = {"boot": _boot(), "space": "", "pid": pid, "started": ""}
    with suppress(OSError):
        facts["space"] = str(Path("/proc/self/ns/pid").readlink())
        status = Path(f"/proc/{pid}/stat").read_text()
        state, *rest = status[status.rindex(")") + 2 :].split()
        facts["started"] = "" if state in "ZX" else rest[18]
    return facts


def _boot() -> str:
    """What tells this running machine from another: Linux's boot id, elsewhere the host name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
