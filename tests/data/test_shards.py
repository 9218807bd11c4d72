"""A folder of archives, as img2dataset and WebDataset write them, is one source."""

from __future__ import annotations

import io
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.images import config, encoded, noise, prepared, rejected, write, write_classes

from ddpm_core.config import Prepare
from ddpm_core.data.check import check_data
from ddpm_core.data.prepare import stale
from ddpm_core.data.sources.folder import Directory
from ddpm_core.data.sources.open import recognise
from ddpm_core.errors import UserError
from ddpm_core.storage.workspace import Workspace


def tar(path: Path, files: Mapping[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def img2dataset(root: Path) -> Path:
    """Write three shards of four images with captions, as img2dataset does."""
    for shard in range(3):
        files = {}
        for number in range(4):
            key = f"{shard:05d}{number:04d}"
            files[f"{key}.jpg"] = encoded(noise(10 * shard + number), "JPEG")
            files[f"{key}.json"] = b'{"status": "success"}'
            files[f"{key}.txt"] = f"image {key}".encode()
        tar(root / f"{shard:05d}.tar", files)
        write(root / f"{shard:05d}.parquet", b"PAR1")
        write(root / f"{shard:05d}_stats.json", b"{}")
    return root


def texts(captions: Any) -> list[str]:
    return [bytes(row).rstrip(b"\0").decode() for row in captions]


def test_img2dataset_shards_are_images_with_captions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = img2dataset(tmp_path / "raw")
    data = prepared(tmp_path, root, max_rejected=0.0)
    assert (len(data), data.classes) == (12, [])
    assert texts(data.captions)[3:5] == ["image 000000003", "image 000010000"]
    assert data.manifest.ignored == {"parquet": 3, "json": 15}
    assert len(data.manifest.source["shards_sha256"]) == 64
    assert "Reading 3 archives as one source" in capsys.readouterr().err
    workspace = Workspace.open(str(tmp_path / "workspace"))
    assert stale(config(root), workspace) is None
    shutil.unpack_archive(root / "00000.tar", tmp_path / "unpacked")
    for shard in ("00001", "00002"):
        shutil.unpack_archive(root / f"{shard}.tar", tmp_path / "unpacked")
    assert prepared(tmp_path / "b", tmp_path / "unpacked").fingerprint == data.fingerprint
    assert check_data(root).captioned
    write(root / "00002.tar", b"")
    assert stale(config(root), workspace) == "the source has changed since it was prepared"


@pytest.mark.parametrize("form", ["imagenet-{}-00000.tar", "{}/00000.tar", "{}/{}-00000.tar.gz"])
def test_webdataset_shards_have_splits_and_classes(tmp_path: Path, form: str) -> None:
    """The same keys in two shards are two images."""
    for seed, split in enumerate(["train", "val"]):
        files = {}
        for number in range(4):
            files[f"{number}.png"] = encoded(noise(10 * seed + number))
            files[f"{number}.cls"] = str(number % 2).encode()
        tar(tmp_path / "raw/data" / form.replace("{}", split), files)
    data = prepared(tmp_path, tmp_path / "raw", max_rejected=0.0)
    assert data.classes == ["0", "1"] and data.labels.tolist() == [0, 1, 0, 1]
    assert data.manifest.holdout_class_counts == [2, 2]


def test_class_folders_in_archives_are_classes(tmp_path: Path) -> None:
    root = write_classes(tmp_path / "made", ["cat", "dog"], each=2)
    (tmp_path / "raw").mkdir()
    for name in ("cat", "dog"):
        shutil.make_archive(str(tmp_path / f"raw/part-{name}"), "zip", root, name)
    data = prepared(tmp_path, tmp_path / "raw", max_rejected=0.0)
    assert data.classes == ["cat", "dog"] and data.class_counts == [2, 2]


def test_rejected_image_is_named_with_its_archive(tmp_path: Path) -> None:
    root = img2dataset(tmp_path / "raw")
    tar(root / "00003.tar", {"x.jpg": b"broken"})
    prepared(tmp_path, root, max_rejected=0.5)
    assert list(rejected(tmp_path / "workspace")) == ["00003.tar/x.jpg"]
    write(root / "00001.tar", (root / "00001.tar").read_bytes()[:2000])
    with pytest.raises(UserError, match=r"The archive .*/raw: 00001\.tar is damaged"):
        prepared(tmp_path, root)


def test_shard_removed_while_reading_is_named(tmp_path: Path) -> None:
    root = img2dataset(tmp_path / "raw")
    source, listing = recognise(Directory(root, "x"), Prepare())
    (root / "00001.tar").unlink()
    with pytest.raises(UserError, match=r"Cannot read x: 00001\.tar: No such file or directory"):
        list(source.read(listing.images))


def test_archives_beside_images_are_ignored(tmp_path: Path) -> None:
    root = write_classes(tmp_path / "raw", ["cat"])
    tar(root / "old.tar", {"x.png": encoded(noise(99))})
    data = prepared(tmp_path, root, max_rejected=0.0)
    assert len(data) == 3 and data.manifest.ignored == {"tar": 1}
