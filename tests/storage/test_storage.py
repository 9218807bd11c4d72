"""Everything written is there whole, or not at all: on a disk and in S3 by the same tests."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from ddpm_core.console import telling
from ddpm_core.data.overlap import OUTPUTS
from ddpm_core.errors import Corrupt, UserError
from ddpm_core.storage import (
    MANIFEST,
    Changed,
    LocalStorage,
    Locked,
    Storage,
    open_storage,
    verify,
)
from ddpm_core.storage import files as reading
from ddpm_core.storage.cache import Cache
from ddpm_core.storage.staging import FOLDERS, staged_file
from ddpm_core.storage.workspace import Workspace, fingerprint, step_name


@pytest.fixture(params=["disk", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """An empty one of either kind."""
    if request.param == "disk":
        return LocalStorage(tmp_path / "root")
    bucket = request.getfixturevalue("bucket")
    bucket.enter(request.getfixturevalue("monkeypatch"), tmp_path)
    return open_storage(bucket.uri(f"{tmp_path.name}/run"))


@pytest.fixture
def disk(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "root")


def folder(storage: Storage, text: str = "hello") -> Path:
    with storage.new_folder("a/b", {"kind": "test"}) as path:
        (path / "file.txt").write_text(text)
        (path / "deep").mkdir()
        (path / "deep" / "other.bin").write_bytes(b"\0" * 10)
    return storage.local("a/b")


def test_a_folder_is_there_with_its_checksums(storage: Storage) -> None:
    manifest = verify(folder(storage))
    assert manifest["kind"] == "test"
    assert set(manifest["files"]) == {"file.txt", "deep/other.bin"}
    assert storage.names("a") == storage.sealed("a") == ["b"]
    assert storage.names("a/b") == ["deep", "file.txt", MANIFEST]
    assert storage.exists("a/b") and storage.exists("a/b/deep/other.bin")


def test_a_copy_is_made_anew_where_there_is_none(storage: Storage) -> None:
    folder(storage)
    storage.forget("a/b")
    assert verify(storage.local("a/b"))["kind"] == "test"
    assert storage.local("a/b/deep/other.bin").read_bytes() == b"\0" * 10
    assert storage.size("a/b/file.txt") == 5
    assert storage.checksum("a/b/file.txt") == hashlib.sha256(b"hello").hexdigest()
    assert storage.size("a/b/none") is storage.checksum("a/b/none") is None


def test_an_exception_leaves_nothing_and_keeps_the_old(storage: Storage) -> None:
    folder(storage, "old")
    with pytest.raises(RuntimeError), storage.new_folder("a/b") as path:
        (path / "file.txt").write_text("new")
        raise RuntimeError
    assert (storage.local("a/b") / "file.txt").read_text() == "old"
    assert [name.name for name in storage.local("a").iterdir()] == ["b"]
    assert [path.name for path in storage.scratch().iterdir()] in ([], ["a"])


def test_a_new_folder_takes_the_place_of_the_old(storage: Storage) -> None:
    folder(storage, "old")
    with storage.new_folder("a/b") as path:
        (path / "file.txt").write_text("new")
    storage.forget("a/b")
    assert set(verify(storage.local("a/b"))["files"]) == {"file.txt"}
    assert (storage.local("a/b") / "file.txt").read_text() == "new"
    assert storage.names("a/b") == ["file.txt", MANIFEST]


def test_the_old_folder_is_there_until_the_new_one_is(
    disk: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To remove it takes long, and is impossible while a network volume has readers of it."""
    with disk.new_folder("samples/b") as path:
        (path / "file.txt").write_text("old")
    removed = []

    def remove(path: Path, **_: object) -> None:
        assert (disk.local("samples/b") / "file.txt").read_text() == "new"
        removed.append(path)

    monkeypatch.setattr(shutil, "rmtree", remove)
    with disk.new_folder("samples/b") as path:
        (path / "file.txt").write_text("new")
    monkeypatch.undo()
    assert len(removed) == 1
    assert set(verify(disk.local("samples/b"))["files"]) == {"file.txt"}
    disk.sweep()
    assert [item.name for item in disk.local("samples").iterdir()] == ["b"]


def test_of_two_writers_of_one_folder_the_last_stays(disk: LocalStorage) -> None:
    def write(text: str) -> None:
        for _ in range(30):
            with disk.new_folder("data") as path:
                (path / "file").write_text(text)

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(write, text) for text in ("a", "b", "c")]:
            done.result()
    assert verify(disk.local("data"))
    assert [item.name for item in disk.root.iterdir()] == ["data"]


def test_a_file_is_replaced_whole(storage: Storage) -> None:
    storage.write("x/y.json", b"one")
    assert storage.local("x/y.json").read_bytes() == b"one"
    storage.write("x/y.json", b"two")
    assert storage.read("x/y.json") == storage.local("x/y.json").read_bytes() == b"two"
    assert storage.names("x") == ["y.json"]


def test_removing_what_is_absent_is_no_mistake(storage: Storage) -> None:
    storage.remove("absent")
    folder(storage)
    storage.remove("a/b")
    assert not storage.exists("a/b")
    assert not storage.local("a/b").exists()
    assert storage.names("a") == storage.names("nowhere") == []
    with pytest.raises(FileNotFoundError):
        storage.read("a/b/file.txt")


def test_a_folder_moves_whole(storage: Storage) -> None:
    folder(storage)
    storage.move("a/b", "c/d")
    assert verify(storage.local("c/d"))["kind"] == "test"
    assert not storage.exists("a/b") and storage.names("a") == []
    storage.write("file", b"x")
    storage.move("file", "c/file")
    assert (storage.exists("file"), storage.read("c/file")) == (False, b"x")


def test_a_neighbour_with_the_same_start_is_another(storage: Storage) -> None:
    for key in ("run/a", "run2/a", "run"[:2] + "/a"):
        storage.write(key, key.encode())
    storage.remove("run")
    assert storage.names("") == ["ru", "run2"]


def test_of_two_that_replace_one_version_the_second_is_told(storage: Storage) -> None:
    assert storage.read_tagged("lease.json") is None
    first = storage.write_if("lease.json", b"one", None)
    found = storage.read_tagged("lease.json")
    assert found is not None and (found.data, found.tag) == (b"one", first)
    assert 0 <= found.age < 60
    storage.write_if("lease.json", b"two", first)
    for tag in (None, first):
        with pytest.raises(Changed):
            storage.write_if("lease.json", b"three", tag)
    assert storage.read("lease.json") == b"two"


def test_a_growing_file_is_there_for_others_as_often_as_it_is_pushed(storage: Storage) -> None:
    for turn in (1, 2):
        mirror = storage.mirror("log.jsonl", turn)
        with mirror.path.open("ab") as file:
            mirror.start()
            file.write(b"%d first\n" % turn)
            file.flush()
            mirror.push()
            file.write(b"%d second\n" % turn)
        mirror.close()
    lines = ["1 first", "1 second", "2 first", "2 second"]
    assert storage.local("log.jsonl").read_text().splitlines() == lines
    assert storage.exists("log.jsonl")
    storage.move("log.jsonl", "old/log.jsonl")
    assert not storage.exists("log.jsonl") and not storage.local("log.jsonl").exists()
    assert storage.local("old/log.jsonl").read_text().splitlines() == lines


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda path: (path / "file.txt").unlink(), "lacks its file file.txt"),
        (lambda path: (path / "file.txt").write_text("hell"), "has 4 bytes; 5 were written"),
        (lambda path: (path / "file.txt").write_text("hellO"), "checksum differs"),
        (lambda path: (path / MANIFEST).unlink(), "not written to its end"),
        (lambda path: (path / MANIFEST).write_text("{"), "damaged"),
        (lambda path: (path / MANIFEST).write_text("[]"), "damaged"),
        (lambda path: (path / MANIFEST).write_text('{"files": {"x": 3}}'), "damaged"),
        (lambda path: (path / MANIFEST).write_bytes(b"\xff\xfe"), "damaged"),
    ],
)
def test_damage_is_named(disk: LocalStorage, damage: Callable[[Path], object], told: str) -> None:
    path = folder(disk)
    damage(path)
    with pytest.raises(Corrupt, match=told):
        verify(path)


def test_a_manifest_can_not_point_outside_its_folder(storage: Storage) -> None:
    folder(storage)
    storage.write("a/secret", b"x")
    files = {"../secret": {"size": 1, "sha256": "0"}}
    storage.write(f"a/b/{MANIFEST}", json.dumps({"files": files}).encode())
    with pytest.raises(Corrupt, match="outside"):
        verify(storage.local("a/b"))


def test_a_workspace_that_can_not_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="Cannot use"):
        LocalStorage(tmp_path / "file" / "below")
    with pytest.raises(UserError, match="Not a directory"):
        LocalStorage(tmp_path / "file")
    with pytest.raises(UserError, match="a directory is needed"):
        open_storage("ftp://host/place")
    with pytest.raises(UserError, match="a directory is needed"):
        open_storage("s3:/bucket/run")
    for prefix in ("a/./b", "/double//slash", "..", "a//b"):
        with pytest.raises(UserError, match="s3://bucket/prefix is needed"):
            open_storage(f"s3://bucket/{prefix}")
    with pytest.raises(UserError, match="home directory"):
        open_storage("~nobody-of-this-name/run")
    with pytest.raises(UserError, match="embedded null"):
        open_storage("a\0b")


def test_looking_makes_nothing(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "typo" / "run")
    assert not storage.names("") and not storage.exists("data") and storage.size("a") is None
    storage.sweep()
    assert not (tmp_path / "typo").exists()
    storage.write("a/b", b"made")
    assert storage.read("a/b") == b"made"


def test_what_a_killed_writer_left_is_swept_and_a_living_one_is_not(disk: LocalStorage) -> None:
    (disk.root / "kept").mkdir(parents=True)
    code = (
        "import os, sys; from pathlib import Path\n"
        "from ddpm_core.storage import LocalStorage\n"
        "storage = LocalStorage(Path(sys.argv[1]))\n"
        "with storage.new_folder('snapshots/step-00000004') as path:\n"
        "    (path / 'model').write_bytes(b'x')\n"
        "    storage.local('.data.json.0123abcd.ddpm-staged').write_bytes(b'x')\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(disk.root)], check=False)
    assert killed.returncode == -9
    assert len(list(disk.local("snapshots").iterdir())) == 1
    with disk.new_folder("data") as path:
        (path / "file").write_bytes(b"x")
        disk.sweep()
    assert verify(disk.local("data"))
    assert disk.names("") == ["data", "kept", "snapshots"]
    assert not list(disk.local("snapshots").iterdir())
    assert not list(disk.root.glob(".data*"))


@contextmanager
def full() -> Iterator[None]:
    """The disk refuses whatever would make a file longer than 1,000 bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def write_tensors(storage: Storage) -> None:
    with storage.new_folder("snapshots/step-00000004") as path:
        reading.save_tensors({"weight": torch.zeros(1000)}, path / "model.safetensors")


@pytest.mark.parametrize(
    ("attempt", "place"),
    [
        (lambda storage: storage.write("evaluation/report.html", bytes(5000)), "report.html"),
        (write_tensors, "snapshots/step-00000004/model.safetensors"),
    ],
)
def test_a_full_disk_is_named_with_what_to_do(
    disk: LocalStorage,
    attempt: Callable[[LocalStorage], None],
    place: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit), telling("ddpm report"), full():
        attempt(disk)
    said = capsys.readouterr().err.replace("\n", " ")
    assert said.startswith(f"ddpm report: File too large: {disk.root}/")
    assert f"{place}. Free some space there; the same command goes on." in said
    assert not [path for path in disk.root.rglob("*") if path.is_file()]


def test_a_full_directory_for_copies_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache = Cache("somewhere")

    def download(path: Path) -> None:
        path.write_bytes(bytes(5000))

    with pytest.raises(OSError) as raised, full():
        cache.fetch("data/images.npy", 5000, "", download)
    cache.close()
    assert raised.value.filename == str(cache.root / "data/images.npy")
    assert raised.value.__notes__ == ["Free some space there; the same command goes on."]


def test_tensors_are_for_whoever_may_read_the_other_files(tmp_path: Path) -> None:
    reading.save_tensors({"weight": torch.ones(3)}, tmp_path / "a", {"of": "test"})
    (tmp_path / "b").touch()
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode
    tensors, texts = reading.read_tensors_and_metadata(tmp_path / "a")
    assert tensors["weight"].tolist() == [1, 1, 1] and texts["of"] == "test"


def test_a_folder_where_a_file_should_be_is_named(disk: LocalStorage) -> None:
    disk.local("evaluation/results.json").mkdir(parents=True)
    with pytest.raises(IsADirectoryError) as raised:
        disk.write("evaluation/results.json", b"{}")
    assert raised.value.filename == str(disk.local("evaluation/results.json"))
    assert disk.names("evaluation") == ["results.json"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs a place that nobody may write to")
def test_a_workspace_that_may_only_be_read_is_named_with_what_to_do() -> None:
    storage = LocalStorage(Path("/sys"))
    with pytest.raises(OSError) as raised:
        storage.write("run.json", b"{}")
    assert raised.value.filename == "/sys/run.json"
    assert raised.value.__notes__ == ["Write to another place: a workspace is named with -w."]


def test_who_does_not_hold_the_lease_sweeps_a_disk_and_leaves_what_is_on_its_way_to_s3(
    storage: Storage,
) -> None:
    storage.write("snapshots/step-00000004/model", b"x")
    if isinstance(storage, LocalStorage):
        storage.local("evaluation/.in_domain.0123abcd.ddpm-staged").mkdir(parents=True)
    storage.sweep_staged()
    assert storage.size("snapshots/step-00000004/model") == 1
    if isinstance(storage, LocalStorage):
        assert not list(storage.local("evaluation").iterdir())


def test_hidden_files_of_the_user_are_not_swept(disk: LocalStorage) -> None:
    """Names that end in a date, and whatever lies in folders that are not a run's."""
    own = [".backup.20240101/precious", ".notes.20240131", "samples/.grid.20240101"]
    own += ["notes/.plan.20231224", "notes/.plan.20231224.ddpm-staged"]
    for name in own:
        disk.local(name).parent.mkdir(parents=True, exist_ok=True)
        disk.local(name).write_bytes(b"x")
    disk.sweep()
    assert all(disk.local(name).exists() for name in own)


def test_staged_names_end_in_a_mark_and_are_no_longer_than_names_may_be(tmp_path: Path) -> None:
    for name in ("x" * 255, "\N{CAT}" * 63, "ab.gif"):
        with staged_file(tmp_path / name) as staging:
            assert staging.name.endswith(".ddpm-staged")
            staging.replace(tmp_path / name)


def test_what_is_swept_lies_in_the_folders_in_which_a_run_writes() -> None:
    assert set(FOLDERS) == set(OUTPUTS)


def test_the_lock_of_a_directory_is_held_by_one(disk: LocalStorage) -> None:
    with disk.lock() as held:
        assert held
        with pytest.raises(Locked), LocalStorage(disk.root).lock():
            pass
    with disk.lock():
        pass


def test_a_volume_without_locks_holds_none(
    disk: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    with disk.lock() as held:
        assert not held
    old, new = disk.local(".data.0123abcd.ddpm-staged"), disk.local(".data.4567abcd.ddpm-staged")
    for path in (old, new):
        path.mkdir()
    os.utime(old, (0, 0))
    disk.sweep()
    assert not old.exists()
    assert new.exists()


def test_steps_are_numbers_whatever_else_lies_there(tmp_path: Path) -> None:
    workspace = Workspace.open(os.fspath(tmp_path))
    for name in (step_name(20), step_name(3), "step-x", "step-3", ".step-00000009.abc", "notes"):
        (tmp_path / "snapshots" / name).mkdir(parents=True)
    assert workspace.steps("snapshots") == [3, 20]


def test_damaged_json_is_the_empty_object(tmp_path: Path) -> None:
    workspace = Workspace.open(os.fspath(tmp_path))
    (tmp_path / "run.json").write_text('{"half": ')
    assert workspace.read_json("run.json") == {}
    workspace.write_json("run.json", {"a": 1})
    assert workspace.read_json("run.json") == {"a": 1}


def test_a_fingerprint_depends_on_the_content_alone() -> None:
    assert fingerprint({"a": 1, "b": [1, 2]}) == fingerprint({"b": [1, 2], "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})
