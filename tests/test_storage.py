"""Everything written is there whole, or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ddpm_core.errors import UserError
from ddpm_core.storage import MANIFEST, Corrupt, LocalStorage, open_storage, verify
from ddpm_core.workspace import Workspace, fingerprint, step_name


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "root")


def folder(storage: LocalStorage, text: str = "hello") -> Path:
    with storage.new_folder("a/b", {"kind": "test"}) as path:
        (path / "file.txt").write_text(text)
        (path / "deep").mkdir()
        (path / "deep" / "other.bin").write_bytes(b"\0" * 10)
    return storage.local("a/b")


def test_a_folder_is_there_with_its_checksums(storage: LocalStorage) -> None:
    manifest = verify(folder(storage))
    assert manifest["kind"] == "test"
    assert set(manifest["files"]) == {"file.txt", "deep/other.bin"}
    assert storage.names("a") == ["b"]


def test_an_exception_leaves_nothing_and_keeps_the_old(storage: LocalStorage) -> None:
    folder(storage, "old")
    with pytest.raises(RuntimeError), storage.new_folder("a/b") as path:
        (path / "file.txt").write_text("new")
        raise RuntimeError
    assert (storage.local("a/b") / "file.txt").read_text() == "old"
    assert [name.name for name in storage.local("a").iterdir()] == ["b"]


def test_a_new_folder_takes_the_place_of_the_old(storage: LocalStorage) -> None:
    folder(storage, "old")
    folder(storage, "new")
    assert (storage.local("a/b") / "file.txt").read_text() == "new"


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
def test_damage_is_named(storage: LocalStorage, damage, told: str) -> None:
    path = folder(storage)
    damage(path)
    with pytest.raises(Corrupt, match=told):
        verify(path)


def test_a_manifest_can_not_point_outside_its_folder(storage: LocalStorage) -> None:
    path = folder(storage)
    outside = path.parent / "secret"
    outside.write_text("x")
    files = {"../secret": {"size": 1, "sha256": "0"}}
    (path / MANIFEST).write_text(json.dumps({"files": files}))
    with pytest.raises(Corrupt, match="outside"):
        verify(path)


def test_a_file_is_replaced_whole(storage: LocalStorage) -> None:
    storage.write("x/y.json", b"one")
    storage.write("x/y.json", b"two")
    assert storage.read("x/y.json") == b"two"
    assert storage.names("x") == ["y.json"]


def test_removing_what_is_absent_is_no_mistake(storage: LocalStorage) -> None:
    storage.remove("absent")
    folder(storage)
    storage.remove("a/b")
    assert not storage.exists("a/b")
    assert storage.names("nowhere") == []


def test_a_workspace_that_can_not_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="Cannot use"):
        LocalStorage(tmp_path / "file" / "below")
    with pytest.raises(UserError, match="a directory is needed"):
        open_storage("ftp://host/place")


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
