"""What each kind of fault does to a run: a function a kind, which returns the worlds to expect."""

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
    """kill -9 of one worker: the others notice, and torchrun starts all again."""
    attempt = run.under_way()
    run.hit(signal.SIGKILL, attempt)
    return _started_again(run, attempt)


def term_one(run: Playing) -> Worlds:
    """SIGTERM to one worker: all save at the same step and leave, and all start again."""
    attempt = run.under_way()
    run.hit(signal.SIGTERM, attempt)
    worlds = _started_again(run, attempt)
    assert "after writing a snapshot" in attempt.said(), "no snapshot after SIGTERM"
    return worlds


def hang(run: Playing) -> Worlds:
    """SIGSTOP: the others say so and leave; the one that hung goes on too late, and leaves too."""
    attempt = run.under_way()
    pid = run.hit(signal.SIGSTOP, attempt)
    until(lambda: "did not answer within 5 s" in attempt.said(), "the others notice", 20)
    attempt.kill(signal.SIGCONT, pid)
    return _started_again(run, attempt)


def hang_for_good(run: Playing) -> Worlds:
    """SIGSTOP alone: torchrun kills, after its 30 seconds, who does not leave when told to."""
    attempt = run.under_way()
    run.hit(signal.SIGSTOP, attempt)
    worlds = _started_again(run, attempt)
    assert "did not answer within 5 s" in attempt.said(), "nobody noticed"
    return worlds


def kill_in_snapshot(run: Playing) -> Worlds:
    """kill -9 of the first worker while a snapshot is half written: it is no snapshot."""
    attempt = run.under_way()

    def writing() -> bool:
        assert attempt.returncode is None, "it ended before another snapshot"
        return bool(run.staged())

    until(writing, "a snapshot is being written", pause=0.001)
    run.hit(signal.SIGKILL, attempt)
    return _started_again(run, attempt)


def kill_agent(run: Playing) -> Worlds:
    """kill -9 of torchrun alone: its workers notice, save and leave; a new start goes on."""
    first, second = run.schedule.worlds
    attempt = run.under_way()
    attempt.workers()
    attempt.kill(signal.SIGKILL, attempt.pid)
    until(lambda: not attempt.left(), "the workers that nobody watches leave", 30)
    assert "torchrun is gone" in attempt.said(), "the workers did not say why they left"
    newest = max(run.snapshots())
    run.finish(run.begin(second, start="forked"))  # whoever starts it: what is left counts
    assert f"resuming from step {int(newest.partition('-')[2])}" in run.said()
    return {first, second}


def resize(run: Playing) -> Worlds:
    """kill -9 of everything; the run goes on with another number of workers."""
    first, second = run.schedule.worlds
    attempt = run.under_way()
    attempt.kill_all()
    run.finish(run.begin(second))
    return {first, second}


def damage(run: Playing) -> Worlds:
    """The newest snapshot is damaged between two attempts: the one before is used, and said so."""
    first, second = run.schedule.worlds
    attempt = run.under_way()
    until(lambda: len(run.snapshots()) > 1, "two snapshots")
    attempt.kill_all()
    before, newest = run.snapshots()[-2:]
    _damage(run, run.workspace / "snapshots" / newest)
    run.finish(run.begin(second))
    said = run.attempts[-1].said()
    assert "A snapshot was skipped" in said, "the damage was not told"
    assert newest in said, f"{newest} was not named"
    assert f"resuming from step {int(before.partition('-')[2])}" in said
    return {first, second}


def disk_full(run: Playing) -> Worlds:
    """The workspace's disk is full: training ends and says so; with room again it goes on."""
    first, second = run.schedule.worlds
    if not _own_disk(run):
        return _file_limit(run)
    attempt = run.under_way(restarts=1)
    filler = run.workspace / "filler"
    _fill(filler, spare=int(run.schedule.chance * 100_000))
    assert attempt.wait(120), "it goes on for ever on a full disk"
    assert attempt.returncode not in (0, None), "it ended well on a full disk"
    assert "No space left on device" in attempt.said(), "the full disk was not named"
    # torchrun's agent logs tracebacks of its own, behind a prefix.
    assert "\nTraceback" not in attempt.said(), "a full disk is no bug of the program"
    until(lambda: not attempt.left(), "all workers are gone", 20)
    filler.unlink()
    run.finish(run.begin(second))
    return {first, second}


def nodes(run: Playing) -> Worlds:
    """A second node joins a running torchrun and is killed again: the world grows and shrinks."""
    first, second = run.schedule.worlds
    endpoint = f"localhost:{free_port()}"
    stays = run.under_way(endpoint=endpoint)
    joins = run.begin(second, endpoint=endpoint, node=1)
    until(lambda: _grown(run, stays, first + second), "the world has grown", 90)
    joins.kill_all()
    run.finish(stays)
    return {first, first + second}


def _grown(run: Playing, stays: Attempt, size: int) -> bool:
    """Whether all train together; if not, hold those that train: they would be done by then."""
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
    assert run.starts() > 1, "the fault came too late: the workers were not started again"
    return {run.schedule.worlds[0]}


def _damage(run: Playing, folder: Path) -> None:
    """Cut, flip one bit of, or remove a file that the schedule's chance picks."""
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
    """Give the workspace a small disk of its own, where this user may mount one."""
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
    """Without a disk of its own: no file of the first worker may grow beyond a few kB."""
    attempt = run.under_way()
    limit = 1000 + int(run.schedule.chance * 100_000)
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(attempt.workers()[0], resource.RLIMIT_FSIZE, (limit, limit))
    return _started_again(run, attempt)
