"""prepare reads a prefix or an archive in S3: from moto, or the server at AWS_ENDPOINT_URL."""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
import uuid
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.images import config, encoded, prepared, rejected, write, write_classes
from support.s3_server import Gate
from support.tables import images, write_parquet

from ddpm_core.data.prepare import prepare, stale
from ddpm_core.data.sources import s3
from ddpm_core.data.sources.open import open_source
from ddpm_core.errors import UserError
from ddpm_core.storage.lease import LEASE
from ddpm_core.storage.staging import sweep
from ddpm_core.storage.workspace import Workspace


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    if "AWS_ENDPOINT_URL" in os.environ:
        yield os.environ["AWS_ENDPOINT_URL"]
        return
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, str]:
    import boto3

    if "AWS_ENDPOINT_URL" not in os.environ:
        for name, value in {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
    client, name = boto3.client("s3"), f"data-{uuid.uuid4().hex[:12]}"
    client.create_bucket(Bucket=name)
    return client, name


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def upload(client: Any, bucket: str, root: Path, prefix: str) -> None:
    for path in root.rglob("*"):
        if path.is_file():
            key = f"{prefix}/{path.relative_to(root).as_posix()}"
            client.put_object(Bucket=bucket, Key=key, Body=path.read_bytes())


def test_s3_prefix_gives_the_same_data_as_its_folder(
    tmp_path: Path, bucket: tuple[Any, str]
) -> None:
    client, name = bucket
    root = write_classes(tmp_path / "raw", ["cat", "dog é"], each=25)
    write(root / "cat/000.txt", "a cat")
    write(root / "cat/broken.png", b"broken")
    upload(client, name, root, "photos")
    write_classes(tmp_path / "old", ["emu"], seed=99)
    upload(client, name, tmp_path / "old", "photos-old")
    expected = prepared(tmp_path / "a", root, max_rejected=0.1)
    found = prepared(tmp_path / "b", f"s3://{name}/photos", max_rejected=0.1)
    assert found.fingerprint == expected.fingerprint
    assert found.manifest.source["uri"] == f"s3://{name}/photos"
    assert rejected(tmp_path / "a/workspace") == rejected(tmp_path / "b/workspace")


def test_s3_listing_of_several_pages_is_complete(
    tmp_path: Path, bucket: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "PAGE", 10)
    upload(*bucket, write_classes(tmp_path / "raw", ["cat"], each=31), "x")
    assert len(prepared(tmp_path, f"s3://{bucket[1]}/x/")) == 31


def test_archive_in_s3_is_fetched_and_removed(tmp_path: Path, bucket: tuple[Any, str]) -> None:
    client, name = bucket
    root = write_classes(tmp_path / "raw", ["cat", "dog"])
    with tarfile.open(tmp_path / "raw.tar.gz", "w:gz") as archive:
        archive.add(root, "raw")
    client.upload_file(str(tmp_path / "raw.tar.gz"), name, "sets/raw.tar.gz")
    found = prepared(tmp_path / "b", f"s3://{name}/sets/raw.tar.gz")
    assert found.fingerprint == prepared(tmp_path / "a", root).fingerprint
    assert found.manifest.source["etag"]
    assert Workspace.open(str(tmp_path / "b/workspace")).storage.names("") == ["data", LEASE]


def test_images_damaged_in_transit_are_fetched_again(
    tmp_path: Path, bucket: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server sends the checksum that each object was uploaded with."""
    client, name = bucket
    root = write_classes(tmp_path / "raw", ["cat"])
    upload(client, name, root, "photos")
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        archive.add(root, "raw")
    client.put_object(Bucket=name, Key="x.tar", Body=(tmp_path / "x.tar").read_bytes())
    gate = Gate(os.environ["AWS_ENDPOINT_URL"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", gate.endpoint)
    expected = prepared(tmp_path / "a", root).fingerprint
    for number, source in enumerate(("photos", "x.tar")):
        gate.flip((root / "cat/001.png").read_bytes()[-60:], 2)
        found = prepared(tmp_path / f"s3-{number}", f"s3://{name}/{source}")
        assert found.fingerprint == expected and not gate.flips


def test_downloads_of_killed_processes_are_removed(tmp_path: Path, bucket: tuple[Any, str]) -> None:
    client, name = bucket
    client.put_object(Bucket=name, Key="x.zip", Body=b"no zip")
    with open_source(config(f"s3://{name}/x").prepare, tmp_path):
        (fetched,) = tmp_path.iterdir()
        left = shutil.copytree(fetched, fetched.with_name(".source.0123abcd.ddpm-staged"))
        sweep(tmp_path)
        assert fetched.exists() and not left.exists()
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError), open_source(config(f"s3://{name}/x.zip").prepare, tmp_path):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", ["photos", "photos.zip"])
def test_change_in_s3_makes_the_data_stale(
    tmp_path: Path, bucket: tuple[Any, str], form: str
) -> None:
    client, name = bucket

    def put(each: int) -> None:
        root = write_classes(tmp_path / f"raw{each}", ["cat"], each=each)
        with zipfile.ZipFile(tmp_path / "raw.zip", "w") as archive:
            for file in root.rglob("*.png"):
                archive.write(file, file.relative_to(root))
        client.upload_file(str(tmp_path / "raw.zip"), name, "photos.zip")
        upload(client, name, root, "photos")

    put(3)
    settings, workspace = config(f"s3://{name}/{form}"), Workspace.open(str(tmp_path / "workspace"))
    prepare(settings, workspace)
    assert stale(settings, workspace) is None
    put(4)
    assert stale(settings, workspace) == "the source has changed since it was prepared"
    assert prepare(settings, workspace)["count"] == 4


def test_workspace_inside_the_prefix_is_excluded(tmp_path: Path, bucket: tuple[Any, str]) -> None:
    client, name = bucket
    upload(client, name, write_classes(tmp_path / "raw", ["cat", "dog"]), "photos")
    workspace = Workspace.open(f"s3://{name}/photos/run")
    settings = config(f"s3://{name}/photos")
    assert prepare(settings, workspace)["classes"] == ["cat", "dog"]
    assert stale(settings, workspace) is None
    upload(client, name, write_classes(tmp_path / "new", ["emu"], seed=99), "photos/running")
    assert prepare(settings, workspace)["classes"] == ["cat", "dog", "running"]


@pytest.mark.parametrize("form", ["photos", "photos.zip"])
def test_a_public_bucket_is_read_without_keys(
    tmp_path: Path, bucket: tuple[Any, str], monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    client, name = bucket
    root = write_classes(tmp_path / "raw", ["cat", "dog"])
    upload(client, name, root, "photos")
    packed = shutil.make_archive(str(tmp_path / "photos"), "zip", root)
    client.upload_file(packed, name, "photos.zip")
    uri, everyone = f"s3://{name}/{form}", {"Effect": "Allow", "Principal": "*"}
    rights = [
        {**everyone, "Action": "s3:*", "Resource": f"arn:aws:s3:::{name}/*"},
        {**everyone, "Action": "s3:ListBucket", "Resource": f"arn:aws:s3:::{name}"},
    ]
    # An archive needs no permission to list the bucket.
    rights = rights[:1] if form.endswith("zip") else rights
    policy = {"Version": "2012-10-17", "Statement": rights}
    client.put_bucket_policy(Bucket=name, Policy=json.dumps(policy))
    expected = prepared(tmp_path / "keys", uri)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr("boto3.DEFAULT_SESSION", None)  # it keeps the keys
    with pytest.raises(UserError, match=r"refuses access .* require prepare\.anonymous=true"):
        prepared(tmp_path / "none", uri)
    found = prepared(tmp_path / "anonymous", uri, anonymous=True)
    assert found.fingerprint == expected.fingerprint
    workspace = Workspace.open(str(tmp_path / "anonymous/workspace"))
    assert stale(config(uri, anonymous=True), workspace) is None
    client.delete_object(Bucket=name, Key="photos/cat/000.png")
    client.upload_file(str(root / "cat/001.png"), name, "photos.zip")
    reason = "the source has changed since it was prepared"
    assert stale(config(uri, anonymous=True), workspace) == reason


def test_archives_below_a_prefix_are_one_source(tmp_path: Path, bucket: tuple[Any, str]) -> None:
    root = write_classes(tmp_path / "raw", ["cat", "dog"])
    for name in ("cat", "dog"):
        shutil.make_archive(str(tmp_path / f"packed/{name}"), "tar", root, name)
    upload(*bucket, tmp_path / "packed", "shards")
    data = prepared(tmp_path / "a", f"s3://{bucket[1]}/shards")
    assert data.fingerprint == prepared(tmp_path / "b", root).fingerprint


def test_parquet_and_arrays_in_s3_are_read(tmp_path: Path, bucket: tuple[Any, str]) -> None:
    for number, split in enumerate(("train", "test")):
        pixels = np.random.default_rng(number).integers(0, 256, (3, 8, 8, 3), np.uint8)
        contents = [encoded(Image.fromarray(array)) for array in pixels]
        write_parquet(tmp_path / f"hub/data/{split}-0.parquet", {"image": images(contents)})
        write(tmp_path / f"arrays/{split}.npy", npy(pixels))
    upload(*bucket, tmp_path / "hub", "hub")
    upload(*bucket, tmp_path / "arrays", "arrays")
    data = prepared(tmp_path / "a", f"s3://{bucket[1]}/hub", max_rejected=0.0)
    assert (len(data), data.manifest.holdout_count) == (3, 3)
    for name, key in (("b", "hub/data/train-0.parquet"), ("c", "arrays/train.npy")):
        found = prepared(tmp_path / name, f"s3://{bucket[1]}/{key}", max_rejected=0.0)
        assert np.array_equal(found.images[np.arange(3)], data.images[np.arange(3)])
        assert found.manifest.source["etag"]


def test_missing_bucket_or_archive_is_an_error(tmp_path: Path, bucket: tuple[Any, str]) -> None:
    with pytest.raises(UserError, match="There is no bucket 'no-such-bucket-here' at http"):
        prepared(tmp_path, "s3://no-such-bucket-here/x")
    with pytest.raises(UserError, match=r"s3://.*/absent.zip does not exist"):
        prepared(tmp_path, f"s3://{bucket[1]}/absent.zip")


def test_object_changed_while_reading_is_an_error(bucket: tuple[Any, str]) -> None:
    client, name = bucket
    client.put_object(Bucket=name, Key="x/0.png", Body=b"one")
    source = s3.Prefix(f"s3://{name}/x")
    images = source.listing().images
    client.put_object(Bucket=name, Key="x/0.png", Body=b"two")
    with pytest.raises(
        UserError, match=rf"S3 request failed for s3://{name}/x/0\.png: .*PreconditionFailed"
    ):
        list(source.read(images))


def test_empty_prefix_is_an_error(tmp_path: Path, bucket: tuple[Any, str]) -> None:
    with pytest.raises(UserError, match=r"s3://.*/empty contains no images"):
        prepared(tmp_path, f"s3://{bucket[1]}/empty")
