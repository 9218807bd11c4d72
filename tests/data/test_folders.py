"""Folder names define classes and splits; links, clutter and odd names are handled."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from support.images import encoded, noise, prepared, rejected, write, write_classes

from ddpm_core.data.check import check_data
from ddpm_core.data.sources import folder as folders
from ddpm_core.data.sources.folder import Directory, directory_state
from ddpm_core.errors import UserError


def counts(tmp_path: Path, root: Path, **settings: object) -> tuple[dict[str, int], dict[str, int]]:
    """Return the number of images by class, for training and held out."""
    manifest = prepared(tmp_path, root, **settings).manifest  # type: ignore[arg-type]
    names = manifest.classes
    train = dict(zip(names, manifest.class_counts, strict=True))
    return train, dict(zip(names, manifest.holdout_class_counts, strict=True))


# Classes


def test_folders_are_classes(tmp_path: Path) -> None:
    data = prepared(tmp_path, write_classes(tmp_path / "raw", ["dog", "cat"]))
    assert data.classes == ["cat", "dog"]
    assert data.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.class_counts == [3, 3]


LAYOUTS = {
    "deeper folders belong to their class": (
        ["cat", "cat/old/2001", "dog/new"],
        {"cat": 6, "dog": 3},
        {"cat": 0, "dog": 0},
    ),
    "wrapper folders are not classes": (
        ["dataset/images/cat", "dataset/images/dog"],
        {"cat": 3, "dog": 3},
        {"cat": 0, "dog": 0},
    ),
    "a single class includes its subfolders": (["cat", "cat/old"], {"cat": 6}, {"cat": 0}),
    "val and test are both held out": (
        ["train/cat", "val/cat", "test/cat"],
        {"cat": 3},
        {"cat": 6},
    ),
    "splits may be in wrapper folders": (
        [f"set/{split}/images/{name}" for split in ("train", "test") for name in ("cat", "dog")],
        {"cat": 3, "dog": 3},
        {"cat": 3, "dog": 3},
    ),
}


@pytest.mark.parametrize(("folders", "train", "held_out"), LAYOUTS.values(), ids=LAYOUTS)
def test_folders_define_classes_and_splits(
    tmp_path: Path, folders: list[str], train: dict[str, int], held_out: dict[str, int]
) -> None:
    write_classes(tmp_path / "raw", folders)
    assert counts(tmp_path, tmp_path / "raw", max_rejected=0.0) == (train, held_out)


def test_flat_directory_has_no_classes(tmp_path: Path) -> None:
    write_classes(tmp_path, ["raw"])
    data = prepared(tmp_path, tmp_path / "raw")
    assert (data.classes, data.class_counts, data.labels.tolist()) == ([], [], [0, 0, 0])
    assert data.captions is None


def test_no_classes_if_most_images_have_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_classes(tmp_path / "raw", [".", "more"])
    write(tmp_path / "raw/last.png", noise(99))
    data = prepared(tmp_path, tmp_path / "raw")
    assert (len(data), data.classes) == (7, [])
    assert (
        "the data have no classes. All images are used, also those in more"
        in capsys.readouterr().err
    )


def test_image_beside_class_folders_is_rejected(tmp_path: Path) -> None:
    write_classes(tmp_path / "raw", ["cat", "dog"])
    write(tmp_path / "raw/preview.png", noise(99))
    data = prepared(tmp_path, tmp_path / "raw", max_rejected=0.5)
    assert (len(data), data.classes) == (6, ["cat", "dog"])
    assert "class" in rejected(tmp_path / "workspace")["preview.png"]


@pytest.mark.parametrize("packed", [False, True])
def test_stray_image_in_a_wrapper_folder_is_rejected(tmp_path: Path, packed: bool) -> None:
    root = write_classes(tmp_path / "raw", ["ds/imgs/cat", "ds/imgs/dog"])
    strays = ["cover.png", "ds/preview.png", "ds/imgs/last.png"]
    for seed, name in enumerate(strays, 90):
        write(root / name, noise(seed))
    source = Path(shutil.make_archive(str(tmp_path / "ds"), "zip", root)) if packed else root
    assert counts(tmp_path, source, max_rejected=0.5)[0] == {"cat": 3, "dog": 3}
    assert set(rejected(tmp_path / "workspace")) == set(strays)


def test_stray_image_beside_wrapped_splits_is_rejected(tmp_path: Path) -> None:
    for seed, split in enumerate(["train", "test"]):
        write_classes(tmp_path / "raw/ds" / split / "imgs", ["cat", "dog"], seed=50 * seed)
    write(tmp_path / "raw/ds/preview.png", noise(99))
    write(tmp_path / "raw/ds/train/imgs/last.png", noise(98))
    found = counts(tmp_path, tmp_path / "raw", max_rejected=0.5)
    assert found == ({"cat": 3, "dog": 3}, {"cat": 3, "dog": 3})
    strays = {"ds/preview.png", "ds/train/imgs/last.png"}
    assert set(rejected(tmp_path / "workspace")) == strays


def test_only_selected_classes_are_used(tmp_path: Path) -> None:
    write_classes(tmp_path / "raw", ["cat", "dog", "emu"])
    assert counts(tmp_path, tmp_path / "raw", classes=["emu", "cat"])[0] == {"cat": 3, "emu": 3}


def test_rejected_images_of_unselected_classes_do_not_count(
    tmp_path: Path,
) -> None:
    root = write_classes(tmp_path / "raw/set", ["cat", "dog"])
    for number in range(3):
        (root / f"dog/gone-{number}.png").symlink_to("nowhere.png")
    (root / "cat/gone.png").symlink_to("nowhere.png")
    prepared(tmp_path, root, classes=["cat"], max_rejected=0.25)
    assert list(rejected(tmp_path / "workspace")) == ["cat/gone.png"]


def test_error_for_unknown_class_lists_the_classes(tmp_path: Path) -> None:
    write_classes(tmp_path / "raw", ["cat", "dog"])
    with pytest.raises(UserError, match="got cow; the source has cat, dog"):
        prepared(tmp_path, tmp_path / "raw", classes=["cat", "cow"])


def test_classes_that_differ_only_by_case_are_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_classes(tmp_path / "raw", ["Cat", "cat"])
    assert prepared(tmp_path, tmp_path / "raw").classes == ["Cat", "cat"]
    assert "Cat and cat differ only by case" in capsys.readouterr().err


def test_class_folder_without_images_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_classes(tmp_path / "raw", ["cat", "dog"])
    (tmp_path / "raw/emu").mkdir()
    write(tmp_path / "raw/fox/0.png", b"broken")
    assert prepared(tmp_path, tmp_path / "raw", max_rejected=0.5).classes == ["cat", "dog"]
    printed = capsys.readouterr().err
    assert "The folder emu contains no images" in printed
    assert "The class fox has no usable images" in printed


def test_fewer_images_than_a_batch_are_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_classes(tmp_path / "raw", ["cat"])
    prepared(tmp_path, tmp_path / "raw", batch_size=64)
    assert "3 training images for train.batch_size=64" in capsys.readouterr().err


def test_error_for_no_images_lists_other_files(tmp_path: Path) -> None:
    write(tmp_path / "raw/photos.rar", b"Rar!")
    with pytest.raises(UserError, match=r"contains no images.*1 \.rar"):
        prepared(tmp_path, tmp_path / "raw")


@pytest.mark.parametrize("packed", [False, True])
def test_error_for_hidden_images_names_them(tmp_path: Path, packed: bool) -> None:
    root = write_classes(tmp_path / "raw", [".data/cat", "sets/.old"])
    source = Path(shutil.make_archive(str(tmp_path / "x"), "zip", root)) if packed else root
    with pytest.raises(UserError, match=r"contains no images.*Hidden .*: \.data, sets/\.old\."):
        prepared(tmp_path, source)


def test_error_for_missing_source_says_what_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere.* does not exist .* a directory, a zip or tar"):
        prepared(tmp_path, tmp_path / "nowhere")
    with pytest.raises(UserError, match="got 'gs://bucket/x'; must be digits, cifar10"):
        prepared(tmp_path, "gs://bucket/x")


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("pipe", "neither a directory nor a regular file"),
        ("/dev/zero", "neither a directory nor a regular file"),
        ("x" * 300, "File name too long"),
        ("~nobody-of-this-name/x", "home directory"),
        ("a\0b", "null byte|null character"),
        ("file/x", "Not a directory"),
    ],
)
def test_source_of_an_unsupported_kind_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, error: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    write(tmp_path / "file", b"x")
    monkeypatch.chdir(tmp_path)
    for use in (check_data, lambda name: prepared(tmp_path, name)):
        with pytest.raises(UserError, match=rf"prepare\.source: .*({error})"):
            use(source)


def test_folders_may_be_deeper_than_the_recursion_limit(tmp_path: Path) -> None:
    deep = tmp_path
    for _ in range(200):
        deep /= "d"
        deep.mkdir()
    write(deep / "0.png", noise(0))
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 150)
    try:
        assert len(Directory(tmp_path, "x").listing().images) == 1
        assert directory_state(tmp_path)["files"] == 1
    finally:
        sys.setrecursionlimit(limit)


# Splits


@pytest.mark.parametrize(
    "train, held_out",
    [
        ("train", "test"),
        ("TRAIN", "Val"),
        ("Train", "VALID"),
        ("train", "validation"),
        ("training", "Testing"),
    ],
)
def test_top_folders_with_split_names_are_splits(tmp_path: Path, train: str, held_out: str) -> None:
    write_classes(tmp_path / "raw" / train, ["cat", "dog"])
    write_classes(tmp_path / "raw" / held_out, ["cat", "dog"], each=2, seed=50)
    found = counts(tmp_path, tmp_path / "raw", holdout=0.5)
    assert found == ({"cat": 3, "dog": 3}, {"cat": 2, "dog": 2})


def test_splits_without_classes_are_splits(tmp_path: Path) -> None:
    write_classes(tmp_path / "raw", ["train", "test"])
    data = prepared(tmp_path, tmp_path / "raw")
    assert (len(data), data.manifest.holdout_count, data.classes) == (3, 3, [])


def test_image_beside_splits_without_classes_is_for_training(tmp_path: Path) -> None:
    write_classes(tmp_path / "raw", ["train", "test"])
    write(tmp_path / "raw/cover.png", noise(99))
    data = prepared(tmp_path, tmp_path / "raw")
    assert (len(data), data.manifest.holdout_count, data.classes) == (4, 3, [])


@pytest.mark.parametrize("each", [6, 40])
def test_unlabelled_test_images_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], each: int
) -> None:
    write_classes(tmp_path / "raw/train", ["cat", "dog"], each=20)
    write_classes(tmp_path / "raw", ["test"], each=each, seed=100)
    train, held_out = counts(tmp_path, tmp_path / "raw", holdout=0.3, max_rejected=0.0)
    assert {name: train[name] + held_out[name] for name in train} == {"cat": 20, "dog": 20}
    assert sum(held_out.values()) > 0
    printed = capsys.readouterr().err
    assert f"The {each} images in test have no classes" in printed
    assert "some training images are held out instead" in printed


def test_unlabelled_split_beside_a_labelled_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed, split in enumerate(["train", "val"]):
        write_classes(tmp_path / "raw" / split, ["cat", "dog"], seed=50 * seed)
    write_classes(tmp_path / "raw", ["test"], each=9, seed=200)
    found = counts(tmp_path, tmp_path / "raw", max_rejected=0.0)
    assert found == ({"cat": 3, "dog": 3}, {"cat": 3, "dog": 3})
    assert "The 9 images in test have no classes" in capsys.readouterr().err


def test_single_train_folder_is_split_by_content(tmp_path: Path) -> None:
    write_classes(tmp_path / "raw/train", ["cat", "dog"], each=40)
    train, held_out = counts(tmp_path, tmp_path / "raw", holdout=0.3)
    assert sum(held_out.values()) > 8 and sum(train.values()) > 40


def test_class_named_train_is_a_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_classes(tmp_path / "raw", ["car", "plane", "train"])
    assert counts(tmp_path, tmp_path / "raw")[0] == {"car": 3, "plane": 3, "train": 3}
    assert "train are used as classes" in capsys.readouterr().err


def test_images_beside_splits_are_for_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_classes(tmp_path / "raw", ["train/cat", "test/cat", "extra"])
    assert counts(tmp_path, tmp_path / "raw") == ({"cat": 3, "extra": 3}, {"cat": 3, "extra": 0})
    assert "extra" in capsys.readouterr().err


def test_class_without_training_images_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_classes(tmp_path / "raw", ["train/cat", "test/cat", "test/dog"])
    assert counts(tmp_path, tmp_path / "raw") == ({"cat": 3}, {"cat": 3})
    assert "class dog has no images for training" in capsys.readouterr().err


def test_dtd_uses_its_split_lists(tmp_path: Path) -> None:
    root = write_classes(tmp_path / "dtd/images", ["banded", "dotted"], each=6).parent
    for number, name in enumerate(["train1.txt", "val1.txt", "test1.txt"]):
        lines = [
            f"{c}/{i:03d}.png" for c in ("banded", "dotted") for i in (2 * number, 2 * number + 1)
        ]
        write(root / "labels" / name, "\n".join(lines))
    write(root / "labels/labels_joint_anno.txt", "banded/000.png banded")
    for source in (root, tmp_path / "dtd"):
        found = counts(tmp_path / "w", source)
        assert found == ({"banded": 4, "dotted": 4}, {"banded": 2, "dotted": 2})


# Links


def fill_by_links(root: Path, store: Path) -> None:
    """Replace each file below `root` by a link into `store`, like the cache of DVC."""
    store.mkdir()
    for number, path in enumerate(sorted(root.rglob("*.*"))):
        path.rename(store / f"{number:032x}")
        path.symlink_to(os.path.relpath(store / f"{number:032x}", path.parent))


def test_links_to_files_elsewhere_are_followed(tmp_path: Path) -> None:
    root = write_classes(tmp_path / "raw", ["cat", "dog"])
    write(root / "cat/000.txt", "one")
    expected = prepared(tmp_path / "files", root, max_rejected=0.0)
    fill_by_links(root, tmp_path / "store")
    linked = prepared(tmp_path / "links", root, max_rejected=0.0)
    assert linked.fingerprint == expected.fingerprint and len(linked) == 6


def test_links_to_folders_elsewhere_are_followed(tmp_path: Path) -> None:
    write_classes(tmp_path / "store", ["cat", "dog/old", "emu"])
    (tmp_path / "raw/train").mkdir(parents=True)
    (tmp_path / "raw/test").mkdir()
    for name in ("cat", "dog", "emu"):
        (tmp_path / "raw/train" / name).symlink_to(tmp_path / "store" / name)
    (tmp_path / "raw/test/cat").symlink_to("../../store/cat")
    found = counts(tmp_path, tmp_path / "raw", max_rejected=0.0)
    assert found == ({"cat": 3, "dog": 3, "emu": 3}, {"cat": 3, "dog": 0, "emu": 0})


def test_link_to_a_hidden_folder_inside_is_followed(tmp_path: Path) -> None:
    root = write_classes(tmp_path / "raw", [".store/dog", "cat"])
    (root / "dog").symlink_to(".store/dog")
    assert counts(tmp_path, root, max_rejected=0.0)[0] == {"cat": 3, "dog": 3}


def test_links_in_a_loop_are_followed_once(tmp_path: Path) -> None:
    root = write_classes(tmp_path / "raw", ["cat"])
    store = write_classes(tmp_path / "store", ["dog", "emu"])
    (root / "dog").symlink_to(store)
    (store / "dog/up").symlink_to(store)
    (store / "emu/back").symlink_to(root)
    (store / "emu/out").symlink_to(tmp_path)
    (root / "up").symlink_to(tmp_path)
    (root / "itself").symlink_to("itself")
    assert counts(tmp_path, root, max_rejected=0.0)[0] == {"cat": 3, "dog": 6}


@pytest.mark.parametrize("target", ["gone", "../gone", "cat/000.png/gone", "lost-0.png"])
def test_links_without_a_target_are_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    root = write_classes(tmp_path / "raw", ["cat"], each=12)
    for name in ("lost-0.png", "dog", "captions.jsonl", "0.txt"):
        (root / name).symlink_to(target)
    assert prepared(tmp_path, root, max_rejected=0.1).classes == ["cat"]
    assert rejected(tmp_path / "workspace") == {"lost-0.png": "a symbolic link without a target"}
    note = "0.txt is a symbolic link without a target (and 2 more). Restore it"
    assert note in capsys.readouterr().err
    assert note in " ".join(check_data(root).notes)


def test_source_of_broken_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    for name in ("dog", "cat"):
        (tmp_path / "raw" / name).symlink_to(tmp_path / "unmounted" / name)
    error = r"contains no images.* cat is a symbolic link without a target \(and 1 more\)"
    with pytest.raises(UserError, match=error):
        prepared(tmp_path, tmp_path / "raw")


@pytest.mark.parametrize("kind", ["file", "link to a file", "link to a folder"])
def test_file_removed_during_listing_is_ignored(tmp_path: Path, kind: str) -> None:
    root = write_classes(tmp_path / "raw", ["cat"])
    elsewhere = write_classes(tmp_path, ["dog"]) / "dog"
    gone = root / "gone.png"
    if kind == "file":
        write(gone, noise(9))
    else:
        gone.symlink_to(elsewhere if "folder" in kind else elsewhere / "000.png")

    def vanishing(folder: str) -> list[os.DirEntry[str]]:
        found = children(folder)
        gone.unlink(missing_ok=True)
        return found

    children = folders._children
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders, "_children", vanishing)
        listing = Directory(root, "x").listing()
    assert (len(listing.images), listing.rejected, listing.notes) == (3, [], [])


FORBIDDEN = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from support.images import prepared
from ddpm_core.errors import UserError
if os.getuid() == 0:  # root can read everything
    os.setgid(65534), os.setuid(65534)
try:
    prepared(Path(sys.argv[2]) / "other", Path(sys.argv[2]) / "raw", max_rejected=1.0)
except UserError as error:
    print(error)
"""


def test_unreadable_folder_stops_prepare_despite_max_rejected(
    tmp_path: Path,
) -> None:
    with tempfile.TemporaryDirectory() as place:  # pytest's folders are closed to other users
        for path in (Path(place), Path(place, "other")):
            path.mkdir(exist_ok=True)
            path.chmod(0o777)
        root = write_classes(Path(place) / "raw", ["cat", "dog"])
        (root / "dog").chmod(0)
        command = [sys.executable, "-c", FORBIDDEN, str(Path(__file__).parents[1]), place]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        (root / "dog").chmod(0o755)
    assert f"The folder {root}/dog cannot be read: Permission denied." in done.stdout, done.stderr


def test_links_that_stay_inside_are_followed_once(tmp_path: Path) -> None:
    root = write_classes(tmp_path / "raw", ["cat"])
    (root / "cat/again.png").symlink_to("000.png")
    (root / "loop").symlink_to(root)
    data = prepared(tmp_path, root, max_rejected=0.0)
    assert len(data) == 4 and data.manifest.duplicates["copies"] == 1


def test_pipe_named_like_an_image_is_rejected(tmp_path: Path) -> None:
    root = write_classes(tmp_path / "raw", ["cat"])
    os.mkfifo(root / "cat/pipe.png")
    assert len(prepared(tmp_path, root, max_rejected=1.0)) == 3
    assert "not a regular file" in rejected(tmp_path / "workspace")["cat/pipe.png"]


# Unusual names


STRANGE = [
    b"caf\xe9",
    "čáp".encode(),
    "\U0001f408 cat".encode(),
    b"quo\"te's",
    b"new\nline",
    b"tab\t",
]


def write_strange(root: Path) -> None:
    for number, raw in enumerate(STRANGE):
        folder = os.path.join(os.fsencode(root), raw)  # noqa: PTH118, Path has no bytes
        os.makedirs(folder)  # noqa: PTH103
        with open(os.path.join(folder, raw + b".png"), "wb") as file:  # noqa: PTH118, PTH123
            file.write(encoded(noise(number)))
        with open(os.path.join(folder, raw + b".jpg"), "wb") as file:  # noqa: PTH118, PTH123
            file.write(b"broken")


def test_names_of_any_bytes_are_read_and_listed(tmp_path: Path) -> None:
    write_strange(tmp_path / "raw")
    data = prepared(tmp_path, tmp_path / "raw", max_rejected=0.5)
    shown = sorted(raw.decode("utf-8", "backslashreplace") for raw in STRANGE)
    assert sorted(data.classes) == shown
    escaped = [name.replace("\n", "\\n").replace("\t", "\\t") for name in shown]
    assert sorted(rejected(tmp_path / "workspace")) == sorted(f"{n}/{n}.jpg" for n in escaped)


PREPARE = """
import sys
from ddpm_core.config import Config
from ddpm_core.data.prepare import prepare
from ddpm_core.storage.workspace import Workspace

settings = {"source": sys.argv[1], "image_size": 8, "holdout": 0.0, "max_rejected": 0.5}
network = {"multipliers": [1, 2], "attention": [4]}
config = Config.model_validate({"prepare": settings, "model": network})
print(prepare(config, Workspace.open(sys.argv[2]))["fingerprint"])
"""


@pytest.mark.parametrize("coerce", ["0", "1"])
def test_an_ascii_locale_changes_nothing(tmp_path: Path, coerce: str) -> None:
    write_strange(tmp_path / "raw")
    expected = prepared(tmp_path, tmp_path / "raw", max_rejected=0.5).fingerprint
    ascii_only = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": coerce}
    found = subprocess.run(
        [sys.executable, "-c", PREPARE, str(tmp_path / "raw"), str(tmp_path / "other")],
        capture_output=True,
        text=True,
        env={**os.environ, **ascii_only},
    )
    assert found.stdout.strip() == expected, found.stderr
    assert rejected(tmp_path / "other") == rejected(tmp_path / "workspace")


def test_composed_and_decomposed_names_are_one_class(tmp_path: Path) -> None:
    write(tmp_path / "raw/caf\u00e9/0.png", noise(1))
    write(tmp_path / "raw/cafe\u0301/1.png", noise(2))
    data = prepared(tmp_path, tmp_path / "raw")
    assert data.classes == ["caf\u00e9"] and np.array_equal(data.labels, [0, 0])
