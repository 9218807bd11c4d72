"""Every write is complete or invisible. The same tests run on a disk and in S3."""

from __future__ import annotations

import errno
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

from ddpm_core.console import report_errors
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
from ddpm_core.storage.manifest import FileRecord
from ddpm_core.storage.staging import FOLDERS, staged_file
from ddpm_core.storage.workspace import Workspace, fingerprint, step_name


@pytest.fixture(params=["disk", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """Return an empty storage of each kind."""
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


def test_new_folder_has_checksums(storage: Storage) -> None:
    manifest = verify(folder(storage))
    assert manifest.model_extra == {"kind": "test"}
    assert set(manifest.files) == {"file.txt", "deep/other.bin"}
    assert storage.names("a") == storage.sealed("a") == ["b"]
    assert storage.names("a/b") == ["deep", "file.txt", MANIFEST]
    assert storage.exists("a/b") and storage.exists("a/b/deep/other.bin")


def test_forgotten_copy_is_made_again(storage: Storage) -> None:
    folder(storage)
    storage.forget("a/b")
    assert verify(storage.local("a/b")).model_extra == {"kind": "test"}
    assert storage.local("a/b/deep/other.bin").read_bytes() == b"\0" * 10
    assert storage.size("a/b/file.txt") == 5
    assert storage.checksum("a/b/file.txt") == hashlib.sha256(b"hello").hexdigest()
    assert storage.size("a/b/none") is storage.checksum("a/b/none") is None


def test_exception_leaves_nothing_and_keeps_the_old_folder(storage: Storage) -> None:
    folder(storage, "old")
    with pytest.raises(RuntimeError), storage.new_folder("a/b") as path:
        (path / "file.txt").write_text("new")
        raise RuntimeError
    assert (storage.local("a/b") / "file.txt").read_text() == "old"
    assert [name.name for name in storage.local("a").iterdir()] == ["b"]
    assert [path.name for path in storage.scratch().iterdir()] in ([], ["a"])


def test_new_folder_replaces_the_old_one(storage: Storage) -> None:
    folder(storage, "old")
    with storage.new_folder("a/b") as path:
        (path / "file.txt").write_text("new")
    storage.forget("a/b")
    assert set(verify(storage.local("a/b")).files) == {"file.txt"}
    assert (storage.local("a/b") / "file.txt").read_text() == "new"
    assert storage.names("a/b") == ["file.txt", MANIFEST]


def test_old_folder_exists_until_the_new_one_is_complete(
    disk: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removal takes long, and fails while a network volume has readers of the folder."""
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
    assert set(verify(disk.local("samples/b")).files) == {"file.txt"}
    disk.sweep()
    assert [item.name for item in disk.local("samples").iterdir()] == ["b"]


def test_last_of_several_writers_of_a_folder_wins(disk: LocalStorage) -> None:
    def write(text: str) -> None:
        for _ in range(30):
            with disk.new_folder("data") as path:
                (path / "file").write_text(text)

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(write, text) for text in ("a", "b", "c")]:
            done.result()
    assert verify(disk.local("data"))
    assert [item.name for item in disk.root.iterdir()] == ["data"]


def test_file_is_replaced(storage: Storage) -> None:
    storage.write("x/y.json", b"one")
    assert storage.local("x/y.json").read_bytes() == b"one"
    storage.write("x/y.json", b"two")
    assert storage.read("x/y.json") == storage.local("x/y.json").read_bytes() == b"two"
    assert storage.names("x") == ["y.json"]


def test_removing_a_missing_key_does_nothing(storage: Storage) -> None:
    storage.remove("absent")
    folder(storage)
    storage.remove("a/b")
    assert not storage.exists("a/b")
    assert not storage.local("a/b").exists()
    assert storage.names("a") == storage.names("nowhere") == []
    with pytest.raises(FileNotFoundError):
        storage.read("a/b/file.txt")


def test_folder_and_file_move(storage: Storage) -> None:
    folder(storage)
    storage.move("a/b", "c/d")
    assert verify(storage.local("c/d")).model_extra == {"kind": "test"}
    assert not storage.exists("a/b") and storage.names("a") == []
    storage.write("file", b"x")
    storage.move("file", "c/file")
    assert (storage.exists("file"), storage.read("c/file")) == (False, b"x")


def test_key_with_the_same_prefix_is_not_removed(storage: Storage) -> None:
    for key in ("run/a", "run2/a", "run"[:2] + "/a"):
        storage.write(key, key.encode())
    storage.remove("run")
    assert storage.names("") == ["ru", "run2"]


def test_second_writer_of_a_version_gets_changed(storage: Storage) -> None:
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


def test_growing_file_is_readable_after_each_push(storage: Storage) -> None:
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
    ("damage", "message"),
    [
        (lambda path: (path / "file.txt").unlink(), "b/file.txt is missing"),
        (lambda path: (path / "file.txt").write_text("hell"), "has 4 bytes; 5 were written"),
        (lambda path: (path / "file.txt").write_text("hellO"), "checksum differs"),
        (lambda path: (path / MANIFEST).unlink(), "has no manifest.json: it is incomplete"),
        (lambda path: (path / MANIFEST).write_text("{"), "damaged"),
        (lambda path: (path / MANIFEST).write_text("[]"), "damaged"),
        (lambda path: (path / MANIFEST).write_text('{"files": {"x": 3}}'), "damaged"),
        (lambda path: (path / MANIFEST).write_bytes(b"\xff\xfe"), "damaged"),
    ],
)
def test_damaged_folder_is_named(
    disk: LocalStorage, damage: Callable[[Path], object], message: str
) -> None:
    path = folder(disk)
    damage(path)
    with pytest.raises(Corrupt, match=message):
        verify(path)


def test_manifest_cannot_refer_outside_its_folder(storage: Storage) -> None:
    folder(storage)
    storage.write("a/secret", b"x")
    files = {"../secret": {"size": 1, "sha256": "0"}}
    storage.write(f"a/b/{MANIFEST}", json.dumps({"files": files}).encode())
    with pytest.raises(Corrupt, match="outside"):
        verify(storage.local("a/b"))


def test_invalid_workspace_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="Cannot use"):
        LocalStorage(tmp_path / "file" / "below")
    with pytest.raises(UserError, match="Not a directory"):
        LocalStorage(tmp_path / "file")
    with pytest.raises(UserError, match="must be a directory or s3://bucket/prefix"):
        open_storage("ftp://host/place")
    with pytest.raises(UserError, match="must be a directory or s3://bucket/prefix"):
        open_storage("s3:/bucket/run")
    for prefix in ("a/./b", "/double//slash", "..", "a//b"):
        with pytest.raises(UserError, match="must be s3://bucket/prefix"):
            open_storage(f"s3://bucket/{prefix}")
    with pytest.raises(UserError, match="home directory"):
        open_storage("~nobody-of-this-name/run")
    with pytest.raises(UserError, match="embedded null"):
        open_storage("a\0b")


def test_reading_creates_nothing(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "typo" / "run")
    assert not storage.names("") and not storage.exists("data") and storage.size("a") is None
    storage.sweep()
    assert not (tmp_path / "typo").exists()
    storage.write("a/b", b"made")
    assert storage.read("a/b") == b"made"


def test_sweep_spares_the_files_of_living_writers(disk: LocalStorage) -> None:
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
    """Make the disk refuse files of more than 1,000 bytes."""
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
def test_disk_full_error_names_the_path_and_a_remedy(
    disk: LocalStorage,
    attempt: Callable[[LocalStorage], None],
    place: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit), report_errors("ddpm report"), full():
        attempt(disk)
    output = capsys.readouterr().err.replace("\n", " ")
    assert output.startswith(f"ddpm report: File too large: {disk.root}/")
    assert f"{place}. Free some space there, then run the same command again." in output
    assert not [path for path in disk.root.rglob("*") if path.is_file()]


def test_disk_full_error_of_the_cache_names_the_path(
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
    assert raised.value.__notes__ == ["Free some space there, then run the same command again."]


def test_tensors_get_the_usual_file_mode(tmp_path: Path) -> None:
    reading.save_tensors({"weight": torch.ones(3)}, tmp_path / "a", {"of": "test"})
    (tmp_path / "b").touch()
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode
    tensors, texts = reading.read_tensors_and_metadata(tmp_path / "a")
    assert tensors["weight"].tolist() == [1, 1, 1] and texts["of"] == "test"


def test_folder_in_place_of_a_file_is_named(disk: LocalStorage) -> None:
    disk.local("evaluation/results.json").mkdir(parents=True)
    with pytest.raises(IsADirectoryError) as raised:
        disk.write("evaluation/results.json", b"{}")
    assert raised.value.filename == str(disk.local("evaluation/results.json"))
    assert disk.names("evaluation") == ["results.json"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs /sys, which is never writable")
def test_read_only_workspace_is_named_with_a_remedy() -> None:
    storage = LocalStorage(Path("/sys"))
    with pytest.raises(OSError) as raised:
        storage.write("run.json", b"{}")
    assert raised.value.filename == "/sys/run.json"
    assert raised.value.__notes__ == ["Choose another workspace with -w."]


def test_sweep_without_the_lease_spares_uploads_to_s3(
    storage: Storage,
) -> None:
    storage.write("snapshots/step-00000004/model", b"x")
    if isinstance(storage, LocalStorage):
        storage.local("evaluation/.in_domain.0123abcd.ddpm-staged").mkdir(parents=True)
    storage.sweep_staged()
    assert storage.size("snapshots/step-00000004/model") == 1
    if isinstance(storage, LocalStorage):
        assert not list(storage.local("evaluation").iterdir())


def test_sweep_spares_hidden_files_of_the_user(disk: LocalStorage) -> None:
    """Names that end in a date, and everything in folders that do not belong to a run."""
    own = [".backup.20240101/precious", ".notes.20240131", "samples/.grid.20240101"]
    own += ["notes/.plan.20231224", "notes/.plan.20231224.ddpm-staged"]
    for name in own:
        disk.local(name).parent.mkdir(parents=True, exist_ok=True)
        disk.local(name).write_bytes(b"x")
    disk.sweep()
    assert all(disk.local(name).exists() for name in own)


def test_staged_names_have_a_mark_and_fit_the_length_limit(tmp_path: Path) -> None:
    for name in ("x" * 255, "\N{CAT}" * 63, "ab.gif"):
        with staged_file(tmp_path / name) as staging:
            assert staging.name.endswith(".ddpm-staged")
            staging.replace(tmp_path / name)


def test_swept_folders_are_those_of_a_run() -> None:
    assert set(FOLDERS) == set(OUTPUTS)


def test_lock_of_a_directory_is_exclusive(disk: LocalStorage) -> None:
    with disk.lock() as held:
        assert held
        with pytest.raises(Locked), LocalStorage(disk.root).lock():
            pass
    with disk.lock():
        pass


def test_volume_without_locks_is_swept_by_age(
    disk: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refused)
    with disk.lock() as held:
        assert not held
    old, new = disk.local(".data.0123abcd.ddpm-staged"), disk.local(".data.4567abcd.ddpm-staged")
    for path in (old, new):
        path.mkdir()
    os.utime(old, (0, 0))
    disk.sweep()
    assert not old.exists()
    assert new.exists()


def test_steps_ignores_other_names(tmp_path: Path) -> None:
    workspace = Workspace.open(os.fspath(tmp_path))
    for name in (step_name(20), step_name(3), "step-x", "step-3", ".step-00000009.abc", "notes"):
        (tmp_path / "snapshots" / name).mkdir(parents=True)
    assert workspace.steps("snapshots") == [3, 20]


def test_damaged_json_reads_as_empty(tmp_path: Path) -> None:
    workspace = Workspace.open(os.fspath(tmp_path))
    (tmp_path / "run.json").write_text('{"half": ')
    assert workspace.read_json("run.json") == {}
    workspace.write_json("run.json", {"a": 1})
    assert workspace.read_json("run.json") == {"a": 1}


@pytest.mark.parametrize("text", ['{"half": ', "[]", '{"size": -1, "sha256": ""}', '{"size": 1}'])
def test_model_of_an_invalid_file_is_none(tmp_path: Path, text: str) -> None:
    workspace = Workspace.open(os.fspath(tmp_path))
    assert workspace.read_model("record.json", FileRecord) is None
    (tmp_path / "record.json").write_text(text)
    assert workspace.read_model("record.json", FileRecord) is None
    (tmp_path / "record.json").write_text('{"size": 1, "sha256": "ab", "later": 0}')
    assert workspace.read_model("record.json", FileRecord) == FileRecord(size=1, sha256="ab")


def test_fingerprint_depends_only_on_content() -> None:
    assert fingerprint({"a": 1, "b": [1, 2]}) == fingerprint({"b": [1, 2], "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})
