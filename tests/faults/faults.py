"""The kinds of faults: one function each, which returns the world sizes to expect in the log."""

from __future__ import annotations

import contextlib
import errno
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from support.mlflow_server import free_port

from . import servers
from .attempt import Attempt, until
from .play import Playing, Worlds


def kill(run: Playing) -> Worlds:
    """Kill one worker: the others notice, and torchrun restarts all."""
    attempt = run.under_way()
    run.hit(signal.SIGKILL, attempt)
    return _started_again(run, attempt)


def term_one(run: Playing) -> Worlds:
    """Send SIGTERM to one worker: all save at the same step and exit, and torchrun restarts all."""
    attempt = run.under_way()
    run.hit(signal.SIGTERM, attempt)
    worlds = _started_again(run, attempt)
    assert "after writing a snapshot" in attempt.said(), "no snapshot after SIGTERM"
    return worlds


def hang(run: Playing) -> Worlds:
    """Stop one worker: the others time out and exit; it continues too late, and exits as well."""
    attempt = run.under_way()
    pid = run.hit(signal.SIGSTOP, attempt)
    until(lambda: "timed out after 5 s waiting" in attempt.said(), "the others notice", 20)
    attempt.kill(signal.SIGCONT, pid)
    return _started_again(run, attempt)


def hang_for_good(run: Playing) -> Worlds:
    """Stop one worker for good: torchrun kills it 30 seconds after SIGTERM."""
    attempt = run.under_way()
    run.hit(signal.SIGSTOP, attempt)
    worlds = _started_again(run, attempt)
    assert "timed out after 5 s waiting" in attempt.said(), "no worker timed out"
    return worlds


def kill_in_snapshot(run: Playing) -> Worlds:
    """Kill rank 0 while it writes a snapshot: the incomplete snapshot is not used."""
    attempt = run.under_way()

    def writing() -> bool:
        assert attempt.returncode is None, "it ended before another snapshot"
        return bool(run.staged())

    until(writing, "a snapshot is being written", pause=0.001)
    run.hit(signal.SIGKILL, attempt)
    return _started_again(run, attempt)


def kill_agent(run: Playing) -> Worlds:
    """Kill torchrun alone: its workers notice, save and exit; a new start resumes."""
    first, second = run.schedule.worlds
    attempt = run.under_way()
    attempt.workers()
    attempt.kill(signal.SIGKILL, attempt.pid)
    until(lambda: not attempt.left(), "the workers without torchrun exit", 30)
    assert "torchrun is gone" in attempt.said(), "the workers did not report why they exited"
    newest = max(run.snapshots())
    run.finish(run.begin(second, start="forked"))  # may differ from the first start
    assert f"resuming from step {int(newest.partition('-')[2])}" in run.said()
    return {first, second}


def resize(run: Playing) -> Worlds:
    """Kill everything; the run resumes with another number of workers."""
    first, second = run.schedule.worlds
    attempt = run.under_way()
    attempt.kill_all()
    run.finish(run.begin(second))
    return {first, second}


def damage(run: Playing) -> Worlds:
    """Damage the newest snapshot between two attempts: the run resumes from the one before."""
    first, second = run.schedule.worlds
    attempt = run.under_way()
    until(lambda: len(run.snapshots()) > 1, "two snapshots")
    attempt.kill_all()
    before, newest = run.snapshots()[-2:]
    _damage(run, run.workspace / "snapshots" / newest)
    run.finish(run.begin(second))
    said = run.attempts[-1].said()
    assert "A snapshot was skipped" in said, "the damage was not reported"
    assert newest in said, f"{newest} was not named"
    assert f"resuming from step {int(before.partition('-')[2])}" in said
    return {first, second}


def disk_full(run: Playing) -> Worlds:
    """Fill the workspace's disk: training ends with an error, and resumes once there is space."""
    first, second = run.schedule.worlds
    if not _own_disk(run):
        return _file_limit(run)
    attempt = run.under_way(restarts=1)
    filler = run.workspace / "filler"
    _fill(filler, spare=int(run.schedule.chance * 100_000))
    assert attempt.wait(120), "it does not end on a full disk"
    assert attempt.returncode not in (0, None), "it ended with status 0 on a full disk"
    assert "No space left on device" in attempt.said(), "the full disk was not reported"
    # torchrun's agent logs its own tracebacks, with a prefix.
    assert "\nTraceback" not in attempt.said(), "a full disk must not print a traceback"
    until(lambda: not attempt.left(), "all workers are gone", 20)
    filler.unlink()
    run.finish(run.begin(second))
    return {first, second}


def nodes(run: Playing) -> Worlds:
    """A second node joins a running torchrun and is killed: the world grows and shrinks."""
    first, second = run.schedule.worlds
    endpoint = f"localhost:{free_port()}"
    stays = run.under_way(endpoint=endpoint)
    joins = run.begin(second, endpoint=endpoint, node=1)
    until(lambda: _grown(run, stays, first + second), "the world has grown", 90)
    joins.kill_all()
    run.finish(stays)
    return {first, first + second}


def _grown(run: Playing, stays: Attempt, size: int) -> bool:
    """Return whether all nodes train together; if not, pause the first, which would finish."""
    if run.rows()[-1]["world_size"] == size:
        return True
    workers = stays.workers().values()
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in workers:
            stays.kill(number, pid)
        if number == signal.SIGSTOP:
            time.sleep(0.3)
    return False


FAULTS: dict[str, Callable[[Playing], Worlds]] = {
    "kill-worker": kill,
    "kill-first": kill,
    "term-one": term_one,
    "hang": hang,
    "hang-for-good": hang_for_good,
    "kill-in-snapshot": kill_in_snapshot,
    "kill-agent": kill_agent,
    "resize": resize,
    "truncated": damage,
    "flipped": damage,
    "missing": damage,
    "disk-full": disk_full,
    "mlflow-down": servers.mlflow_down,
    "s3-down": servers.s3_down,
    "nodes": nodes,
}


def _started_again(run: Playing, attempt: Attempt) -> Worlds:
    run.finish(attempt)
    assert run.starts() > 1, "the fault came too late: the workers were not restarted"
    return {run.schedule.worlds[0]}


def _damage(run: Playing, folder: Path) -> None:
    """Truncate, flip one bit of, or remove a file that the schedule's chance selects."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    file = files[int(run.schedule.chance * len(files))]
    content = file.read_bytes()
    place = int(run.schedule.chance * 7919 % 1 * len(content))
    if run.schedule.kind == "missing":
        file.unlink()
    elif run.schedule.kind == "truncated":
        file.write_bytes(content[:place])
    else:
        flipped = content[place] ^ (1 << int(run.schedule.chance * 104729) % 8)
        file.write_bytes(content[:place] + bytes([flipped]) + content[place + 1 :])


def _own_disk(run: Playing) -> bool:
    """Mount a small disk as the workspace; False if this user may not."""
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(run.workspace)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        return False
    run.undo.append(lambda: subprocess.run(["umount", "-l", str(run.workspace)], check=False))
    run.stage.link_data(run.folder)
    return True


def _fill(filler: Path, spare: int) -> None:
    """Write until the disk is full, then give `spare` bytes back."""
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 4096)
        except OSError as error:
            assert error.errno == errno.ENOSPC, error
        file.truncate(max(0, file.tell() - spare))


def _file_limit(run: Playing) -> Worlds:
    """Instead of a full disk, limit the size of every file that rank 0 writes."""
    attempt = run.under_way()
    limit = 1000 + int(run.schedule.chance * 100_000)
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(attempt.workers()[0], resource.RLIMIT_FSIZE, (limit, limit))
    return _started_again(run, attempt)
