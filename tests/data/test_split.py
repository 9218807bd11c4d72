"""The split into training and held-out images depends on content alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.images import (
    prepared,
    write,
    write_classes,
)

from ddpm_core.data.dataset import open_dataset
from ddpm_core.data.split import hold_out
from ddpm_core.storage.workspace import Workspace


def test_split_is_stable_when_images_are_added(tmp_path: Path) -> None:
    root = write_classes(tmp_path / "raw", ["a", "b"], each=30)
    before = held_out(tmp_path / "1", root)
    write_classes(root, ["a/more", "c"], each=60, seed=500)
    after = held_out(tmp_path / "2", root)
    assert before and before < after


def held_out(tmp_path: Path, root: Path) -> set[bytes]:
    data = prepared(tmp_path, root, split="holdout", holdout=0.2)
    return {image.tobytes() for image in data.images[:]}


def test_split_is_the_same_for_every_size_and_resize_mode(tmp_path: Path) -> None:
    root = write_classes(tmp_path / "raw", ["."], each=40)
    for number, path in enumerate(sorted(root.iterdir())):  # a caption to identify each
        write(path.with_suffix(".txt"), f"image {number}")

    def held(place: str, **settings: Any) -> list[bytes]:
        data = prepared(tmp_path / place, root, split="holdout", holdout=0.3, **settings)
        assert data.captions is not None
        return [bytes(row) for row in data.captions]

    first = held("1")
    assert 0 < len(first) < 40
    assert held("2", image_size=16, resize="pad", background="red", channels=1) == first


def test_held_out_share_is_close_to_the_setting() -> None:
    digests = [np.random.default_rng(n).bytes(32) for n in range(4000)]
    chosen = hold_out(digests, ["a"] * 4000, [None] * 4000, 0.1)
    assert 340 < chosen.sum() < 460


def test_copies_are_reported_and_in_one_split(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_classes(tmp_path / "raw", ["a"], each=40)
    shutil.copytree(root / "a", root / "b")
    for path in (root / "b").iterdir():  # the same pixels in another format
        write(path, Image.open(path), kind="BMP")
    train = prepared(tmp_path, root, holdout=0.3)
    assert train.manifest.duplicates == {
        "copies": 40,
        "pictures_with_copies": 40,
        "in_both_splits": 0,
    }
    held = open_dataset(Workspace.open(str(tmp_path / "workspace")), "holdout")
    assert len(held) and not {i.tobytes() for i in train.images[:]} & {
        i.tobytes() for i in held.images[:]
    }
    assert "40 images are exact copies of others" in capsys.readouterr().err


def test_copies_across_given_splits_are_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_classes(tmp_path / "raw/train", ["a"]).parent
    shutil.copytree(root / "train", root / "test")
    assert prepared(tmp_path, root).manifest.duplicates["in_both_splits"] == 3
    assert "3 held-out images are also among the training images" in capsys.readouterr().err


def test_class_of_one_image_is_kept_for_training() -> None:
    low, high = bytes(32), b"\xff" * 32
    # Its copy in another class is kept too.
    chosen = hold_out([low, low, high], ["one", "two", "two"], [None] * 3, 0.5)
    assert chosen.tolist() == [False, False, False]
