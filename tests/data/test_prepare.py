"""prepare is repeatable and atomic, needs little memory, and does nothing if up to date."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tracemalloc
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.images import (
    config,
    encoded,
    noise,
    prepared,
    write,
    write_classes,
)

from ddpm_core.data import pack, workers
from ddpm_core.data.dataset import DataManifest, data_fingerprint, open_dataset
from ddpm_core.data.prepare import prepare, stale
from ddpm_core.data.sources.open import open_source
from ddpm_core.errors import UserError
from ddpm_core.storage import verify
from ddpm_core.storage.lease import LEASE, hold
from ddpm_core.storage.staging import staged_folder
from ddpm_core.storage.workspace import Workspace


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace.open(str(tmp_path / "workspace"))


def fingerprints(manifest: DataManifest) -> tuple[str, str]:
    return manifest.fingerprint, manifest.holdout_fingerprint


def left_in(workspace: Workspace) -> set[str]:
    """Return all files in a workspace, also hidden ones, except its lease."""
    return {item.name for item in workspace.path("").iterdir()} - {".lock", LEASE}


# The same images give the same data


def test_result_does_not_depend_on_the_order_of_files(tmp_path: Path) -> None:
    root = write_classes(tmp_path / "raw", ["b", "a"], each=5)
    for path in sorted(root.rglob("*.png"), reverse=True):
        write(tmp_path / "copy" / path.relative_to(root), path.read_bytes())
        os.utime(tmp_path / "copy" / path.relative_to(root), (1, 1))
    first = prepared(tmp_path / "1", root, holdout=0.3)
    second = prepared(tmp_path / "2", tmp_path / "copy", holdout=0.3)
    assert fingerprints(first.manifest) == fingerprints(second.manifest)


def test_fingerprint_covers_pixels_labels_and_captions(tmp_path: Path) -> None:
    root = write_classes(tmp_path / "raw", ["a", "b"])
    found = {prepared(tmp_path / "0", root).fingerprint}
    write(root / "a/000.txt", "caption")
    found.add(prepared(tmp_path / "1", root).fingerprint)
    image = Image.open(root / "b/000.png")
    image.putpixel((5, 5), (1, 2, 3))
    write(root / "b/000.png", image)
    found.add(prepared(tmp_path / "2", root).fingerprint)
    (root / "b").rename(root / "c")
    found.add(prepared(tmp_path / "3", root).fingerprint)
    assert len(found) == 4


# Staleness


def test_up_to_date_data_are_not_rebuilt(
    tmp_path: Path, workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = config(write_classes(tmp_path / "raw", ["a"]))
    prepare(settings, workspace)
    before = workspace.path("data").stat().st_ino
    capsys.readouterr()
    prepare(settings, workspace)
    assert workspace.path("data").stat().st_ino == before
    assert "up to date" in capsys.readouterr().err
    assert stale(settings, workspace) is None


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"image_size": 16}, "prepare.image_size is 16, it was 8"),
        ({"resize": "pad"}, "prepare.resize is 'pad', it was 'crop'"),
        ({"holdout": 0.5}, "prepare.holdout is 0.5, it was 0.0"),
    ],
)
def test_changed_setting_makes_the_data_stale(
    tmp_path: Path, workspace: Workspace, change: dict[str, Any], reason: str
) -> None:
    root = write_classes(tmp_path / "raw", ["a"])
    prepare(config(root), workspace)
    assert stale(config(root, **change), workspace) == reason
    assert stale(config(root, workers=2, max_rejected=0.5), workspace) is None


def test_setting_missing_in_the_manifest_is_the_default(
    tmp_path: Path, workspace: Workspace
) -> None:
    root = write_classes(tmp_path / "raw", ["a"])
    manifest = prepare(config(root), workspace)
    del manifest["prepare"]["resize"]
    workspace.write_json("data/manifest.json", manifest)
    assert stale(config(root), workspace) is None
    assert stale(config(root, resize="pad"), workspace) is not None


def test_edited_manifest_is_refused(tmp_path: Path, workspace: Workspace) -> None:
    settings = config(write_classes(tmp_path / "raw", ["a"]))
    manifest = prepare(settings, workspace)
    for changed in ({"fingerprint": "0123456789abcdef"}, {"classes": ["dog"]}):
        workspace.write_json("data/manifest.json", {**manifest, **changed})
        with pytest.raises(
            UserError, match=r"data/manifest\.json was edited after .*Run `ddpm prepare`\."
        ):
            open_dataset(workspace)
        with pytest.raises(UserError, match="was edited after"):
            data_fingerprint(workspace)
        assert stale(settings, workspace) == "data/manifest.json was edited after prepare wrote it"
    assert prepare(settings, workspace)["fingerprint"] == manifest["fingerprint"]
    earlier = {key: value for key, value in manifest.items() if key != "bound"}
    workspace.write_json("data/manifest.json", earlier)
    assert open_dataset(workspace).fingerprint == manifest["fingerprint"]


def test_change_of_a_directory_makes_the_data_stale(tmp_path: Path, workspace: Workspace) -> None:
    root = write_classes(tmp_path / "raw", ["a"], each=4)
    settings = config(root)

    def added() -> None:
        write(root / "a/new.png", noise(77))

    def renamed() -> None:
        (root / "a/new.png").rename(root / "a/newer.png")

    def removed() -> None:
        (root / "a/newer.png").unlink()

    def written() -> None:
        write(root / "a/000.png", noise(78))

    for change in (added, renamed, removed, written):
        prepare(settings, workspace)
        assert stale(settings, workspace) is None
        change()
        assert stale(settings, workspace) == "the source has changed since it was prepared"


def test_touched_archive_does_not_make_the_data_stale(tmp_path: Path, workspace: Workspace) -> None:
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("0.png", encoded(noise(1)))
    prepare(config(path), workspace)
    os.utime(path, (1, 1))
    assert stale(config(path), workspace) is None
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert stale(config(path), workspace) is not None


def test_missing_source_does_not_make_the_data_stale(tmp_path: Path, workspace: Workspace) -> None:
    settings = config(write_classes(tmp_path / "raw", ["a"]))
    prepare(settings, workspace)
    shutil.rmtree(tmp_path / "raw")
    assert stale(settings, workspace) is None


@pytest.mark.parametrize("damage", ["remove", "cut"])
def test_data_with_a_missing_file_are_rebuilt(
    tmp_path: Path, workspace: Workspace, damage: str
) -> None:
    settings = config(write_classes(tmp_path / "raw", ["a"]))
    before = prepare(settings, workspace)
    path = workspace.path("data/images.npy")
    path.unlink() if damage == "remove" else path.write_bytes(path.read_bytes()[:-1])
    reason = stale(settings, workspace)
    assert reason is not None and "images.npy" in reason
    assert prepare(settings, workspace)["files"] == before["files"]


# All or nothing


def test_too_many_rejected_images_fail_and_keep_earlier_data(
    tmp_path: Path, workspace: Workspace
) -> None:
    root = write_classes(tmp_path / "raw", ["a"], each=8)
    before = prepare(config(root), workspace)
    for number in range(25):
        write(root / f"a/broken-{number:02d}.jpg", b"broken")
    with pytest.raises(UserError) as error:
        prepare(config(root), workspace)
    message = str(error.value)
    assert "25 of 33 images" in message and "prepare.max_rejected=0.01" in message
    assert "a/broken-00.jpg: not an image" in message and "and 5 more" in message
    assert workspace.read_json("data/manifest.json") == before
    verify(workspace.path("data"))
    assert left_in(workspace) == {"data", "rejected.csv"}
    assert prepare(config(root, max_rejected=0.8), workspace)["rejected"] == 25


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_unwritable_workspace_is_a_user_error(
    tmp_path: Path, workspace: Workspace, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    root = write_classes(tmp_path / "raw", ["a"])

    def refused(*arguments: Any) -> None:
        raise OSError(number, os.strerror(number), "data")

    monkeypatch.setattr(pack.Scratch, "__init__", refused)
    with pytest.raises(UserError, match=rf"Cannot write .* to .*: {os.strerror(number)} \(data\)"):
        prepare(config(root), workspace)


def test_only_leftovers_of_killed_processes_are_removed(
    tmp_path: Path, workspace: Workspace
) -> None:
    place = workspace.storage.scratch()
    for name in (".data.0123abcd.ddpm-staged", ".source.0123abcd.ddpm-staged"):
        write(place / name / "images.npy", b"half")
    with staged_folder(place / "data") as held:
        prepare(config(write_classes(tmp_path / "raw", ["a"])), workspace)
        assert left_in(workspace) == {held.name, "data"}


def test_downloads_are_deleted_after_the_lease(
    tmp_path: Path, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_classes(tmp_path / "raw", ["a"])

    @contextmanager
    def fetched(*arguments: Any) -> Iterator[Any]:
        with open_source(*arguments) as source:
            yield source
        with hold(Workspace.open(workspace.uri)):
            assert left_in(workspace) == {"data"}

    monkeypatch.setattr("ddpm_core.data.prepare.open_source", fetched)
    assert prepare(config(root), workspace)["count"] == 3


# Limited memory, no torch


def test_prepare_needs_memory_for_some_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "_BLOCK_BYTES", 2**18)
    monkeypatch.setattr(workers, "CHUNK_BYTES", 2**20)
    write_classes(tmp_path / "raw", ["a"], each=150)
    tracemalloc.start()
    data = prepared(tmp_path, tmp_path / "raw", image_size=256)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert np.prod(data.images.shape) > 29e6
    assert peak < 8e6


# The files in data/


def test_manifest_seals_data_and_names_the_source(tmp_path: Path, workspace: Workspace) -> None:
    root = write_classes(tmp_path / "raw", ["a", "b"], each=20)
    manifest = prepare(config(root, holdout=0.2), workspace)
    assert verify(workspace.path("data")).model_dump() == manifest
    assert manifest["source"]["uri"] == str(root)
    assert len(manifest["source"]["listing_sha256"]) == 64
    assert manifest["count"] + manifest["holdout_count"] == 40
    assert sum(manifest["class_counts"]) == manifest["count"]
    assert {
        "images.npy",
        "holdout_labels.npy",
        "captions.npy",
        "contact.png",
        "rejected.csv",
    } <= set(manifest["files"])
    images = np.load(workspace.path("data/images.npy"), mmap_mode="r")
    assert images.dtype == np.uint8 and images.shape == (manifest["count"], 8, 8, 3)
    json.dumps(manifest)


def test_array_in_parts_reads_like_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_classes(tmp_path / "raw", ["a", "b"], each=10)
    whole = prepared(tmp_path / "1", root)
    monkeypatch.setattr(pack, "PART_BYTES", 3 * 8 * 8 * 3)
    workspace = Workspace.open(str(tmp_path / "2"))
    manifest = prepare(config(root), workspace)
    assert manifest["arrays"]["images"] == [f"images-{n:03d}-of-007.npy" for n in range(7)]
    parts = open_dataset(workspace)
    assert parts.fingerprint == whole.fingerprint
    assert np.array_equal(parts.images[:], whole.images[:])
    assert np.array_equal(parts.labels, whole.labels)
    order = np.array([19, 0, 7, 8, 9, 0])
    assert np.array_equal(parts.take(order), whole.take(order))


def test_contact_sheet_shows_every_class_with_its_name(tmp_path: Path) -> None:
    root = tmp_path / "raw"
    write(root / "red/0.png", Image.new("RGB", (9, 9), (255, 0, 0)))
    write(root / "blue/0.png", Image.new("RGB", (9, 9), (0, 0, 255)))
    prepared(tmp_path, root)
    sheet = np.asarray(Image.open(tmp_path / "workspace/data/contact.png")).astype(int)
    blue, red = (sheet == (0, 0, 255)).all(axis=2), (sheet == (255, 0, 0)).all(axis=2)
    assert blue.sum() == red.sum() == 48 * 48
    assert np.argwhere(blue)[:, 0].max() < np.argwhere(red)[:, 0].min()
    ink = (sheet < 100).all(axis=2)
    for first in (np.argwhere(blue)[0, 0], np.argwhere(red)[0, 0]):
        assert ink[first - 20 : first].sum() > 20
