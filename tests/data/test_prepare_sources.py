"""prepare reads S3, DVC, CIFAR-10's files and official downloads, and records its source."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import uuid
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.dvc_registry import Registry
from support.pictures import config, prepared, rejected, write, write_classes
from support.s3_server import Gate

from ddpm_core.data.check import check_data
from ddpm_core.data.prepare import prepare, stale
from ddpm_core.data.sources import download, dvc, s3
from ddpm_core.data.sources.cifar import CLASSES
from ddpm_core.data.sources.open import open_source
from ddpm_core.errors import UserError
from ddpm_core.storage.lease import LEASE
from ddpm_core.storage.staging import sweep
from ddpm_core.storage.workspace import Workspace

# Digits


def test_digits_are_white_on_black_and_labelled(tmp_path: Path) -> None:
    data = prepared(tmp_path, "digits", image_size=16)
    assert data.images.shape == (1797, 16, 16, 1)
    assert data.classes == list("0123456789")
    assert data.class_counts == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    zero = data.images[0][:, :, 0]
    assert zero[7:9, 7:9].max() < 80 and zero[:, 0].max() < 10 and zero.max() > 200


# S3: a server in this process, or the one at AWS_ENDPOINT_URL


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
        UserError, match=rf"S3 failed at s3://{name}/x/0\.png: .*PreconditionFailed"
    ):
        list(source.read(images))


def test_empty_prefix_is_an_error(tmp_path: Path, bucket: tuple[Any, str]) -> None:
    with pytest.raises(UserError, match=r"s3://.*/empty contains no images"):
        prepared(tmp_path, f"s3://{bucket[1]}/empty")


# DVC: the real program with git, and a remote in a folder


def run(*command: str, cwd: Path) -> str:
    quiet = {
        "DVC_NO_ANALYTICS": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        **{f"GIT_{who}_NAME": "x" for who in ("AUTHOR", "COMMITTER")},
        **{f"GIT_{who}_EMAIL": "x@example.org" for who in ("AUTHOR", "COMMITTER")},
    }
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, env={**os.environ, **quiet}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Return a repository whose `photos` has versions v1 and v2, and their commits."""
    root = tmp_path_factory.mktemp("registry")
    program = str(Path(sys.executable).with_name("dvc"))
    repo, commits = root / "repo", {}
    repo.mkdir()
    run("git", "init", "--quiet", cwd=repo)
    write(repo / ".dvc/.gitignore", "/cache\n/tmp\n")
    write(
        repo / ".dvc/config", f"[core]\nremote = store\n['remote \"store\"']\nurl = {root}/store\n"
    )
    for tag, each in (("v1", 3), ("v2", 4)):
        write_classes(repo / "photos", ["cat", "dog"], each=each)
        run(program, "add", "--quiet", "photos", cwd=repo)
        run("git", "add", ".", cwd=repo)
        run("git", "commit", "--quiet", "--message", tag, cwd=repo)
        run("git", "tag", "--annotate", tag, "--message", tag, cwd=repo)
        commits[tag] = run("git", "rev-parse", "HEAD", cwd=repo)
    run(program, "push", "--quiet", "--all-tags", cwd=repo)
    shutil.rmtree(repo / ".dvc/cache")  # so that downloads come from the remote
    return repo, commits


def test_tracked_path_is_fetched_at_its_revision(
    tmp_path: Path, registry: tuple[Path, dict[str, str]]
) -> None:
    repo, commits = registry
    data = prepared(tmp_path, f"dvc:{repo}#photos@v1")
    assert (
        data.fingerprint
        == prepared(tmp_path / "e", write_classes(tmp_path / "raw", ["cat", "dog"])).fingerprint
    )
    assert data.manifest.source["revision"] == commits["v1"]
    assert data.manifest.source["uri"] == f"dvc:{repo}#photos@v1"


def test_moved_tag_makes_the_data_stale(
    tmp_path: Path, registry: tuple[Path, dict[str, str]]
) -> None:
    repo, commits = registry
    run("git", "tag", "--force", "moving", "v1^{}", cwd=repo)
    settings = config(f"dvc:{repo}#photos@moving")
    workspace = Workspace.open(str(tmp_path / "workspace"))
    assert prepare(settings, workspace)["count"] == 6
    assert stale(settings, workspace) is None
    run("git", "tag", "--force", "moving", "v2^{}", cwd=repo)
    assert stale(settings, workspace) == "the source has changed since it was prepared"
    assert prepare(settings, workspace)["count"] == 8
    assert workspace.read_json("data/manifest.json")["source"]["revision"] == commits["v2"]


def test_error_contains_the_message_of_dvc(
    tmp_path: Path, registry: tuple[Path, dict[str, str]]
) -> None:
    with pytest.raises(UserError, match=r"dvc get failed for photos in .* at v9: .*v9"):
        prepared(tmp_path, f"dvc:{registry[0]}#photos@v9")


@pytest.mark.parametrize(
    "uri", ["dvc:", "dvc:repo", "dvc:#photos", "dvc:repo#photos@", "dvc:a\0b#photos"]
)
def test_incomplete_dvc_source_is_refused(tmp_path: Path, uri: str) -> None:
    with pytest.raises(UserError, match="must be dvc:REPO#PATH@REV"):
        prepared(tmp_path, uri)


@pytest.mark.parametrize(
    "uri",
    [
        "dvc:--upload-pack=touch {};#photos",
        "dvc:-c#photos",
        "dvc:{repo}#--help",
        "dvc:{repo}#/--help",
        "dvc:{repo}#photos@--output={}",
        "dvc:ext::touch {}#photos",
    ],
)
def test_dvc_source_cannot_pass_options_or_commands(
    tmp_path: Path, registry: tuple[Path, dict[str, str]], uri: str
) -> None:
    made = tmp_path / "made"
    with pytest.raises(UserError, match="may begin with '-'"):
        prepared(tmp_path, uri.format(made, repo=registry[0]))
    assert not made.exists()


def test_git_and_dvc_options_end_before_the_source(
    tmp_path: Path, registry: tuple[Path, dict[str, str]]
) -> None:
    made = tmp_path / "made"
    assert dvc.commit(dvc.Tracked(f"--upload-pack=touch {made};", "photos", "")) is None
    with pytest.raises(UserError, match="dvc get failed for --help in"):
        dvc.fetch(dvc.Tracked(str(registry[0]), "--help", ""), tmp_path / "target")
    assert not made.exists()


def test_revision_resolves_as_in_git(
    tmp_path: Path,
) -> None:
    made = Registry(tmp_path / "made", str(tmp_path / "remote"))
    commits = {}
    for name in ("v2", "zz/v2"):
        made.git("checkout", "--quiet", "-b", name)
        made.git("commit", "--quiet", "--allow-empty", "--message", name)
        commits[name] = made.git("rev-parse", "HEAD")
    made.git("tag", "--annotate", "--message", "a tag", "v3", "v2")
    made.git("update-ref", "refs/remotes/origin/HEAD", commits["v2"])
    wanted = {"v2": "v2", "zz/v2": "zz/v2", "v3": "v2", "": "zz/v2"}
    for rev, name in wanted.items():
        assert dvc.commit(dvc.Tracked(f"file://{made.folder}", "photos", rev)) == commits[name]
    assert dvc.commit(dvc.Tracked(f"file://{made.folder}", "photos", "v4")) is None


def test_manifest_has_the_dvc_checksum_of_a_tracked_directory(
    tmp_path: Path, registry: tuple[Path, dict[str, str]]
) -> None:
    found = prepared(tmp_path, registry[0] / "photos").manifest.source
    assert found["dvc_md5"].endswith(".dir")


def test_links_into_the_dvc_cache_are_followed(tmp_path: Path) -> None:
    root, program = tmp_path / "repo", str(Path(sys.executable).with_name("dvc"))
    photos = write_classes(root / "photos", ["cat", "dog"])
    expected = prepared(tmp_path / "files", photos, max_rejected=0.0)
    run(program, "init", "--quiet", "--no-scm", cwd=root)
    run(program, "config", "cache.type", "symlink", cwd=root)
    run(program, "add", "--quiet", "photos", cwd=root)
    assert all(path.is_symlink() for path in photos.glob("*/*.png"))
    linked = prepared(tmp_path / "links", photos, max_rejected=0.0)
    assert linked.fingerprint == expected.fingerprint


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
