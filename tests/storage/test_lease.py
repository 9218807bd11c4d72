"""One run at a time owns a workspace, on one machine and on several."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
from support.s3_server import Bucket

from ddpm_core.errors import UserError
from ddpm_core.storage import lease as leases
from ddpm_core.storage.lease import LEASE, Lease, Process, hold
from ddpm_core.storage.workspace import Workspace
from ddpm_core.tracking.rows import read_rows


@pytest.fixture
def uri(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return an empty workspace in S3, with a fast heartbeat."""
    bucket.enter(monkeypatch, tmp_path)
    monkeypatch.setattr(leases, "HEARTBEAT", 0.2)
    monkeypatch.setattr(leases, "LIFETIME", 3.0)
    monkeypatch.setattr(leases, "POLL", 0.05)
    return bucket.uri(f"{tmp_path.name}/run")


def elsewhere(uri: str) -> Lease:
    """Return a lease of a process on another machine, with a running heartbeat."""
    workspace = Workspace.open(uri)
    lease = Lease(workspace, workspace.storage.read_tagged(LEASE))
    lease._process = replace(lease._process, boot="another")
    lease.start()
    return lease


def test_second_run_is_refused_with_the_owner_named(uri: str) -> None:
    with (
        hold(Workspace.open(uri)) as lease,
        pytest.raises(UserError, match=f"in use by process {os.getpid()} on"),
        hold(Workspace.open(uri)),
    ):
        pass
    assert lease.fence == 1
    with hold(Workspace.open(uri)) as lease:
        assert lease.fence == 2
        lease.check()


def test_remote_owner_is_alive_while_it_renews_the_lease(
    uri: str,
) -> None:
    lease = elsewhere(uri)
    with pytest.raises(UserError, match="in use by process"), hold(Workspace.open(uri)):
        pass
    lease.check()
    lease.stop()
    with hold(Workspace.open(uri)) as following:
        assert following.fence == 2


def test_lease_of_a_suspended_owner_expires(
    uri: str,
) -> None:
    lease = elsewhere(uri)
    lease._stopped.set()
    lease._thread.join()
    with hold(Workspace.open(uri)) as following:
        assert following.fence == 2
        with pytest.raises(UserError, match=r"taken over by process \d+ on .*; this run stops"):
            lease.check()
        following.check()


def test_owner_without_proc_is_alive_while_it_renews_the_lease(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """macOS has no /proc, so processes cannot be distinguished, not even this one."""
    monkeypatch.setattr(leases, "_process", lambda pid: Process("h", "", pid, ""))
    with (
        hold(Workspace.open(uri)) as lease,
        pytest.raises(UserError, match="in use by"),
        hold(Workspace.open(uri)),
    ):
        pass
    assert lease.fence == 1


@pytest.mark.parametrize("place", ["lock", "write_if"])
def test_read_only_workspace_is_a_user_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    workspace = Workspace.open(str(tmp_path))
    monkeypatch.setattr(workspace.storage, place, refused)
    with (
        pytest.raises(UserError, match=r"Cannot write to the workspace .*: Read-only"),
        hold(workspace),
    ):
        pass


def test_first_of_two_starters_gets_the_lease(uri: str) -> None:
    first, second = Workspace.open(uri), Workspace.open(uri)
    quick, slow = Lease(first, None), Lease(second, None)
    quick.start()
    with pytest.raises(UserError, match="in use by process"):
        slow.start()
    quick.check()
    quick.stop()


def test_removed_lease_is_written_again(uri: str) -> None:
    workspace = Workspace.open(uri)
    with hold(workspace) as lease:
        workspace.storage.remove(LEASE)
        lease._try_renew()
        lease.check()
        assert workspace.storage.exists(LEASE)


def test_new_owner_removes_unfinished_files_of_dead_ones(tmp_path: Path) -> None:
    workspace = Workspace.open(str(tmp_path))
    with hold(workspace):
        pass
    for name in (".step-00000004.0123abcd.ddpm-staged", "step-00000008"):
        (tmp_path / "snapshots" / name).mkdir(parents=True)
    (tmp_path / ".run.json.89abcdef.ddpm-staged").write_bytes(b"{")
    with hold(workspace) as lease:
        assert lease.fence == 2
        assert [path.name for path in (tmp_path / "snapshots").iterdir()] == ["step-00000008"]
        assert {path.name for path in tmp_path.iterdir()} == {"snapshots", "lease.json", ".lock"}


def test_rows_of_a_run_that_lost_its_lease_are_read_once(uri: str) -> None:
    storage = Workspace.open(uri).storage
    for turn, steps in ((1, (1, 2, 3)), (2, (3, 4)), (3, (5,))):
        mirror = storage.mirror("log.jsonl", turn)
        mirror.path.unlink(missing_ok=True)  # as if earlier turns were unknown
        mirror.start()
        mirror.path.write_text("".join(f'{{"step": {step}}}\n' for step in steps))
        mirror.close()
    assert [row["step"] for row in read_rows(storage.local("log.jsonl"))] == [1, 2, 3, 4, 5]


def test_lease_removed_by_hand_loses_no_rows(uri: str) -> None:
    for step in (1, 2):
        with hold(Workspace.open(uri)) as lease:
            assert lease.fence == 1
            mirror = Workspace.open(uri).storage.mirror("log.jsonl", lease.fence)
            mirror.start()
            with mirror.path.open("a") as file:
                file.write(f'{{"step": {step}}}\n')
            mirror.close()
        Workspace.open(uri).storage.remove(LEASE)
    log = Workspace.open(uri).storage.local("log.jsonl")
    assert [row["step"] for row in read_rows(log)] == [1, 2]
