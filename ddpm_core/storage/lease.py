"""The lease of a workspace: one run at a time may train in it or replace its data.

The owner writes lease.json and renews it with a heartbeat. Every write replaces exactly the version
that was read, and every new owner increments the fence. A second run is refused, with the owner
named. A dead owner's lease is taken over: at once if this machine can see that the process is dead,
otherwise after the lease has not been renewed for LIFETIME.
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
from dataclasses import asdict, dataclass
from pathlib import Path

from ddpm_core.console import Outage, say
from ddpm_core.errors import Corrupt, UserError
from ddpm_core.storage import Changed, Locked, Tagged, Unreachable
from ddpm_core.storage.files import Count, Schema, parse_model
from ddpm_core.storage.workspace import Workspace

LEASE = "lease.json"
HEARTBEAT = 5.0  # seconds between renewals
LIFETIME = 30.0  # seconds that a lease is valid without a renewal
POLL = 0.5  # seconds between two reads of a lease that may expire


@contextmanager
def hold(workspace: Workspace) -> Iterator[Lease]:
    """Own the workspace during a block, after a sweep of what killed runs left.

    Raises UserError, with the owner named, if another run holds it.
    """
    # The lock is taken before the lease and released after it. So where the storage has locks, the
    # process that gets the lock knows that no owner on this machine is alive.
    with _locked(workspace) as locked:
        lease = Lease(workspace, _wait_until_free(workspace, locked))
        with _write_errors(workspace):
            lease.start()
        try:
            workspace.storage.sweep()
            yield lease
        finally:
            lease.stop()


class Owner(Schema):
    """The content of lease.json. All fields have defaults, because old versions wrote fewer."""

    id: str | None = None
    fence: Count = 0
    renewed: float = 0.0  # Unix time; 0 after the owner has given the lease back
    host: str = "?"
    pid: int | None = None
    boot: str = ""
    space: str = ""
    started: str = ""

    def __str__(self) -> str:
        return f"process {'?' if self.pid is None else self.pid} on {self.host}"


@dataclass(frozen=True)
class Process:
    """What distinguishes a process from all others.

    `boot` identifies the running machine, `space` the PID namespace, and `started` the start time
    of the process. `space` and `started` are "" where there is no /proc.
    """

    boot: str
    space: str
    pid: int
    started: str


class Lease:
    """A lease that this process holds. `check` raises once another process has taken it."""

    def __init__(self, workspace: Workspace, previous: Tagged | None) -> None:
        """`previous` is the version of lease.json that this lease replaces."""
        self._workspace = workspace
        self.fence = read(previous).fence + 1
        self._tag = previous.tag if previous else None
        self._id = uuid.uuid4().hex
        self._process = _process(os.getpid())
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        # `check` may renew the lease while the heartbeat does. Of two concurrent writes, the second
        # would find that its tag was replaced.
        self._lock = threading.Lock()
        self._renewed = time.monotonic()
        self._lost = ""
        self._outage = Outage()

    def start(self) -> None:
        """Write the lease and start its heartbeat. Raises UserError if another run was faster."""
        try:
            self._renew()
        except Changed:
            owner = _current_owner(self._workspace)
            raise UserError(_in_use(self._workspace, owner)) from None
        self._thread.start()

    def stop(self) -> None:
        """Give the lease back. The fence stays in the file."""
        # The heartbeat ends first. Otherwise it could renew the lease after it was given back.
        self._stopped.set()
        self._thread.join()
        if not self._lost:
            with suppress(OSError, Changed):
                self._renew(0.0)

    def check(self, patient: bool = False) -> None:
        """Raise UserError if another run has taken over the workspace.

        With `patient`, also try a storage that was unavailable a moment ago.
        """
        # A process that was suspended may get here before its next heartbeat.
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
                self._refresh_tag()
                self._renew()
            except Changed:
                with suppress(OSError):
                    self._note_loss()
            except OSError as error:
                self._outage.begins(f"Cannot renew the lease of the workspace: {error.strerror}.")
            else:
                self._outage.ends("Renewed the lease of the workspace again.")

    def _refresh_tag(self) -> None:
        """Adopt the tag of the last write of this lease, whose response may have been lost.

        Raises Changed if the lease belongs to another run.
        """
        found = self._workspace.storage.read_tagged(LEASE)
        if found and read(found).id not in (self._id, None):
            raise Changed
        self._tag = found.tag if found else None

    def _note_loss(self) -> None:
        owner = _current_owner(self._workspace)
        # A lease that is missing was removed by hand: the next renewal writes it again.
        if owner.id not in (self._id, None):
            self._lost = f"The workspace was taken over by {owner}; this run stops."

    def _renew(self, now: float | None = None) -> None:
        """Write the lease with the time `now`; time 0 gives it back."""
        # Other processes only check whether the time is 0. They never compare clocks.
        owner = {
            "id": self._id,
            "fence": self.fence,
            "host": socket.gethostname(),
            "renewed": time.time() if now is None else now,
            **asdict(self._process),
        }
        data = (json.dumps(owner, indent=1, sort_keys=True) + "\n").encode()
        self._tag = self._workspace.storage.write_if(LEASE, data, self._tag)
        self._renewed = time.monotonic()


def read(found: Tagged | None) -> Owner:
    """Return the owner in a lease file; an Owner of defaults if it is missing or damaged."""
    try:
        return parse_model(found.data, Owner, LEASE) if found else Owner()
    except Corrupt:
        return Owner()


def _current_owner(workspace: Workspace) -> Owner:
    try:
        return read(workspace.storage.read_tagged(LEASE))
    except Corrupt:  # lease.json is not a regular file
        return Owner()


@contextmanager
def _locked(workspace: Workspace) -> Iterator[bool]:
    """Hold the storage's lock; yield whether it has one. Raises UserError if it is taken."""
    with ExitStack() as stack:
        try:
            with _write_errors(workspace):
                locked = stack.enter_context(workspace.storage.lock())
        except Locked:
            raise UserError(_in_use(workspace, _current_owner(workspace))) from None
        yield locked


@contextmanager
def _write_errors(workspace: Workspace) -> Iterator[None]:
    """Raise UserError if the workspace is not writable. The lease is the first file of a run."""
    try:
        yield
    except Unreachable:
        raise
    except OSError as error:
        raise UserError(
            f"Cannot write to the workspace {workspace.uri}: {error.strerror or error}."
        ) from error


def _wait_until_free(workspace: Workspace, locked: bool) -> Tagged | None:
    """Return the lease of the last owner once no owner is alive. Raises UserError if one is.

    An owner that may be alive gets one LIFETIME to renew its lease. Only changes of the file count,
    so the clocks of two machines are never compared.
    """
    found = workspace.storage.read_tagged(LEASE)
    owner = read(found)
    if found is None or not _may_be_alive(owner, locked):
        return found
    if _is_alive(owner):
        raise UserError(_in_use(workspace, owner))
    # At least two heartbeats, because a single late renewal must not look like a dead owner. The
    # age comes from the storage's clock, so it may be subtracted.
    timeout = max(LIFETIME - found.age, 2.4 * HEARTBEAT)
    say(
        f"The workspace {workspace.uri} may be in use by {owner}. Taking it over unless its lease "
        f"is renewed within {timeout:.0f} seconds."
    )
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        time.sleep(POLL)
        current = workspace.storage.read_tagged(LEASE)
        # The owner may have given the lease back or died, or another run may have been faster.
        if current is None or not _may_be_alive(read(current), locked):
            return current
        if current.tag != found.tag:
            raise UserError(_in_use(workspace, read(current)))
    return found


def _may_be_alive(owner: Owner, locked: bool) -> bool:
    """Return whether the owner may still be running, as far as this process can know."""
    if not owner.renewed:
        return False
    this = _process(os.getpid())
    if owner.boot != this.boot:
        return True  # on another machine
    if locked:
        return False  # the kernel has released the owner's lock
    if not this.started:
        return True  # without /proc (macOS) processes cannot be distinguished
    # A process of another PID namespace, such as a container, is invisible from here.
    return owner.space != this.space or _is_alive(owner)


def _is_alive(owner: Owner) -> bool:
    """Return whether the owner is a running process that is visible from here."""
    if owner.pid is None:
        return False
    process = _process(owner.pid)
    recorded = Process(owner.boot, owner.space, owner.pid, owner.started)
    return bool(process.started) and process == recorded


def _in_use(workspace: Workspace, owner: Owner) -> str:
    return (
        f"The workspace {workspace.uri} is in use by {owner}. "
        "Wait for it, stop it, or use another workspace (-w)."
    )


def _process(pid: int) -> Process:
    """Return the identity of a process."""
    space = started = ""
    with suppress(OSError):
        space = str(Path("/proc/self/ns/pid").readlink())
        status = Path(f"/proc/{pid}/stat").read_text()
        # The second field is the program's name in parentheses, which may itself contain spaces and
        # parentheses, so read from behind the last one. The start time is field 22 of proc(5). PIDs
        # are reused, but not together with it. A zombie (Z) or dead process (X) counts as ended.
        state, *rest = status[status.rindex(")") + 2 :].split()
        started = "" if state in "ZX" else rest[18]
    return Process(_boot(), space, pid, started)


def _boot() -> str:
    """Return what identifies this running machine: Linux's boot id, elsewhere the host name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
