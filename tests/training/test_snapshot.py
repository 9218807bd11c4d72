"""The thread that writes snapshots reports its errors, its death included."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
from faults.attempt import until
from support.models import empty_snapshot

from ddpm_core.errors import UserError
from ddpm_core.storage.workspace import SNAPSHOTS, Workspace
from ddpm_core.training import snapshot
from ddpm_core.training.snapshot import Writer

EMPTY = empty_snapshot()


def writer(folder: Path) -> Writer:
    return Writer(Workspace.open(str(folder)), lambda: None, lambda step: None, None)


def out_of_memory(*_: object) -> None:
    raise MemoryError


def test_writer_writes_a_snapshot(tmp_path: Path) -> None:
    it = writer(tmp_path)
    it.submit(3, EMPTY)
    it.wait()
    it.close()
    assert it.newest == 3
    assert Workspace.open(str(tmp_path)).steps(SNAPSHOTS) == [3]


def test_writer_frees_a_snapshot_that_is_written(tmp_path: Path) -> None:
    """Else memory would hold two while the next one is copied."""
    it = writer(tmp_path)
    contents = empty_snapshot()
    released = weakref.ref(contents)
    it.submit(3, contents)
    del contents
    it.wait()
    until(lambda: released() is None, "the contents are freed", 10)
    it.close()


def test_writer_raises_the_error_of_its_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "write", out_of_memory)
    it = writer(tmp_path)
    it.submit(3, EMPTY)
    with pytest.raises(MemoryError):
        it.wait()
    it.close()
    assert it.newest is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.timeout(30)
def test_writer_does_not_wait_for_a_dead_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Writer, "_run", out_of_memory)
    it = writer(tmp_path)
    for step in (3, 6):
        it.submit(step, EMPTY)
        with pytest.raises(UserError, match=f"the snapshot of step {step}: .* thread .* died"):
            it.wait(final=False)
    it.close()
    assert it.newest is None
