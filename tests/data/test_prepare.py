"""prepare is repeatable, whole or not at all, bounded in memory, and idle when nothing changed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.pictures import (
    config,
    dies,
    encoded,
    loaded,
    noise,
    prepared,
    rejected,
    write,
    write_classes,
)

from ddpm_core.data import arrays, pool
from ddpm_core.data.dataset import data_fingerprint, open_dataset
from ddpm_core.data.prepare import prepare, stale
from ddpm_core.data.sources.open import open_source
from ddpm_core.data.split import hold_out
from ddpm_core.errors import UserError
from ddpm_core.storage import verify
from ddpm_core.storage.lease import LEASE, hold
from ddpm_core.storage.staging import staged_folder
from ddpm_core.storage.workspace import Workspace


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace.open(str(tmp_path / "workspace"))


def fingerprints(manifest: dict[str, Any]) -> tuple[str, str]:
    return manifest["fingerprint"], manifest["holdout_fingerprint"]


def left_in(workspace: Workspace) -> set[str]:
    """Everything in a workspace, hidden files too, but the lease of who changes it."""
    return {item.name for item in workspace.path("").iterdir()} - {".lock", LEASE}


# the same pictures give the same data


def test_the_number_of_workers_changes_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "ALONE_PICTURES", 0)
    monkeypatch.setattr(pool, "CHUNK_PICTURES", 3)
    root = write_classes(tmp_path / "raw", ["cat", "dog"], each=20)
    write(root / "cat/broken.png", b"broken")
    settings = {"holdout": 0.3, "max_rejected": 0.5}
    one = prepared(tmp_path / "1", root, workers=1, **settings)
    three = prepared(tmp_path / "3", root, workers=3, **settings)
    assert one.manifest["files"] == three.manifest["files"]
    assert rejected(tmp_path / "1/workspace") == rejected(tmp_path / "3/workspace")


def test_the_order_in_which_files_were_made_changes_nothing(tmp_path: Path) -> None:
    root = write_classes(tmp_path / "raw", ["b", "a"], each=5)
    for path in sorted(root.rglob("*.png"), reverse=True):
        write(tmp_path / "copy" / path.relative_to(root), path.read_bytes())
        os.utime(tmp_path / "copy" / path.relative_to(root), (1, 1))
    first = prepared(tmp_path / "1", root, holdout=0.3)
    second = prepared(tmp_path / "2", tmp_path / "copy", holdout=0.3)
    assert fingerprints(first.manifest) == fingerprints(second.manifest)


def test_another_pixel_label_or_caption_is_another_fingerprint(tmp_path: Path) -> None:
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


# the split


def test_the_split_is_stable_when_pictures_are_added(tmp_path: Path) -> None:
    root = write_classes(tmp_path / "raw", ["a", "b"], each=30)
    before = held_out(tmp_path / "1", root)
    write_classes(root, ["a/more", "c"], each=60, seed=500)
    after = held_out(tmp_path / "2", root)
    assert before and before < after


def held_out(tmp_path: Path, root: Path) -> set[bytes]:
    data = prepared(tmp_path, root, split="holdout", holdout=0.2)
    return {image.tobytes() for image in data.images[:]}


def test_another_size_or_way_to_a_square_holds_the_same_pictures_out(tmp_path: Path) -> None:
    root = write_classes(tmp_path / "raw", ["."], each=40)
    for number, path in enumerate(sorted(root.iterdir())):  # a caption to know each of them by
        write(path.with_suffix(".txt"), f"picture {number}")

    def held(place: str, **settings: Any) -> list[bytes]:
        data = prepared(tmp_path / place, root, split="holdout", holdout=0.3, **settings)
        assert data.captions is not None
        return [bytes(row) for row in data.captions]

    first = held("1")
    assert 0 < len(first) < 40
    assert held("2", image_size=16, resize="pad", background="red", channels=1) == first


def test_about_the_share_asked_for_is_held_out() -> None:
    digests = [np.random.default_rng(n).bytes(32) for n in range(4000)]
    chosen = hold_out(digests, ["a"] * 4000, [None] * 4000, 0.1)
    assert 340 < chosen.sum() < 460


def test_copies_are_reported_and_lie_on_one_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_classes(tmp_path / "raw", ["a"], each=40)
    shutil.copytree(root / "a", root / "b")
    for path in (root / "b").iterdir():  # the same pixels in another file
        write(path, Image.open(path), kind="BMP")
    train = prepared(tmp_path, root, holdout=0.3)
    assert train.manifest["duplicates"] == {
        "copies": 40,
        "pictures_with_copies": 40,
        "in_both_splits": 0,
    }
    held = open_dataset(Workspace.open(str(tmp_path / "workspace")), "holdout")
    assert len(held) and not {i.tobytes() for i in train.images[:]} & {
        i.tobytes() for i in held.images[:]
    }
    assert "40 pictures are exact copies of others" in capsys.readouterr().err


def test_copies_across_given_splits_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_classes(tmp_path / "raw/train", ["a"]).parent
    shutil.copytree(root / "train", root / "test")
    assert prepared(tmp_path, root).manifest["duplicates"]["in_both_splits"] == 3
    assert "3 held-out pictures are also among those for training" in capsys.readouterr().err


def test_a_class_of_one_picture_is_kept_for_training() -> None:
    low, high = bytes(32), b"\xff" * 32
    # A copy of it in another class goes with it.
    chosen = hold_out([low, low, high], ["one", "two", "two"], [None] * 3, 0.5)
    assert chosen.tolist() == [False, False, False]


# nothing is done twice


def test_what_is_up_to_date_is_left_alone(
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
def test_a_setting_that_matters_makes_the_data_stale(
    tmp_path: Path, workspace: Workspace, change: dict[str, Any], reason: str
) -> None:
    root = write_classes(tmp_path / "raw", ["a"])
    prepare(config(root), workspace)
    assert stale(config(root, **change), workspace) == reason
    assert stale(config(root, workers=2, max_rejected=0.5), workspace) is None


def test_a_setting_that_did_not_exist_then_had_its_default(
    tmp_path: Path, workspace: Workspace
) -> None:
    root = write_classes(tmp_path / "raw", ["a"])
    manifest = prepare(config(root), workspace)
    del manifest["prepare"]["resize"]
    workspace.write_json("data/manifest.json", manifest)
    assert stale(config(root), workspace) is None
    assert stale(config(root, resize="pad"), workspace) is not None


def test_a_manifest_that_a_hand_has_changed_is_not_believed(
    tmp_path: Path, workspace: Workspace
) -> None:
    settings = config(write_classes(tmp_path / "raw", ["a"]))
    manifest = prepare(settings, workspace)
    for changed in ({"fingerprint": "0123456789abcdef"}, {"classes": ["dog"]}):
        workspace.write_json("data/manifest.json", {**manifest, **changed})
        with pytest.raises(UserError, match=r"was changed after .*: run `ddpm prepare` again"):
            open_dataset(workspace)
        with pytest.raises(UserError, match="was changed after"):
            data_fingerprint(workspace)
        assert stale(settings, workspace) == "data/manifest.json was changed since"
    assert prepare(settings, workspace)["fingerprint"] == manifest["fingerprint"]
    earlier = {key: value for key, value in manifest.items() if key != "bound"}
    workspace.write_json("data/manifest.json", earlier)
    assert open_dataset(workspace).fingerprint == manifest["fingerprint"]


def test_any_change_of_a_directory_makes_the_data_stale(
    tmp_path: Path, workspace: Workspace
) -> None:
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


def test_an_archive_that_was_only_touched_is_no_other(tmp_path: Path, workspace: Workspace) -> None:
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


def test_a_source_that_is_gone_does_not_make_the_data_stale(
    tmp_path: Path, workspace: Workspace
) -> None:
    settings = config(write_classes(tmp_path / "raw", ["a"]))
    prepare(settings, workspace)
    shutil.rmtree(tmp_path / "raw")
    assert stale(settings, workspace) is None


@pytest.mark.parametrize("damage", ["remove", "cut"])
def test_data_that_lost_a_file_are_prepared_again(
    tmp_path: Path, workspace: Workspace, damage: str
) -> None:
    settings = config(write_classes(tmp_path / "raw", ["a"]))
    before = prepare(settings, workspace)
    path = workspace.path("data/images.npy")
    path.unlink() if damage == "remove" else path.write_bytes(path.read_bytes()[:-1])
    reason = stale(settings, workspace)
    assert reason is not None and "images.npy" in reason
    assert prepare(settings, workspace)["files"] == before["files"]


# whole or not at all


def test_too_many_unusable_pictures_fail_with_the_list_and_keep_the_earlier_data(
    tmp_path: Path, workspace: Workspace
) -> None:
    root = write_classes(tmp_path / "raw", ["a"], each=8)
    before = prepare(config(root), workspace)
    for number in range(25):
        write(root / f"a/broken-{number:02d}.jpg", b"broken")
    with pytest.raises(UserError) as error:
        prepare(config(root), workspace)
    message = str(error.value)
    assert "25 of 33 pictures" in message and "prepare.max_rejected (0.01)" in message
    assert "a/broken-00.jpg: not a picture" in message and "and 5 more" in message
    assert workspace.read_json("data/manifest.json") == before
    verify(workspace.path("data"))
    assert left_in(workspace) == {"data", "rejected.csv"}
    assert prepare(config(root, max_rejected=0.8), workspace)["rejected"] == 25


def test_large_images_are_not_all_on_their_way_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes may have three chunks of a thousand bytes each; these have four thousand."""
    monkeypatch.setattr(pool, "AHEAD_BYTES", 1000)
    on_the_way: list[int] = []
    finished = 0

    def chunks() -> Iterator[pool.Chunk]:
        for number in range(6):
            on_the_way.append(number - finished)
            yield [(number, bytes(4000))]

    for count in pool.spread(len, (), chunks(), 2):
        assert count == 1
        finished += 1
    assert finished == 6 and max(on_the_way) == 1


SCRIPT = """
import resource, sys
from ddpm_core import console
from ddpm_core.data import pool
from ddpm_core.data.prepare import prepare
from ddpm_core.errors import UserError
from ddpm_core.config.load import validate
from ddpm_core.storage.workspace import Workspace

console.PLAIN_INTERVAL = 0.0
pool.ALONE_PICTURES = pool.ALONE_BYTES = 0
pool.CHUNK_PICTURES = 1
source, target, workers, limit = sys.argv[1:]
if int(limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
settings = {"source": source, "image_size": 64, "workers": int(workers)}
config = validate({"prepare": settings, "model": {"attention": [16]}})
try:
    prepare(config, Workspace.open(target))
except UserError as error:
    sys.exit(str(error))
print("torch" in sys.modules)
"""


def start(tmp_path: Path, workers: int = 2, limit: int = 0) -> subprocess.Popen[str]:
    """prepare in a process of its own; it says how far it is after every picture."""
    script = write(tmp_path / "script.py", SCRIPT)
    target = str(tmp_path / "workspace")
    arguments = [
        sys.executable,
        str(script),
        str(tmp_path / "raw"),
        target,
        str(workers),
        str(limit),
    ]
    return subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_workers_need_no_guard_in_the_script_that_calls_prepare(tmp_path: Path) -> None:
    """The script is none: it comes by standard input, where no worker could read it again."""
    write_classes(tmp_path / "raw", ["a"], each=20)
    arguments = [str(tmp_path / "raw"), str(tmp_path / "workspace"), "2", "0"]
    done = subprocess.run(
        [sys.executable, "-", *arguments], input=SCRIPT, capture_output=True, text=True
    )
    assert done.stdout == "False\n", done.stderr


def test_a_full_disk_is_one_sentence_and_keeps_the_earlier_data(
    tmp_path: Path, workspace: Workspace
) -> None:
    root = write_classes(tmp_path / "raw", ["a"], each=40)
    before = prepare(config(root), workspace)
    process = start(tmp_path, workers=1, limit=100_000)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 1 and "Traceback" not in told
    assert "no room left for the prepared data" in told
    assert workspace.read_json("data/manifest.json") == before
    verify(workspace.path("data"))
    assert left_in(workspace) == {"data"}


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_a_workspace_that_may_not_be_written_is_one_sentence(
    tmp_path: Path, workspace: Workspace, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    root = write_classes(tmp_path / "raw", ["a"])

    def refused(*arguments: Any) -> None:
        raise OSError(number, os.strerror(number), "data")

    monkeypatch.setattr(arrays.Scratch, "__init__", refused)
    with pytest.raises(UserError, match=rf"can't be written to .*: {os.strerror(number)} \(data\)"):
        prepare(config(root), workspace)


def test_what_a_killed_prepare_has_left_goes_and_what_another_writes_stays(
    tmp_path: Path, workspace: Workspace
) -> None:
    place = workspace.storage.scratch()
    for name in (".data.0123abcd.ddpm-staged", ".source.0123abcd.ddpm-staged"):
        write(place / name / "images.npy", b"half")
    with staged_folder(place / "data") as held:
        prepare(config(write_classes(tmp_path / "raw", ["a"])), workspace)
        assert left_in(workspace) == {held.name, "data"}


def test_of_two_at_once_the_second_is_refused_and_leaves_the_first_alone(
    tmp_path: Path, workspace: Workspace
) -> None:
    """Nobody has prepared here before; whoever trains on the first data keeps them."""
    write_many(tmp_path / "raw")
    process = start(tmp_path)
    until_it_works(process)
    with pytest.raises(UserError, match=f"in use by process {process.pid} on "):
        prepare(config(tmp_path / "raw"), workspace)
    process.kill()
    process.communicate(timeout=60)
    assert not workspace.path("data").exists()


def test_what_was_fetched_goes_once_others_may_train(
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


def write_many(root: Path) -> None:
    """Pictures that take seconds to decode, to have time to interrupt: 20, under 200 names each."""
    for seed in range(20):
        path = write(root / "a" / f"{seed}.png", noise(seed, (300, 300)))
        for number in range(200):
            path.with_name(f"{path.stem}-{number}.png").hardlink_to(path)


def until_it_works(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("prepare: 3/"):
            return
    raise AssertionError("it ended before it began")


def test_ctrl_c_ends_the_workers_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    write_many(tmp_path / "raw")
    process = start(tmp_path)
    until_it_works(process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to all of them
    # The workers hold the same pipes: this returns when the last of them has ended.
    _, told = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert told.count("KeyboardInterrupt") == 1
    assert left_in(Workspace.open(str(tmp_path / "workspace"))) == set()


def test_workers_end_when_the_process_that_started_them_is_killed(tmp_path: Path) -> None:
    write_many(tmp_path / "raw")
    process = start(tmp_path)
    until_it_works(process)
    process.kill()
    # The workers hold the same pipes: this returns when the last of them has ended.
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "workspace/data").exists()


def test_a_worker_that_is_killed_is_one_sentence() -> None:
    chunks: list[Any] = [[(0, b"")], [(1, b"")]]
    with pytest.raises(UserError, match=r"was killed, .* memory.* prepare\.workers"):
        list(pool.spread(dies, (), chunks, workers=2))


# bounded memory, no torch


def test_neither_prepare_nor_its_workers_import_torch(tmp_path: Path) -> None:
    write_classes(tmp_path / "raw", ["a"])
    out, told = start(tmp_path, workers=1).communicate(timeout=60)
    assert out == "False\n", told
    (modules,) = pool.spread(loaded, (), [[(0, b"")]], workers=2)
    assert "ddpm_core.data.prepare" in modules and "torch" not in modules


def test_only_a_few_chunks_are_on_their_way() -> None:
    taken = 0

    def chunks() -> Iterator[Any]:
        nonlocal taken
        for number in range(40):
            taken += 1
            yield [(number, b"")]

    results = pool.spread(loaded, (), chunks(), workers=2)
    next(results)
    assert taken <= 2 * 3
    assert len(list(results)) == 39


def test_chunks_are_bounded_in_pictures_and_bytes() -> None:
    payloads: list[Any] = [(n, bytes(2**20)) for n in range(20)]
    assert max(len(chunk) for chunk in pool.chunked(payloads, 0)) == pool.CHUNK_BYTES // 2**20
    small: list[Any] = [(n, b"x") for n in range(200)]
    assert {len(chunk) for chunk in pool.chunked(small, 2**20)} == {4}
    assert [n for chunk in pool.chunked(small, 0) for n, _ in chunk] == list(range(200))


def test_memory_is_that_of_some_blocks_and_not_of_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "_BLOCK_BYTES", 2**18)
    monkeypatch.setattr(pool, "CHUNK_BYTES", 2**20)
    write_classes(tmp_path / "raw", ["a"], each=150)
    tracemalloc.start()
    data = prepared(tmp_path, tmp_path / "raw", image_size=256)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert np.prod(data.images.shape) > 29e6
    assert peak < 8e6


# what lies in data/


def test_the_folder_is_sealed_and_says_where_it_came_from(
    tmp_path: Path, workspace: Workspace
) -> None:
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


def test_large_arrays_are_split_into_parts_that_read_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_classes(tmp_path / "raw", ["a", "b"], each=10)
    whole = prepared(tmp_path / "1", root)
    monkeypatch.setattr(arrays, "PART_BYTES", 3 * 8 * 8 * 3)
    workspace = Workspace.open(str(tmp_path / "2"))
    manifest = prepare(config(root), workspace)
    assert manifest["arrays"]["images"] == [f"images-{n:03d}-of-007.npy" for n in range(7)]
    parts = open_dataset(workspace)
    assert parts.fingerprint == whole.fingerprint
    assert np.array_equal(parts.images[:], whole.images[:])
    assert np.array_equal(parts.labels, whole.labels)
    order = np.array([19, 0, 7, 8, 9, 0])
    assert np.array_equal(parts.take(order), whole.take(order))


def test_the_contact_sheet_shows_every_class_with_its_name(tmp_path: Path) -> None:
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
