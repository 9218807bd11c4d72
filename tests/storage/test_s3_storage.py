"""S3 storage: uploads in parts, long lists, shared and checked copies, errors and retries."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.s3_server import Bucket, Gate

from ddpm_core.errors import Corrupt, UserError
from ddpm_core.storage import (
    MANIFEST,
    Changed,
    Unreachable,
    open_storage,
    s3,
    verify,
)
from ddpm_core.storage import (
    bucket as buckets,
)
from ddpm_core.storage.base import Silent
from ddpm_core.storage.bucket import connect
from ddpm_core.storage.lease import Lease
from ddpm_core.storage.retry import S3Retry
from ddpm_core.storage.s3 import S3Storage
from ddpm_core.storage.workspace import Workspace


@pytest.fixture
def prefix(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    bucket.enter(monkeypatch, tmp_path)
    return f"{tmp_path.name}/run"


@pytest.fixture
def storage(bucket: Bucket, prefix: str) -> S3Storage:
    return S3Storage(bucket.uri(prefix))


def cached(place: Path) -> list[Path]:
    return [path for path in place.glob("ddpm-cache-*/*/**/*") if path.is_file()]


def test_large_file_is_uploaded_in_parts_with_its_checksum(
    bucket: Bucket, prefix: str, storage: S3Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "PART", 5 * 2**20)
    storage = S3Storage(bucket.uri(prefix))
    content = bytes(range(256)) * (11 * 2**12)
    with storage.new_folder("data") as folder:
        (folder / "images.npy").write_bytes(content)
    storage.move("data", "moved")
    head = bucket.client.head_object(Bucket=bucket.name, Key=f"{prefix}/moved/images.npy")
    assert "-3" in head["ETag"]
    assert head["Metadata"]["sha256"] == storage.checksum("moved/images.npy")
    assert (storage.local("moved") / "images.npy").read_bytes() == content
    storage.write("large", content)
    assert storage.read("large") == content


def test_list_of_several_pages_is_complete(
    storage: S3Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "PAGE", 2)
    for number in range(5):
        storage.write(f"x/{number}", b"x")
        storage.write(f"x/folder-{number}/{MANIFEST}", b"{}")
    assert storage.names("x") == [*"01234", *(f"folder-{n}" for n in range(5))]
    assert storage.sealed("x") == [f"folder-{n}" for n in range(5)]
    storage.remove("x")
    assert storage.names("x") == []


def test_unfinished_uploads_are_invisible_and_swept(
    bucket: Bucket, prefix: str, storage: S3Storage
) -> None:
    for step in ("step-00000004", "step-00000008"):
        with storage.new_folder(f"snapshots/{step}") as folder:
            (folder / "model").write_bytes(b"x")
    bucket.delete(f"{prefix}/snapshots/step-00000008/{MANIFEST}")
    upload = bucket.client.create_multipart_upload(
        Bucket=bucket.name, Key=f"{prefix}/snapshots/step-00000012/model"
    )
    assert storage.sealed("snapshots") == ["step-00000004"]
    assert not storage.exists("snapshots/step-00000008")
    bucket.put(f"{prefix}2/snapshots/step-00000008/model", b"a neighbour's")
    storage.sweep()
    assert storage.names("snapshots") == ["step-00000004"]
    assert bucket.keys(f"{prefix}2/") == [f"{prefix}2/snapshots/step-00000008/model"]
    left = bucket.client.list_multipart_uploads(Bucket=bucket.name, Prefix=prefix)
    assert upload["UploadId"] not in [one["UploadId"] for one in left.get("Uploads", ())]


@pytest.mark.parametrize("damage", ["changed", "cut", "gone"])
def test_damaged_object_is_named(
    bucket: Bucket, prefix: str, storage: S3Storage, damage: str
) -> None:
    with storage.new_folder("a") as folder:
        (folder / "model").write_bytes(b"weights")
    storage.forget("a")
    key = f"{prefix}/a/model"
    if damage == "gone":
        bucket.delete(key)
    else:
        bucket.put(key, b"WEIGHTS" if damage == "changed" else b"weigh")
    with pytest.raises(Corrupt, match=r"a\b.*model"):
        verify(storage.local("a"))


def test_object_that_does_not_match_its_checksum_is_corrupt(
    bucket: Bucket, prefix: str, storage: S3Storage
) -> None:
    storage.write("run.json", b"{}")
    head = bucket.client.head_object(Bucket=bucket.name, Key=f"{prefix}/run.json")
    bucket.client.put_object(
        Bucket=bucket.name, Key=f"{prefix}/run.json", Body=b"[]", Metadata=head["Metadata"]
    )
    for read in (storage.read, storage.local):
        with pytest.raises(Corrupt, match=r"run\.json was .*: its checksum differs"):
            read("run.json")


def test_last_process_removes_the_shared_copy(
    bucket: Bucket, prefix: str, storage: S3Storage, tmp_path: Path
) -> None:
    storage.write("file", b"content")
    other = S3Storage(bucket.uri(prefix))
    first, second = storage.local("file"), other.local("file")
    assert first.stat().st_ino == second.stat().st_ino
    storage._cache.close()
    assert second.read_bytes() == b"content"
    other._cache.close()
    assert cached(tmp_path) == []


def test_damaged_copy_is_downloaded_again(storage: S3Storage) -> None:
    with storage.new_folder("a") as folder:
        (folder / "model").write_bytes(b"weights")
    (storage.local("a") / "model").write_bytes(b"WEIGHTS")
    assert (storage.local("a") / "model").read_bytes() == b"weights"


def test_long_growing_file_has_several_segments(
    bucket: Bucket, prefix: str, storage: S3Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "SEGMENT", 100)
    mirror = storage.mirror("log.jsonl", 3)
    mirror.start()
    with mirror.path.open("a") as file:
        for step in range(30):
            print(f'{{"step": {step}}}', file=file, flush=True)
            mirror.push()
        file.write('{"step": 30')
    mirror.close()
    lines = [f'{{"step": {step}}}' for step in range(30)]
    assert storage.local("log.jsonl").read_text().splitlines() == lines
    segments = bucket.keys(f"{prefix}/log.jsonl.parts/")
    assert segments[0].endswith("/00000003-0000") and len(segments) == 4


def test_server_without_conditional_writes_causes_one_warning(
    storage: S3Storage, capfd: pytest.CaptureFixture[str]
) -> None:
    from botocore.awsrequest import AWSResponse
    from urllib3 import HTTPResponse

    def refuse(request: Any, **_: Any) -> Any:
        if {"If-Match", "If-None-Match"} & set(request.headers):
            body = b"<Error><Code>NotImplemented</Code><Message>no</Message></Error>"
            raw = HTTPResponse(body=body, preload_content=False)
            raw.stream = lambda *_: iter([body])  # type: ignore[method-assign]
            return AWSResponse(request.url, 501, {}, raw)
        return None

    for one in (storage._quick, storage._bucket):
        one.client.meta.events.register("before-send.s3.PutObject", refuse)
    tag = storage.write_if("lease.json", b"one", None)
    storage.write_if("lease.json", b"two", tag)
    with pytest.raises(Changed):
        storage.write_if("lease.json", b"three", tag)
    with storage.new_folder("a") as folder:
        (folder / "model").write_bytes(b"weights")
    assert storage.sealed("") == ["a"]
    assert capfd.readouterr().err.count("does not support conditional writes") == 1


def test_missing_bucket_server_key_or_package_is_a_user_error(
    bucket: Bucket, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Unreachable, match="There is no bucket 'absent-bucket' at http"):
        open_storage("s3://absent-bucket/run")
    with pytest.raises(UserError, match="must be s3://bucket/prefix"):
        open_storage("s3:///run")
    gate = Gate(bucket.environment["AWS_ENDPOINT_URL"])
    gate.shut()
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", gate.endpoint)
        with pytest.raises(Silent, match=f"{gate.endpoint} is unavailable"):
            open_storage(bucket.uri(prefix))
    with monkeypatch.context() as patch:
        patch.delenv("AWS_ACCESS_KEY_ID")
        patch.delenv("AWS_SECRET_ACCESS_KEY")
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", "absent")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setattr("boto3.DEFAULT_SESSION", None)
        with pytest.raises(Unreachable, match=r"Unable to locate credentials\). Check AWS_ACCESS"):
            open_storage(bucket.uri(prefix))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "boto3", None)
        with pytest.raises(UserError, match=r"pip install 'ddpm-core\[s3\]'"):
            open_storage(bucket.uri(prefix))


def test_read_continues_after_a_server_restart(
    bucket: Bucket, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(bucket.environment["AWS_ENDPOINT_URL"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", gate.endpoint)
    storage = S3Storage(bucket.uri(prefix))
    storage.write("file", b"content")
    gate.shut()
    gate.open()
    assert storage.read("file") == b"content"


@pytest.fixture
def gated(bucket: Bucket, prefix: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Gate, S3Storage]:
    """Return a gate that can spoil responses, and a storage with a file behind it."""
    gate = Gate(bucket.environment["AWS_ENDPOINT_URL"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", gate.endpoint)
    storage = S3Storage(bucket.uri(prefix))
    storage.write("file", b"content")
    return gate, storage


def ask(storage: S3Storage, attempts: int, reading: float = 5.0) -> None:
    """Set the number of attempts and the timeout in seconds of a storage."""
    for one in (storage._bucket, storage._quick):
        one.client = connect(S3Retry(attempts, connect_timeout=5.0, read_timeout=reading))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("drop", r"is unavailable \(ConnectionClosedError\)"),
        ("hang", r"is unavailable \(ReadTimeoutError\)"),
        ("cut", r"closes connections early \((ResponseStreaming|IncompleteRead)Error\)"),
    ],
)
def test_broken_or_missing_responses_are_user_errors(
    gated: tuple[Gate, S3Storage], how: str, message: str
) -> None:
    gate, storage = gated
    ask(storage, attempts=1, reading=0.1)
    gate.spoil(how, 1000)
    attempts: list[Callable[[], object]] = [
        lambda: storage.read("file"),
        lambda: storage.read_tagged("file"),
        lambda: storage.local("file"),
    ]
    if how != "cut":  # responses to these have no body
        attempts += [
            lambda: storage.write("file", b"content"),
            lambda: storage.write_if("lease.json", b"mine", None),
        ]
    for attempt in attempts:
        with pytest.raises(Silent, match=f"{gate.endpoint} {message}. Check "):
            attempt()


def test_broken_body_is_retried_as_often_as_a_request(
    gated: tuple[Gate, S3Storage],
) -> None:
    gate, storage = gated
    ask(storage, attempts=3)
    gate.spoil("cut", 2)
    assert storage.read("file") == b"content"
    gate.spoil("cut", 2)
    found = storage.read_tagged("file")
    assert found is not None and found.data == b"content"
    gate.spoil("cut", 3)
    with pytest.raises(Unreachable, match="closes connections early"):
        storage.read("file")


@pytest.mark.parametrize("validation", ["when_supported", "when_required"])
def test_bit_flipped_in_transit_is_downloaded_again(
    gated: tuple[Gate, S3Storage], validation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's checksum detects it, or ours if boto3 does not compare the server's."""
    monkeypatch.setenv("AWS_RESPONSE_CHECKSUM_VALIDATION", validation)
    gate, storage = gated
    ask(storage, attempts=2)
    content = b"some weights"
    with storage.new_folder("a") as folder:
        (folder / "model").write_bytes(content)
    storage.forget("a")
    gate.flip(content, 2)
    assert storage.read("a/model") == content and not gate.flips
    gate.flip(content, 2)
    assert (storage.local("a") / "model").read_bytes() == content and not gate.flips
    storage.forget("a")
    for fetch in (storage.read, storage.local):
        gate.flip(content, 1000)
        with pytest.raises(Corrupt, match="its checksum differs"):
            fetch("a/model")
        assert gate.flips >= 1000 - 2 * 3


def test_lease_survives_broken_and_missing_responses(
    gated: tuple[Gate, S3Storage], capsys: pytest.CaptureFixture[str]
) -> None:
    gate, storage = gated
    lease = Lease(Workspace(storage), None)
    lease.start()
    ask(storage, attempts=1, reading=0.1)
    for how in ("drop", "hang", "cut"):
        gate.spoil(how, 1000)
        lease._try_renew()
    gate.spoil("", 0)
    ask(storage, attempts=1)
    lease._try_renew()
    lease.check()
    lease.stop()
    message = capsys.readouterr().err
    assert message.count("Cannot renew the lease") == message.count("Renewed the lease") == 1


def test_server_that_is_not_s3_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server responds to everything with an HTML page."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html><body><p>Welcome</body></html>")

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
        with pytest.raises(Unreachable, match="S3 request failed for s3://bucket/run"):
            open_storage("s3://bucket/run")
        server.shutdown()
