"""prepare reads the digits, CIFAR-10's binary files, and official downloads."""

from __future__ import annotations

import hashlib
import http.server
import shutil
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.images import config, prepared, write
from support.s3_server import Gate

from ddpm_core.data.check import check_data
from ddpm_core.data.prepare import stale
from ddpm_core.data.sources import download
from ddpm_core.data.sources.cifar import CLASSES
from ddpm_core.errors import UserError
from ddpm_core.storage.workspace import Workspace

# Digits


def test_digits_are_white_on_black_and_labelled(tmp_path: Path) -> None:
    data = prepared(tmp_path, "digits", image_size=16)
    assert data.images.shape == (1797, 16, 16, 1)
    assert data.classes == list("0123456789")
    assert data.class_counts == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    zero = data.images[0][:, :, 0]
    assert zero[7:9, 7:9].max() < 80 and zero[:, 0].max() < 10 and zero.max() > 200


# CIFAR-10


def write_cifar(root: Path, each: int = 4) -> tuple[Any, Any]:
    """Write CIFAR-10's binary files; return pixels (N, 32, 32, 3) and labels for training."""
    root.mkdir(parents=True)
    random, pixels, labels = np.random.default_rng(0), [], []
    for number, name in enumerate(
        [*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]
    ):
        label = (np.arange(each, dtype=np.uint8) + number) % 4
        planes = random.integers(0, 256, (each, 3, 32, 32), np.uint8)
        records = np.concatenate([label[:, None], planes.reshape(each, -1)], axis=1)
        (root / name).write_bytes(records.tobytes())
        if name.startswith("data"):
            pixels.append(planes.transpose(0, 2, 3, 1))
            labels.append(label)
    write(root / "batches.meta.txt", "\n".join(CLASSES))
    return np.concatenate(pixels), np.concatenate(labels)


@pytest.mark.parametrize("packed", [False, True])
def test_cifar_binary_files_are_read(tmp_path: Path, packed: bool) -> None:
    pixels, labels = write_cifar(tmp_path / "cifar-10-batches-bin")
    source = tmp_path / "cifar-10-batches-bin"
    if packed:
        with tarfile.open(tmp_path / "cifar-10-binary.tar.gz", "w:gz") as archive:
            archive.add(source, source.name)
        source = tmp_path / "cifar-10-binary.tar.gz"
    data = prepared(tmp_path, source, image_size=32, holdout=0.5)
    assert data.images.shape == (20, 32, 32, 3) and data.manifest.holdout_count == 4
    found = {
        (data.classes[label], image.tobytes())
        for image, label in zip(data.images[:], data.labels, strict=True)
    }
    assert found == {
        (CLASSES[label], image.tobytes()) for image, label in zip(pixels, labels, strict=True)
    }


def test_invalid_cifar_file_is_refused(tmp_path: Path) -> None:
    write_cifar(tmp_path / "raw")
    content = (tmp_path / "raw/data_batch_2.bin").read_bytes()
    write(tmp_path / "raw/data_batch_2.bin", content[:-1])
    with pytest.raises(UserError, match=r"data_batch_2.bin .* is not a CIFAR-10 binary file"):
        prepared(tmp_path, tmp_path / "raw", image_size=32)


@pytest.mark.parametrize(
    ("files", "error"),
    [
        (
            ["data_batch_1", "test_batch"],
            r"the Python version of CIFAR-10, which is pickled\..* Use the binary version",
        ),
        (
            ["train", "test", "meta"],
            "the Python version of CIFAR-100, .* image files in one folder",
        ),
        (
            ["x.pkl", "y.pkl"],
            r"contains pickled files, such as x\.pkl\. .* image files in one folder",
        ),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_pickles_are_refused_unopened_by_name(
    tmp_path: Path, files: list[str], error: str, packed: bool
) -> None:
    for name in files:
        write(tmp_path / "raw/py" / name, b"\x80\x04\x95not even a pickle")
    source = Path(shutil.make_archive(str(tmp_path / "py"), "gztar", tmp_path / "raw"))
    with pytest.raises(UserError, match=error):
        prepared(tmp_path, source if packed else tmp_path / "raw/py")


# Downloads, from a server on this machine


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """Serve a folder; return it and its address."""
    root = tmp_path / "served"
    root.mkdir()
    handler = partial(QuietHandler, directory=str(root))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield root, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


def offer(served: tuple[Path, str], tmp_path: Path) -> download.Archive:
    root, address = served
    write_cifar(tmp_path / "cifar-10-batches-bin")
    path = root / "cifar-10-binary.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(tmp_path / "cifar-10-batches-bin", "cifar-10-batches-bin")
    content = path.read_bytes()
    checksum = hashlib.sha256(content).hexdigest()
    return download.Archive(f"{address}/{path.name}", len(content), checksum)


def test_known_data_set_is_downloaded_once(
    tmp_path: Path, served: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = offer(served, tmp_path)
    monkeypatch.setitem(download.KNOWN, "cifar10", archive)
    with pytest.raises(UserError, match=r"prepare.download=true"):
        prepared(tmp_path, "cifar10", image_size=32)
    data = prepared(tmp_path, "cifar10", image_size=32, download=True)
    assert len(data) == 20
    assert data.manifest.source["uri"] == archive.url
    assert data.manifest.source["sha256"] == archive.sha256
    (served[0] / "cifar-10-binary.tar.gz").unlink()
    assert len(prepared(tmp_path, "cifar10", image_size=16)) == 20


def test_check_data_uses_the_downloaded_archive(
    tmp_path: Path, served: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(download.KNOWN, "cifar10", offer(served, tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"cifar10 is not in workspace/downloads, .* the path of"):
        check_data("cifar10")
    prepared(tmp_path, "cifar10", image_size=32, download=True)
    assert check_data("cifar10").count == 24


def test_download_with_a_wrong_checksum_is_deleted(
    tmp_path: Path, served: tuple[Path, str]
) -> None:
    archive = offer(served, tmp_path)._replace(sha256="0" * 64)
    with pytest.raises(UserError, match="is not the official archive"):
        download.fetch(archive, tmp_path / "archive")
    assert not list(tmp_path.glob("*archive*"))


def test_damaged_download_is_repeated(tmp_path: Path, served: tuple[Path, str]) -> None:
    archive = offer(served, tmp_path)
    content = (served[0] / "cifar-10-binary.tar.gz").read_bytes()
    gate = Gate(served[1])
    gate.flip(content[:10], 2)
    url = f"{gate.endpoint}/cifar-10-binary.tar.gz"
    download.fetch(archive._replace(url=url), tmp_path / "archive")
    assert (tmp_path / "archive").read_bytes() == content and not gate.flips


@pytest.mark.parametrize("name", ["cifar10", "dtd"])
def test_forged_official_archive_is_refused(
    tmp_path: Path, served: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The file has the right size and layout, but other pixels."""
    archive = offer(served, tmp_path)
    monkeypatch.setitem(download.KNOWN, name, archive)
    monkeypatch.chdir(tmp_path)
    forged = tmp_path / "workspace/downloads/cifar-10-binary.tar.gz"
    forged.parent.mkdir(parents=True)
    content = bytearray((served[0] / forged.name).read_bytes())
    content[5] ^= 1  # in the time stamp of gzip's header
    forged.write_bytes(content)
    found = hashlib.sha256(content).hexdigest()
    error = rf"{forged.name} is not the official .* {name}: .* {found}; it must be {archive.sha256}"
    for use in (check_data, lambda source: prepared(tmp_path, source, image_size=32)):
        with pytest.raises(UserError, match=error):
            use(name)
    assert prepared(tmp_path, forged, image_size=32).manifest.source["sha256"] == found
    data = prepared(tmp_path, name, image_size=32, download=True)
    assert data.manifest.source["sha256"] == archive.sha256
    assert hashlib.sha256(forged.read_bytes()).hexdigest() == archive.sha256
    workspace = Workspace.open(str(tmp_path / "workspace"))
    assert stale(config(name, image_size=32, download=True), workspace) is None
    monkeypatch.setitem(download.KNOWN, name, archive._replace(sha256=found))
    assert stale(config(name, image_size=32, download=True), workspace)


@pytest.mark.parametrize("difference, word", [(5, "fewer"), (-5, "more")])
def test_download_of_a_wrong_size_is_deleted(
    tmp_path: Path, served: tuple[Path, str], difference: int, word: str
) -> None:
    archive = offer(served, tmp_path)
    archive = archive._replace(size=archive.size + difference)
    with pytest.raises(UserError, match=f"has {word} than"):
        download.fetch(archive, tmp_path / "archive")
    assert not list(tmp_path.glob("*archive*"))


def test_failed_download_is_an_error(tmp_path: Path, served: tuple[Path, str]) -> None:
    absent = download.Archive(f"{served[1]}/absent", 1, "0" * 64)
    with pytest.raises(UserError, match=r"Cannot download .*404"):
        download.fetch(absent, tmp_path / "archive")


def test_official_archives_use_https() -> None:
    assert all(archive.url.startswith("https://") for archive in download.KNOWN.values())
