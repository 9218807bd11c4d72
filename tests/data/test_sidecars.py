"""Classes and captions from the .json files of WebDataset, and labels as EDM writes them."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from support.images import encoded, noise, prepared, write

from ddpm_core.data.check import check_data
from ddpm_core.errors import UserError


def shard(path: Path, facts: list[Any], text: bool = False) -> Path:
    """Write a tar with an image for each object."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for number, value in enumerate(facts):
            key = f"{path.stem[-2:]}{number:04d}"
            files = {"json": json.dumps(value).encode(), "png": encoded(noise(int(key)))}
            files |= {"txt": b"a text"} if text else {}
            for suffix, content in files.items():
                member = tarfile.TarInfo(f"{key}.{suffix}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return path


def texts(captions: Any) -> list[str]:
    return [bytes(row).rstrip(b"\0").decode() for row in captions]


def test_json_in_shards_has_class_and_caption(tmp_path: Path) -> None:
    shard(
        tmp_path / "raw/train-01.tar", [{"label": 3, "text": "a  cat"}, {"label": 4, "text": "b"}]
    )
    shard(tmp_path / "raw/val-02.tar", [{"label": 3}])
    data = prepared(tmp_path, tmp_path / "raw", max_rejected=0.0)
    assert data.classes == ["3", "4"] and texts(data.captions) == ["a cat", "b"]
    assert data.manifest.holdout_count == 1 and data.manifest.ignored == {}


def test_keys_of_json_can_be_chosen(tmp_path: Path) -> None:
    facts = [{"label": 0, "kind": name, "caption": f"a {name}"} for name in ("cat", "dog")]
    path = shard(tmp_path / "00.tar", facts, text=True)
    data = prepared(tmp_path, path, label_column="kind", caption_column="caption")
    assert data.classes == ["cat", "dog"] and texts(data.captions) == ["a cat", "a dog"]
    report = check_data(path)
    assert report.splits == {"undecided": {"0": 2}}
    error = "prepare.label_column: got 'x', but the source has no parquet or .json files with this"
    with pytest.raises(UserError, match=error):
        prepared(tmp_path, path, label_column="x")
    with pytest.raises(UserError, match="caption_column: got 'x', but the source has no"):
        prepared(tmp_path, path, caption_column="x")


@pytest.mark.parametrize("content", ["{", "[1]", "3", '{"label": true, "text": 5}', "[" * 90_000])
def test_other_json_files_are_ignored(tmp_path: Path, content: str) -> None:
    write(tmp_path / "raw/1.png", noise(1))
    write(tmp_path / "raw/1.json", content)
    data = prepared(tmp_path, tmp_path / "raw", max_rejected=0.0)
    assert data.classes == [] and data.captions is None and data.manifest.ignored == {"json": 1}


def test_half_a_surrogate_pair_in_json_is_replaced(tmp_path: Path) -> None:
    write(tmp_path / "raw/1.png", noise(1))
    write(tmp_path / "raw/1.json", '{"label": "a\\ud800", "text": "b\\udc00"}')
    data = prepared(tmp_path, tmp_path / "raw")
    assert data.classes == ["a?"] and texts(data.captions) == ["b?"]


def edm(path: Path, labels: Any) -> Path:
    """Write images as the data set tool of EDM does: folders that mean nothing, and a list."""
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(4):
            name = f"{number // 2:05d}/img{number:08d}.png"
            archive.writestr(name, encoded(noise(number)))
        rows = [
            [f"{number // 2:05d}/img{number:08d}.png", label] for number, label in enumerate(labels)
        ]
        archive.writestr("dataset.json", json.dumps({"labels": rows or None}))
    return path


def test_labels_of_edm_are_classes(tmp_path: Path) -> None:
    data = prepared(tmp_path, edm(tmp_path / "x.zip", [6, 9, 9, 6]), max_rejected=0.0)
    assert data.classes == ["6", "9"] and data.labels.tolist() == [0, 1, 1, 0]


def test_folders_of_unlabelled_edm_are_no_classes(tmp_path: Path) -> None:
    data = prepared(tmp_path, edm(tmp_path / "x.zip", []), max_rejected=0.0)
    assert data.classes == [] and len(data) == 4 and data.manifest.ignored == {}


@pytest.mark.parametrize("labels", [5, [5], [[1, 2]], [["a"]], {"a": 1}])
def test_other_lists_of_labels_are_ignored(tmp_path: Path, labels: Any) -> None:
    write(tmp_path / "raw/a/1.png", noise(1))
    write(tmp_path / "raw/b/1.png", noise(2))
    write(tmp_path / "raw/dataset.json", json.dumps({"labels": labels}))
    assert prepared(tmp_path, tmp_path / "raw").classes == ["a", "b"]
