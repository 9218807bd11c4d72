"""A parquet file gives the same data as a folder of its images."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.images import config, encoded, noise, prepared, rejected, write
from support.tables import class_label, images, write_parquet

from ddpm_core.config import Prepare
from ddpm_core.data.check import check_data
from ddpm_core.data.prepare import stale
from ddpm_core.data.sources.base import Listing
from ddpm_core.data.sources.parquet import Parquet
from ddpm_core.data.sources.sidecars import Columns
from ddpm_core.errors import UserError
from ddpm_core.storage.workspace import Workspace

PICTURES = [encoded(noise(seed)) for seed in range(8)]
KINDS = [
    {},
    {"compression": "zstd", "row_group_size": 3},
    {"compression": "none", "use_dictionary": False, "data_page_version": "2.0"},
    {"compression": "gzip", "data_page_size": 1, "write_batch_size": 1},
]


def folder(root: Path, split: str = "") -> Path:
    """Write the pictures into folders of classes, in the order of the rows."""
    for number, content in enumerate(PICTURES):
        write(root / split / ("cat" if number < 4 else "dog") / f"{number}.png", content)
    return root


def hugging_face(path: Path, **options: Any) -> Path:
    columns = {"img": images(PICTURES), "label": [1] * 4 + [0] * 4}
    features = {"img": {"_type": "Image"}, "label": class_label("dog", "cat")}
    return write_parquet(path, columns, features, **options)


def listed(path: Path, **columns: str) -> Listing:
    return Parquet(path, "x", Columns(**columns)).listing()


def texts(captions: Any) -> list[str]:
    return [bytes(row).rstrip(b"\0").decode() for row in captions]


@pytest.mark.parametrize("options", KINDS)
def test_parquet_gives_the_same_data_as_a_folder(tmp_path: Path, options: dict[str, Any]) -> None:
    path = hugging_face(tmp_path / "x.parquet", **options)
    data = prepared(tmp_path / "a", path, holdout=0.3, max_rejected=0.0)
    expected = prepared(tmp_path / "b", folder(tmp_path / "raw"), holdout=0.3)
    assert data.classes == ["cat", "dog"] and data.fingerprint == expected.fingerprint


def test_shards_have_the_splits_in_their_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for split, part in (("train", PICTURES[:6]), ("validation", PICTURES[6:])):
        for shard in range(2):
            name = f"data/{split}-{shard:05d}-of-00002.parquet"
            columns = {"image": part[shard::2], "label": ["cat", "dog", "cat"][: len(part) // 2]}
            write_parquet(tmp_path / "hub" / name, columns)
    write(tmp_path / "hub/README.md", "a card")
    data = prepared(tmp_path, tmp_path / "hub", max_rejected=0.0)
    assert data.manifest.holdout_count == 2 and data.class_counts == [4, 2]
    assert "Reading 4 parquet files as one source" in capsys.readouterr().err
    report = check_data(tmp_path / "hub")
    assert report.splits == {"train": {"cat": 4, "dog": 2}, "holdout": {"cat": 2}}
    note = "Columns of the parquet file: images from image, classes from label."
    assert report.notes.count(note) == 1


def test_test_split_without_labels_is_left_out(tmp_path: Path) -> None:
    """As in ImageNet, where the labels of the test split are -1."""
    splits = {"train": ([0, 1, 0], 0), "validation": ([1, 0], 3), "test": ([-1, -1], 5)}
    for split, (labels, first) in splits.items():
        columns = {"image": PICTURES[first : first + len(labels)], "label": labels}
        path = tmp_path / f"hub/data/{split}-00000-of-00001.parquet"
        write_parquet(path, columns, {"label": class_label("cat", "dog")})
    data = prepared(tmp_path, tmp_path / "hub", max_rejected=0.0)
    assert (len(data), data.manifest.holdout_count, data.classes) == (3, 2, ["cat", "dog"])


def test_number_of_shards_does_not_matter(tmp_path: Path) -> None:
    found = set()
    for count in (1, 3, 8):
        for shard in range(count):
            part = PICTURES[len(PICTURES) * shard // count : len(PICTURES) * (shard + 1) // count]
            write_parquet(tmp_path / f"{count}/{shard:05d}-of-00008.parquet", {"image": part})
        found.add(prepared(tmp_path / f"w{count}", tmp_path / str(count)).fingerprint)
    assert len(found) == 1


def test_columns_are_found_and_can_be_chosen(tmp_path: Path) -> None:
    columns = {
        "text": ["a  cat", None],
        "prompt": ["one", "two"],
        "kind": [3, 4],
        "image": images(PICTURES[:2]),
        "mask": images(PICTURES[2:4]),
        "thumb": PICTURES[4:6],
    }
    image = {"_type": "Image"}
    path = write_parquet(tmp_path / "x.parquet", columns, {"image": image, "mask": image})
    with pytest.raises(UserError, match=r"several columns with images: image, mask\. Set prepare"):
        listed(path)
    found = listed(path, image="image").images
    assert [(entry.class_name, entry.caption) for entry in found] == [(None, "a cat"), (None, None)]
    found = listed(path, image="thumb", label="kind", caption="prompt").images
    assert [(entry.class_name, entry.caption) for entry in found] == [("3", "one"), ("4", "two")]
    source = Parquet(path, "x", Columns("thumb"))
    assert [payload for _, payload in source.read(found)] == PICTURES[4:6]
    settings = {"image_column": "image", "caption_column": "prompt", "label_column": "text"}
    assert texts(prepared(tmp_path, path, **settings, max_rejected=0.5).captions) == ["one"]


@pytest.mark.parametrize("kind", ["image", "label", "caption"])
def test_chosen_column_must_exist(tmp_path: Path, kind: str) -> None:
    path = write_parquet(tmp_path / "x.parquet", {"image": PICTURES, "score": [0.5] * 8})
    for name in ("missing", "score"):
        error = f"prepare.{kind}_column: got '{name}'; must be a column of .*x.parquet with .* Its "
        with pytest.raises(UserError, match=error + r"columns are image \(binary\), score \(doub"):
            prepared(tmp_path, path, **{f"{kind}_column": name})


@pytest.mark.parametrize("kind", ["image", "label"])
def test_column_setting_without_columns_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(UserError, match=f"prepare.{kind}_column: got 'x', but the source has no"):
        prepared(tmp_path, folder(tmp_path / "raw"), **{f"{kind}_column": "x"})


def test_file_without_images_lists_its_columns(tmp_path: Path) -> None:
    columns = {"image": ["a.jpg"], "pixels": [[1, 2]], "label": [0]}
    path = write_parquet(tmp_path / "x.parquet", columns, {"image": {"_type": "Image"}})
    error = r"x.parquet has no column with images; its columns are image \(string\), pixels \(list"
    with pytest.raises(UserError, match=error):
        check_data(path)


def test_several_label_columns_are_a_choice(tmp_path: Path) -> None:
    columns = {"img": images(PICTURES[:2]), "fine": [0, 1], "coarse": [0, 0]}
    features = {"fine": class_label("cat", "dog"), "coarse": class_label("animal")}
    path = write_parquet(tmp_path / "x.parquet", columns, features)
    listing = listed(path)
    assert listing.notes[1].startswith("Several columns have classes: fine, coarse. None is used")
    assert {entry.class_name for entry in listing.images} == {None}
    assert [e.class_name for e in listed(path, label="fine").images] == ["cat", "dog"]


def test_labels_of_all_kinds_are_classes(tmp_path: Path) -> None:
    def classes(column: Any, features: dict[str, Any] | None = None) -> list[str | None]:
        columns = {"image": PICTURES[: len(column)], "label": column}
        listing = listed(write_parquet(tmp_path / "x.parquet", columns, features))
        return [entry.class_name for entry in listing.images]

    assert classes([7, 12]) == ["7", "12"]
    assert classes(["a\n b", "", None]) == ["a b", None, None]
    assert classes(pa.array(["x", "y", "x"]).dictionary_encode()) == ["x", "y", "x"]
    named = {"label": class_label("cat", "")}
    assert classes([0, 1, -1, None], named) == ["cat", "1", None, None]
    assert classes([0, 1], {"label": {"_type": "ClassLabel", "num_classes": 2}}) == ["0", "1"]
    assert classes([0.5, 1.0]) == [None, None]
    with pytest.raises(UserError, match=r"x is damaged .*: label 2 in row 1; it names 2 classes"):
        classes([0, 2], named)


@pytest.mark.parametrize("metadata", [b"{", b"[]", b'{"info": {"features": [1]}}', b'{"info": 1}'])
def test_other_metadata_are_ignored(tmp_path: Path, metadata: bytes) -> None:
    table = pa.table({"image": PICTURES, "label": [0] * 8})
    table = table.replace_schema_metadata({"huggingface": metadata})
    pq.write_table(table, tmp_path / "x.parquet")
    assert listed(tmp_path / "x.parquet").images[0].class_name == "0"


def test_rows_without_bytes_are_rejected_by_name(tmp_path: Path) -> None:
    column = images([PICTURES[0], None, b"text", b"", *PICTURES[1:4]])
    write_parquet(tmp_path / "raw/x.parquet", {"image": column})
    prepared(tmp_path, tmp_path / "raw", max_rejected=0.5)
    found = rejected(tmp_path / "workspace")
    assert list(found) == [f"x.parquet/0000000{row}" for row in (1, 2, 3)]
    assert found["x.parquet/00000001"].startswith("no bytes; images are read from the file itself")
    path = write_parquet(tmp_path / "paths.parquet", {"image": images([None, None])})
    with pytest.raises(UserError, match=r"2 of 2 images in [\s\S]* not from paths"):
        prepared(tmp_path, path)


def test_only_chosen_classes_are_read(tmp_path: Path) -> None:
    path = hugging_face(tmp_path / "x.parquet", row_group_size=2)
    data = prepared(tmp_path, path, classes=["dog"], max_rejected=0.0)
    expected = prepared(tmp_path / "b", folder(tmp_path / "raw"), classes=["dog"])
    assert data.fingerprint == expected.fingerprint


def test_copied_parquet_is_up_to_date(tmp_path: Path) -> None:
    path = hugging_face(tmp_path / "x.parquet")
    prepared(tmp_path, path)
    workspace = Workspace.open(str(tmp_path / "workspace"))
    os.utime(path, (1, 1))
    assert stale(config(path), workspace) is None
    hugging_face(path, compression="none")
    assert stale(config(path), workspace) == "the source has changed since it was prepared"


def test_parquet_in_an_archive_is_read(tmp_path: Path) -> None:
    hugging_face(tmp_path / "in/data/train.parquet")
    archive = shutil.make_archive(str(tmp_path / "x"), "zip", tmp_path / "in")
    data = prepared(tmp_path, archive, max_rejected=0.0)
    assert data.class_counts == [4, 4]


def test_settings_of_columns_are_off_by_default() -> None:
    assert (Prepare().image_column, Prepare().label_column) == (None, None)
