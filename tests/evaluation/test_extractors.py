"""Feature extractors: the standard Inception from a file, and a classifier of the data itself.

Trust in the latter is earned: its distance is low for real images and grows with what is wrong.
"""

from __future__ import annotations

import functools
import hashlib
import http.server
import io
import shutil
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from safetensors.torch import save_file
from support.digits_workspace import (
    HELD_OUT,
    Pixels,
    digits,
    make_config,
    put_data,
    put_samples,
    put_snapshot,
)
from support.mlflow_server import put_store, shared_server
from support.s3_server import Gate
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

from ddpm_core.data.dataset import PackedDataset, open_dataset
from ddpm_core.errors import Corrupt, UserError
from ddpm_core.evaluation.evaluate import evaluate
from ddpm_core.evaluation.features import Extractor, PixelPCA, extract, flatten
from ddpm_core.evaluation.freshness import EXTRACTOR, stale
from ddpm_core.evaluation.in_domain import (
    InDomain,
    load_extractor,
    save_extractor,
    steps_for,
    train_extractor,
)
from ddpm_core.evaluation.inception import STANDARD, open_inception
from ddpm_core.evaluation.metrics import Moments, frechet_distance, moments
from ddpm_core.evaluation.shared import SHARED, open_in_domain
from ddpm_core.evaluation.weights import locate
from ddpm_core.storage import sha256_of
from ddpm_core.storage.workspace import Workspace
from ddpm_core.tracking.client import connect

CPU = torch.device("cpu")


def workspace_at(root: Path, **data: Any) -> Workspace:
    workspace = Workspace.open(str(root))
    images, labels = digits()
    put_data(workspace, **{"images": images, "labels": labels, **data})
    return workspace


def splits(workspace: Workspace) -> tuple[PackedDataset, PackedDataset]:
    return open_dataset(workspace), open_dataset(workspace, "holdout")


@functools.cache
def trained(seed: int = 0, steps: int | None = None) -> InDomain:
    with tempfile.TemporaryDirectory() as folder:
        return train_extractor(*splits(workspace_at(Path(folder))), seed, steps)


def few(count: int = 3) -> torch.Tensor:
    return torch.from_numpy(digits()[0][:count])


class Bare(FeatureExtractorInceptionV3):
    """torch-fidelity's network as it is before its weights are loaded."""

    def load_state_dict(self, *_: Any, **__: Any) -> None:  # type: ignore[override]
        return None


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights of the right layout, in torch's own file format."""
    stream = io.BytesIO()
    torch.save({}, stream)
    stream.seek(0)
    torch.manual_seed(0)
    network = Bare("inception", ["2048"], feature_extractor_weights_path=stream)
    path = tmp_path_factory.mktemp("weights") / "inception.pth"
    torch.save(network.state_dict(), path)
    return path


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


def test_weights_may_be_safetensors_and_loading_draws_nothing(
    weights: Path, tmp_path: Path
) -> None:
    state = torch.load(weights, weights_only=True)
    save_file(state, tmp_path / "inception.safetensors")
    before = torch.get_rng_state()
    other = open_inception(tmp_path / "inception.safetensors", CPU)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(other(few(2))[0], open_inception(weights, CPU)(few(2))[0])


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
    assert row["score_name"] == "kid_inception_4" and row["is_mean"] is None  # of so few
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
    )  # and no advice of torch's to run it
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
    """A web server with weights.pth, and the paths it was asked for."""
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
    assert len(web[1]) == (4 if checked else 5)  # TRIES for the wrong one


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


def test_training_is_repeatable_and_draws_nothing_from_torch(tmp_path: Path) -> None:
    data = splits(workspace_at(tmp_path))
    before = torch.get_rng_state()
    first, second = (train_extractor(*data, steps=4) for _ in range(2))
    other = train_extractor(*data, steps=4, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    for name, weight in first.network.state_dict().items():
        assert torch.equal(weight, second.network.state_dict()[name]), name
    assert not torch.equal(first.network.head.weight, other.network.head.weight)


def test_classifier_is_accurate_on_held_out_digits() -> None:
    facts = trained().facts
    assert facts["accuracy"] > 0.95 and facts["holdout_count"] == HELD_OUT
    assert facts["task"] == "classes" and facts["outputs"] == 10


@pytest.mark.parametrize("classes", [(), ("all",)])
def test_without_classes_it_learns_rotations(classes: tuple[str, ...], tmp_path: Path) -> None:
    images = digits()[0]
    labels = np.zeros(len(images), np.int64)
    workspace = workspace_at(tmp_path, labels=labels, classes=classes)
    found = train_extractor(*splits(workspace), steps=40)
    assert found.facts["task"] == "rotations" and found.facts["outputs"] == 4
    assert found.facts["accuracy"] > 0.6  # 0.25 by chance
    features, logits = found.extractor("x", CPU)(few())
    assert features.shape == (3, 128) and logits is None  # turns say nothing of an image's class


@pytest.mark.parametrize("size", [4, 7, 28, 100])
def test_any_size_and_colour_has_128_features(size: int, tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (24, size, size, 3)).astype(np.uint8)
    labels = np.arange(24) % 3
    workspace = workspace_at(
        tmp_path, images=images, labels=labels, held_out=4, classes=("a", "b", "c")
    )
    found = train_extractor(*splits(workspace), steps=2)
    features, _ = found.extractor("x", CPU)(torch.from_numpy(images))
    assert features.shape == (24, 128) and bool(features.isfinite().all())


@pytest.mark.parametrize(
    ("count", "steps"),
    [(2, 25), (40, 25), (100, 62), (400, 250), (1388, 250), (1628, 254), (50_000, 600)],
)
def test_training_steps_depend_on_the_image_count(count: int, steps: int) -> None:
    assert steps_for(count) == steps


def test_classifier_trained_on_few_images_ranks_samples(tmp_path: Path) -> None:
    images, labels = digits()
    workspace = workspace_at(tmp_path, images=images[:58], labels=labels[:58], held_out=10)
    found = train_extractor(*splits(workspace))
    assert found.facts["steps"] == 30
    extractor = found.extractor("x", CPU)
    real, held_out = images[10:58], images[100:148]
    noise = np.random.default_rng(0).normal(0, 60, held_out.shape)
    blurred = held_out.astype(float)
    for axis in (1, 2) * 3:
        blurred = (np.roll(blurred, 1, axis) + blurred + np.roll(blurred, -1, axis)) / 3
    one_class = images[labels == 3][:48]
    sets = [held_out, (held_out + noise).clip(0, 255), blurred, one_class]
    features = [extract(extractor, [images.astype(np.uint8)]) for images in (real, *sets)]
    real_moments, *others = [one.moments for one in features]
    good, *bad = [frechet_distance(one, real_moments) for one in others]
    assert 1.5 * good < min(bad)


def test_without_held_out_images_there_is_no_accuracy(tmp_path: Path) -> None:
    workspace = workspace_at(tmp_path, held_out=0)
    assert train_extractor(*splits(workspace), steps=2).facts["accuracy"] is None


def test_saved_extractor_computes_the_same(tmp_path: Path) -> None:
    save_extractor(trained(), tmp_path)
    network, fingerprint = load_extractor(tmp_path)
    loaded = network.extractor(fingerprint, CPU)
    ours = trained().extractor("x", CPU)
    assert torch.equal(loaded(few())[0], ours(few())[0])
    assert loaded.accuracy == trained().facts["accuracy"]
    assert loaded.fingerprint == sha256_of(tmp_path / "extractor.safetensors")[:16]


@pytest.mark.parametrize("file", ["extractor.safetensors", "extractor.json"])
def test_corrupt_extractor_is_an_error(file: str, tmp_path: Path) -> None:
    save_extractor(trained(), tmp_path)
    content = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(content[: len(content) // 2])
    with pytest.raises(Corrupt, match="corrupt"):
        load_extractor(tmp_path)


def blurred(images: Pixels, radius: float) -> Pixels:
    blur = ImageFilter.GaussianBlur(radius)
    return np.stack([np.asarray(Image.fromarray(i[..., 0]).filter(blur)) for i in images])[
        ..., None
    ]


def noisy(images: Pixels, deviation: float) -> Pixels:
    noise = np.random.default_rng(0).normal(0, deviation, images.shape)
    return (images + noise).round().clip(0, 255).astype(np.uint8)


@functools.cache
def judge(seed: int) -> tuple[Extractor, Moments]:
    """A classifier, fully trained for the first seed, and the training digits in its features."""
    found = trained(seed, 60) if seed else trained()
    return with_moments(found.extractor("x", CPU))


def with_moments(extractor: Extractor) -> tuple[Extractor, Moments]:
    return extractor, moments(extractor(torch.from_numpy(digits()[0][HELD_OUT:]))[0])


def distances(judge: tuple[Extractor, Moments], sets: list[Pixels]) -> list[float]:
    """From the training digits to each set, of 170 images each."""
    extractor, real = judge
    return [
        frechet_distance(real, moments(extractor(torch.from_numpy(some[:170]))[0])) for some in sets
    ]


def worse_and_worse() -> dict[str, list[Pixels]]:
    """Held-out digits, then the same with more and more of one fault."""
    images, labels = digits()
    real, classes = images[:600], labels[:600]
    return {
        "blur": [real, *(blurred(real, radius) for radius in (0.6, 1.0, 2.0))],
        "noise": [real, *(noisy(real, deviation) for deviation in (20, 40, 80))],
        "dropped classes": [real, *(real[classes >= n] for n in (1, 3, 5))],
    }


@pytest.mark.parametrize("fault", ["blur", "noise", "dropped classes"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_distance_grows_with_every_fault(fault: str, seed: int) -> None:
    found = distances(judge(seed), worse_and_worse()[fault])
    assert found == sorted(found)
    assert found[1] > 1.3 * found[0] and found[-1] > 4 * found[0]


@pytest.mark.parametrize("fault", ["blur", "dropped classes"])
def test_the_distance_of_pixels_grows_too(fault: str) -> None:
    images = digits()[0]
    space = PixelPCA.fit(torch.from_numpy(images[HELD_OUT:])).extractor()
    found = distances(with_moments(space), worse_and_worse()[fault])
    assert found == sorted(found) and found[-1] > 1.5 * found[0]


def test_held_out_images_lie_near_the_floor_of_training_images() -> None:
    images = digits()[0]
    held_out, seen = distances(judge(0), [images[:HELD_OUT], images[HELD_OUT : 2 * HELD_OUT]])
    assert held_out < 1.5 * seen and held_out < 8  # percent of the features' spread


def test_three_classifiers_rank_faulty_sets_alike() -> None:
    images, labels = digits()
    real = images[:600]
    sets = [real, noisy(real, 20), blurred(real, 0.8), real[labels[:600] >= 3], noisy(real, 80)]
    for seed in range(3):
        order = np.argsort(distances(judge(seed), sets))
        assert (order[0], order[-1]) == (0, 4)


@pytest.mark.parametrize("count", [40, 500])
def test_components_are_orthonormal_with_largest_variances(count: int) -> None:
    images = torch.from_numpy(digits()[0][:count])
    pca = PixelPCA.fit(images)
    identity = torch.eye(pca.basis.shape[1])
    torch.testing.assert_close(pca.basis.T @ pca.basis, identity, atol=1e-4, rtol=0)
    variances = pca.project(images).var(0)
    rows = flatten(images, 64).double()
    exact = torch.linalg.svdvals(rows - rows.mean(0)).square() / (count - 1)
    torch.testing.assert_close(variances.double(), exact[: len(variances)], rtol=1e-3, atol=1e-5)


def test_few_images_have_few_components() -> None:
    assert PixelPCA.fit(few(5)).basis.shape == (256, 4)


@pytest.fixture
def store() -> str:
    return shared_server().running().uri


def small_workspace(root: Path, invert: bool = False) -> Workspace:
    """300 digits of 8x8, on which a full training takes two seconds."""
    images, labels = digits(8)
    images = 255 - images if invert else images
    return workspace_at(root, images=images[:300], labels=labels[:300], held_out=60)


def put_extractor(workspace: Workspace, seed: int = 0) -> None:
    with workspace.storage.new_folder(EXTRACTOR) as folder:
        save_extractor(train_extractor(*splits(workspace), seed=seed, steps=2), folder)


def test_second_run_on_a_data_set_uses_the_first_extractor(
    tmp_path: Path, store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path, tracking={"uri": store, "experiment": "second run"})
    first, second = small_workspace(tmp_path / "first"), small_workspace(tmp_path / "second")
    put_extractor(first)
    mine = open_in_domain(config, first, *splits(first), CPU)
    capsys.readouterr()
    theirs = open_in_domain(config, second, *splits(second), CPU)
    assert "using the extractor for these data from MLflow" in capsys.readouterr().err
    assert theirs.fingerprint == mine.fingerprint
    assert torch.equal(theirs(few())[0], mine(few())[0])
    other = small_workspace(tmp_path / "other", invert=True)
    put_extractor(other)
    assert open_in_domain(config, other, *splits(other), CPU).fingerprint != mine.fingerprint


def test_extractor_is_published_once_mlflow_is_available(
    tmp_path: Path, store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    away = make_config(tmp_path, tracking={"uri": "http://127.0.0.1:1"})
    back = make_config(tmp_path, tracking={"uri": store, "experiment": "away"})
    workspace = small_workspace(tmp_path / "run")
    put_extractor(workspace)
    mine = open_in_domain(away, workspace, *splits(workspace), CPU)
    assert "the connection was refused" in capsys.readouterr().err
    assert workspace.read_json(SHARED) == {}
    open_in_domain(back, workspace, *splits(workspace), CPU)
    assert workspace.read_json(SHARED)["uri"] == store
    second = small_workspace(tmp_path / "second")
    assert open_in_domain(back, second, *splits(second), CPU).fingerprint == mine.fingerprint


def test_mlflows_extractor_replaces_a_local_one(tmp_path: Path, store: str) -> None:
    config = make_config(tmp_path, tracking={"uri": store, "experiment": "meanwhile"})
    published, meanwhile = small_workspace(tmp_path / "one"), small_workspace(tmp_path / "two")
    put_extractor(published)
    put_extractor(meanwhile, seed=1)
    first = open_in_domain(config, published, *splits(published), CPU)
    own = open_in_domain(make_config(tmp_path), meanwhile, *splits(meanwhile), CPU)
    assert own.fingerprint != first.fingerprint
    now = open_in_domain(config, meanwhile, *splits(meanwhile), CPU)
    assert now.fingerprint == first.fingerprint


def test_extractors_have_their_own_experiment(tmp_path: Path) -> None:
    """Those that an earlier version put among the training runs are still used."""
    place = put_store(tmp_path / "mlflow.db")
    config = make_config(tmp_path, tracking={"uri": place, "experiment": "digits"})
    first, second = small_workspace(tmp_path / "first"), small_workspace(tmp_path / "second")
    put_extractor(first)
    mine = open_in_domain(config, first, *splits(first), CPU)
    client = connect(place)
    experiment = client.get_experiment_by_name("digits-extractors").experiment_id
    assert len(client.search_runs([experiment])) == 1
    assert client.get_experiment_by_name("digits") is None

    before = make_config(tmp_path, tracking={"uri": place, "experiment": "digits-extractors"})
    assert open_in_domain(before, second, *splits(second), CPU).fingerprint == mine.fingerprint


@pytest.mark.parametrize("moment", ["create_run", "log_artifact", "set_terminated"])
def test_concurrent_publishers_agree_on_one_extractor(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    from mlflow import MlflowClient

    config = make_config(tmp_path, tracking={"uri": store, "experiment": f"at once: {moment}"})
    slow, quick, late = [small_workspace(tmp_path / name) for name in ("slow", "quick", "late")]
    put_extractor(slow)
    put_extractor(quick, seed=1)
    act, found = getattr(MlflowClient, moment), []

    def after_the_other(*arguments: Any, **named: Any) -> Any:
        monkeypatch.setattr(MlflowClient, moment, act)
        found.append(open_in_domain(config, quick, *splits(quick), CPU))
        return act(*arguments, **named)

    monkeypatch.setattr(MlflowClient, moment, after_the_other)
    found += [open_in_domain(config, run, *splits(run), CPU) for run in (slow, late, quick)]
    assert len({extractor.fingerprint for extractor in found}) == 1 and len(found) == 4


def test_extractor_run_without_files_is_skipped(tmp_path: Path) -> None:
    place = put_store(tmp_path / "mlflow.db")
    config = make_config(tmp_path, tracking={"uri": place, "experiment": "lost files"})
    lost, first, second = [small_workspace(tmp_path / name) for name in ("lost", "1st", "2nd")]
    put_extractor(lost)
    put_extractor(first, seed=1)
    open_in_domain(config, lost, *splits(lost), CPU)
    shutil.rmtree(tmp_path / "mlartifacts")
    mine = open_in_domain(config, first, *splits(first), CPU)
    assert open_in_domain(config, second, *splits(second), CPU).fingerprint == mine.fingerprint


def test_extractor_of_other_data_is_not_used(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    workspace = small_workspace(tmp_path / "run")
    put_extractor(workspace)
    before = open_in_domain(config, workspace, *splits(workspace), CPU)
    small_workspace(tmp_path / "run", invert=True)
    after = open_in_domain(config, workspace, *splits(workspace), CPU)
    assert after.facts["data_fingerprint"] == open_dataset(workspace).fingerprint
    assert after.fingerprint != before.fingerprint
