"""The Inception extractor, and the file of its weights: local, downloaded, corrupt or hostile."""

from __future__ import annotations

import hashlib
import http.server
import io
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.digits_workspace import (
    digits,
    make_config,
    put_samples,
    put_snapshot,
)
from support.extractors import CPU, few, workspace_at
from support.s3_server import Gate
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

from ddpm_core.data.dataset import open_dataset
from ddpm_core.errors import UserError
from ddpm_core.evaluation.evaluate import evaluate
from ddpm_core.evaluation.freshness import stale
from ddpm_core.evaluation.inception import STANDARD, open_inception
from ddpm_core.evaluation.weights import locate
from ddpm_core.storage import sha256_of
from ddpm_core.storage.workspace import Workspace


class Bare(FeatureExtractorInceptionV3):
    """torch-fidelity's network before its weights are loaded."""

    def load_state_dict(self, *_: Any, **__: Any) -> None:  # type: ignore[override]
        return None


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights with the correct names and shapes, in a .pth file."""
    stream = io.BytesIO()
    torch.save({}, stream)
    stream.seek(0)
    torch.manual_seed(0)
    network = Bare("inception", ["2048"], feature_extractor_weights_path=stream)
    path = tmp_path_factory.mktemp("weights") / "inception.pth"
    torch.save(network.state_dict(), path)
    return path


@pytest.mark.slow
def test_inception_computes_what_torch_fidelity_computes(weights: Path) -> None:
    layers = ["2048", "logits_unbiased"]
    theirs = FeatureExtractorInceptionV3("i", layers, feature_extractor_weights_path=str(weights))
    rgb = few().permute(0, 3, 1, 2).expand(-1, 3, -1, -1)
    features, logits = open_inception(weights, CPU)(few())
    assert features.shape == (3, 2048) and logits is not None and logits.shape == (3, 1008)
    assert torch.equal(features, theirs(rgb)[0]) and torch.equal(logits, theirs(rgb)[1])


def test_only_the_standard_file_gives_a_score_called_fid(weights: Path) -> None:
    extractor = open_inception(weights, CPU)
    assert extractor.space == "inception" and extractor.facts["sha256"] == sha256_of(weights)
    assert extractor.fingerprint == sha256_of(weights)[:16] != STANDARD[:16]


@pytest.mark.slow
def test_weights_may_be_safetensors_and_loading_draws_nothing(
    weights: Path, tmp_path: Path
) -> None:
    state = torch.load(weights, weights_only=True)
    save_file(state, tmp_path / "inception.safetensors")
    before = torch.get_rng_state()
    other = open_inception(tmp_path / "inception.safetensors", CPU)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(other(few(2))[0], open_inception(weights, CPU)(few(2))[0])


@pytest.mark.slow
def test_inception_scores_have_a_name_and_a_checksum(weights: Path, tmp_path: Path) -> None:
    settings = {"inception_weights": str(weights), "metrics": ["kid", "is"]}
    config = make_config(tmp_path, evaluate=settings)
    workspace = workspace_at(
        tmp_path / "run", images=digits(8)[0][:8], labels=digits(8)[1][:8], held_out=2
    )
    data = open_dataset(workspace).fingerprint
    put_snapshot(workspace, 100)
    put_samples(workspace, 100, digits(8)[0][8:12], data)
    (row,) = evaluate(config, workspace)
    assert row["score_name"] == "kid_inception_4" and row["is_mean"] is None  # too few images
    assert row["evidence"]["extractor_fingerprint"] == sha256_of(weights)[:16]
    facts = workspace.read_json("evaluation/results.json")["extractor"]
    assert facts["sha256"] == sha256_of(weights) and facts["standard"] is False
    assert stale(config, workspace) is None
    other = tmp_path / "other.pth"
    other.write_bytes(weights.read_bytes() + b"0")
    moved = {"evaluate": {**settings, "inception_weights": str(other)}}
    assert (
        stale(make_config(tmp_path, **moved), workspace) == "the scores use a different extractor"
    )


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path("unpickled"),))


def test_code_in_a_weights_file_is_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": Evil()}, tmp_path / "evil.pth")
    with pytest.raises(UserError, match="cannot be read as weights") as caught:
        open_inception(tmp_path / "evil.pth", CPU)
    assert str(caught.value).endswith(
        "it is corrupt, or contains more than tensors. Fetch torch-fidelity's file again."
    )  # without torch's advice to load it unsafely
    assert not (tmp_path / "unpickled").exists()


def test_compressed_weights_are_refused(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(10**6)}, tmp_path / "plain.pth")
    with (
        zipfile.ZipFile(tmp_path / "plain.pth") as plain,
        zipfile.ZipFile(tmp_path / "packed.pth", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    with pytest.raises(UserError, match=r"packed\.pth .* bytes and would unpack to 4,00"):
        open_inception(tmp_path / "packed.pth", CPU)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"not weights at all", "cannot be read"),
        ({"a": torch.zeros(2)}, "does not contain the weights of torch-fidelity's Inception"),
        ([torch.zeros(2)], "is not a state dict"),
        ({1: torch.zeros(2)}, "is not a state dict"),
    ],
)
def test_unsuitable_weights_are_an_error(content: Any, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(UserError, match=sentence) as caught:
        open_inception(path, CPU)
    assert str(path) in str(caught.value)


@pytest.fixture
def web(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """A web server with weights.pth, and the paths of its requests."""
    folder, asked = tmp_path / "web", []
    folder.mkdir()
    (folder / "weights.pth").write_bytes(b"weights")

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(folder))

        def log_message(self, *_: Any) -> None:
            asked.append(self.path)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
        server.shutdown()


def test_uri_is_downloaded_once(tmp_path: Path, web: tuple[str, list[str]]) -> None:
    workspace = Workspace.open(str(tmp_path / "run"))
    address, asked = web
    for _ in range(2):
        path = locate(f"{address}/weights.pth", workspace)
        assert path.read_bytes() == b"weights" and path.name == "weights.pth"
    assert asked == ["/weights.pth"]


def test_uri_with_a_new_signature_is_not_downloaded_again(
    tmp_path: Path, web: tuple[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    workspace = Workspace.open(str(tmp_path / "run"))
    address, asked = web
    for date in ("20260101", "20270101"):
        signed = f"?X-Amz-Date={date}&X-Amz-Signature=hunter2"
        assert locate(f"{address}/weights.pth{signed}", workspace).read_bytes() == b"weights"
    assert asked == ["/weights.pth?X-Amz-Date=20260101&X-Amz-Signature=hunter2"]
    with pytest.raises(UserError, match=r"absent\.pth\?\*\*\* failed: HTTP") as failed:
        locate(f"{address}/absent.pth{signed}", workspace)
    assert "hunter2" not in str(failed.value) + capsys.readouterr().err


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "without a sum at first"])
def test_a_wrong_download_is_not_kept(
    tmp_path: Path, web: tuple[str, list[str]], checked: bool
) -> None:
    workspace = Workspace.open(str(tmp_path / "run"))
    uri, served = f"{web[0]}/weights.pth", tmp_path / "web" / "weights.pth"
    right = f"{uri}#sha256={hashlib.sha256(b'right').hexdigest().upper()}"
    if not checked:
        assert locate(uri, workspace).read_bytes() == b"weights"
    with pytest.raises(UserError, match=r"/weights\.pth has the SHA-256 .*, but #sha256= requires"):
        locate(right, workspace)
    served.write_bytes(b"right")
    for _ in range(2):
        assert locate(right, workspace).read_bytes() == b"right"
    assert len(web[1]) == (4 if checked else 5)  # storage.web tries a wrong file three times


def test_weights_damaged_in_transit_are_downloaded_again(
    tmp_path: Path, web: tuple[str, list[str]]
) -> None:
    workspace, gate = Workspace.open(str(tmp_path / "run")), Gate(web[0])
    gate.flip(b"weights", 2)
    checksum = hashlib.sha256(b"weights").hexdigest()
    path = locate(f"{gate.endpoint}/weights.pth#sha256={checksum}", workspace)
    assert path.read_bytes() == b"weights" and not gate.flips


def test_s3_uri_is_downloaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL_S3": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="weights")
    client.put_object(Bucket="weights", Key="a/inception.pth", Body=b"weights")
    workspace = Workspace.open(str(tmp_path / "run"))
    path = locate("s3://weights/a/inception.pth", workspace)
    server.stop()
    assert path.read_bytes() == b"weights"
    assert locate("s3://weights/a/inception.pth", workspace) == path


def test_failed_download_is_an_error_and_leaves_no_file(
    tmp_path: Path, web: tuple[str, list[str]]
) -> None:
    workspace = Workspace.open(str(tmp_path / "run"))
    with pytest.raises(UserError, match=r"downloading .* failed: HTTP Error 404"):
        locate(f"{web[0]}/absent.pth", workspace)
    assert not list(workspace.path("evaluation").rglob("absent*"))


def test_a_path_and_a_file_uri_are_used_in_place(tmp_path: Path) -> None:
    workspace = Workspace.open(str(tmp_path / "run"))
    file = tmp_path / "my weights.pth"
    file.write_bytes(b"weights")
    assert locate(str(file), workspace) == file
    assert locate(file.as_uri(), workspace) == file


def test_bad_checksum_missing_file_and_unknown_scheme_are_errors(
    tmp_path: Path,
) -> None:
    workspace = Workspace.open(str(tmp_path / "run"))
    file = tmp_path / "weights.pth"
    file.write_bytes(b"weights")
    assert locate(f"{file}#sha256={sha256_of(file)}", workspace) == file
    with pytest.raises(UserError, match="requires abc"):
        locate(f"{file}#sha256=abc", workspace)
    with pytest.raises(UserError, match="does not exist"):
        locate(str(tmp_path / "absent.pth"), workspace)
    with pytest.raises(UserError, match=r"got 'ftp://x/w\.pth'; must be a path, or a URI"):
        locate("ftp://x/w.pth", workspace)


@pytest.mark.parametrize("scheme", ["http", "https", "s3"])
def test_a_password_in_the_address_is_refused_and_not_shown(scheme: str, tmp_path: Path) -> None:
    workspace = Workspace.open(str(tmp_path / "run"))
    with pytest.raises(UserError, match=r"which is not supported\. Download the file") as refused:
        locate(f"{scheme}://me:secret@host/weights.pth", workspace)
    assert "secret" not in str(refused.value)
