"""`ddpm export` and the folder for diffusers that `ddpm register` stores."""

from __future__ import annotations

import contextlib
import filecmp
import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from diffusers import DiffusionPipeline
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from support.mlflow_server import put_store
from support.models import write_checkpoint
from support.scored import row

from ddpm_core.checkpoint import GUIDE, Checkpoint
from ddpm_core.config import Config
from ddpm_core.config import load as params
from ddpm_core.diffusion.predictions import make_prediction
from ddpm_core.diffusion.process import make_schedule
from ddpm_core.errors import UserError
from ddpm_core.evaluation.grids import write_samples
from ddpm_core.models.unet import UNet
from ddpm_core.registry.export import export
from ddpm_core.registry.package import write_checkpoint as write_package
from ddpm_core.registry.register import register
from ddpm_core.registry.serving import Served
from ddpm_core.sampling.loading import load_moments
from ddpm_core.scores import Row
from ddpm_core.storage.workspace import RESULTS, Workspace, snapshot_key
from ddpm_core.tracking.client import connect
from ddpm_core.training.init import open_origin

STEP = 4
AVERAGE = "ema-0.9.safetensors"
FACTS = {"extractor": "in_domain", "space": "in_domain", "seed": 1, "reference_count": 6}


class Trained:
    """A workspace with a checkpoint of step 4 and one of step 8; only the first has scores."""

    def __init__(self, root: Path, conditioning: str = "none", **process: Any) -> None:
        self.workspace = Workspace.open(str(root / "run"))
        for step in (STEP, 2 * STEP):
            folder = self.workspace.path(snapshot_key(step))
            self.checkpoint = write_checkpoint(
                folder, conditioning, step, step, groups=4, **process
            )
        self.checkpoint = Checkpoint.open(self.workspace.path(snapshot_key(STEP)))
        self.uri = f"sqlite:///{root}/mlflow.db"
        self.put_score(5.25)

    def config(self, **sections: Any) -> Config:
        given = {"workspace": self.workspace.uri, "tracking": {"uri": self.uri}, "device": "cpu"}
        return params.validate({**given, "train": {"ema": [0.9]}, **sections})

    def put_score(self, score: float, **changes: Any) -> Row:
        """Write results.json, and the grid that belongs to it."""
        facts = {**FACTS, "weights": self.checkpoint.checksums[AVERAGE], "data": "feed"}
        facts["sampler"] = {"sampler": "ddim", "steps": 4, "ema": "auto"}
        named = {"step": STEP, "score_name": "fd_in_domain_500", "fd": score, "precision": 0.5}
        scored = row(score, **facts).model_copy(update={**named, **changes}).with_checksum()
        self.workspace.write_json(RESULTS, {"rows": [scored.plain()]})
        write_samples(self.workspace, STEP, np.full((4, 8, 8, 1), 200, np.uint8))
        return scored

    def export(self, folder: Path, kind: str = "diffusers", **options: Any) -> str:
        origin, step = options.pop("model", None), options.pop("step", None)
        return export(self.config(**options), folder, kind, origin, step)

    @property
    def network(self) -> UNet:
        return self.checkpoint.load("auto", torch.device("cpu"))


def run_program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the program in README.md as a user would; return its variables."""
    program = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert program
    variables: dict[str, Any] = {}
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars
        monkeypatch.chdir(folder)
        exec(program[1], variables)
    return variables


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def assert_same(one: Path, other: Path) -> None:
    assert files(one) == files(other)
    _, different, unread = filecmp.cmpfiles(one, other, files(one), shallow=False)
    assert not different and not unread


@pytest.mark.parametrize("conditioning", ["none", "class"])
def test_diffusers_loads_the_folder_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conditioning: str
) -> None:
    trained = Trained(tmp_path, conditioning)
    said = trained.export(tmp_path / "out")
    assert said.startswith(f"Exported step 4 to {tmp_path}/out as diffusers; fd_in_domain_500 5.25")
    assert files(tmp_path / "out") == {
        *("README.md", "grid.png", "scores.json", "model_index.json"),
        *("scheduler/scheduler_config.json", "unet/config.json"),
        "unet/diffusion_pytorch_model.safetensors",
    }
    images = run_program(tmp_path / "out", monkeypatch)["images"]
    assert [image.size for image in images] == [(8, 8)] * 4
    unet = DiffusionPipeline.from_pretrained(tmp_path / "out").unet.eval()
    x, t = torch.randn(3, 1, 8, 8), torch.tensor([0, 20, 49])
    labels = torch.tensor([0, 2, 3]) if conditioning == "class" else None
    theirs = unet(x, t, class_labels=labels).sample
    assert torch.allclose(trained.network(x, t, labels), theirs, atol=1e-4)


def test_readme_has_metadata_that_hugging_face_reads(tmp_path: Path) -> None:
    trained = Trained(tmp_path)
    trained.export(tmp_path / "out")
    card = ModelCard.load(tmp_path / "out/README.md")
    assert (card.data.library_name, card.data.license) == ("diffusers", None)
    assert card.data.pipeline_tag == "unconditional-image-generation"
    results = {result.metric_type: result.metric_value for result in card.data.eval_results or ()}
    assert results == {"fd_in_domain_500": 5.25, "precision_in_domain_500": 0.5}
    assert {r.dataset_revision for r in card.data.eval_results or ()} == {"feed"}
    assert "# license: cc-by-4.0\n---\n" in (tmp_path / "out/README.md").read_text()
    for text in ("![Images that this model generates](grid.png)", "500 images", "not an FID"):
        assert text in card.text, card.text
    scores = json.loads((tmp_path / "out/scores.json").read_text())
    assert (scores["score"], scores["evidence"]["count"]) == (5.25, 500)


def test_safetensors_load_as_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Trained(tmp_path, "text", prediction="wiener")
    trained.export(tmp_path / "out", "safetensors")
    run_program(tmp_path / "out", monkeypatch)
    assert {"0.png", "3.png"} <= files(tmp_path / "out")
    (tmp_path / "out/README.md").write_text("a license")  # may be edited
    origin = open_origin(trained.config(train={"init": str(tmp_path / "out")}))
    weights = trained.network.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in origin.weights.items())


def test_safetensors_of_a_version_keep_its_guide(tmp_path: Path) -> None:
    trained = Trained(tmp_path)
    later = Checkpoint.open(trained.workspace.path(snapshot_key(2 * STEP)))
    guided = replace(later, guide=trained.checkpoint)
    write_package(guided, {"ema": "auto", "guidance": 2.0}, tmp_path / "version")
    version = Checkpoint.open(tmp_path / "version")
    write_package(version, version.params.sample.model_dump(mode="json"), tmp_path / "again")
    assert Checkpoint.open(tmp_path / "again").checksums[GUIDE] == version.checksums[GUIDE]
    Served(tmp_path / "again")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("conditioning", "process"),
    [
        ("none", {}),
        ("class", {}),
        ("text", {}),
        ("text", {"cross_attention": True}),
        ("none", {"prediction": "edm"}),
        ("class", {"prediction": "wiener"}),
    ],
)
def test_onnx_computes_the_same_for_every_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conditioning: str, process: dict[str, Any]
) -> None:
    trained = Trained(tmp_path, conditioning, **process)
    trained.export(tmp_path / "out", "onnx")
    network = onnxruntime.InferenceSession(tmp_path / "out/model.onnx")
    for batch in (1, 2, 5):
        given = {"x": torch.randn(batch, 1, 8, 8), "t": torch.arange(batch) * 12}
        if conditioning == "class":
            given["condition"] = torch.arange(batch) % 4  # 3: no class
        if conditioning == "text":
            texts = torch.zeros(batch, 64, dtype=torch.uint8)
            texts[1:, :2] = torch.tensor([104, 105], dtype=torch.uint8)  # the first has no text
            given["condition"] = texts
        ours = trained.network(*given.values())
        if moments := load_moments(trained.checkpoint):
            alpha_bar = make_schedule("cosine", 50).alphas_bar[given["t"]]
            prediction = make_prediction(process["prediction"], moments)
            ours = prediction.to_x0(ours, given["x"], alpha_bar)
        theirs = network.run(None, {name: tensor.numpy() for name, tensor in given.items()})[0]
        assert np.allclose(ours.numpy(), theirs, atol=1e-4)
    images = run_program(tmp_path / "out", monkeypatch)["images"]
    assert images.shape == (4, 1, 8, 8) and images.dtype == np.uint8 and images.std() > 1


def test_safetensors_name_cross_attention(tmp_path: Path) -> None:
    trained = Trained(tmp_path, "text", cross_attention=True)
    trained.export(tmp_path / "out", "safetensors")
    assert json.loads((tmp_path / "out/config.json").read_text())["network"]["cross_attention"]
    weights = load_file(tmp_path / "out" / AVERAGE)
    assert "condition.null_token" in weights and "middle.0.cross.query.weight" in weights


def test_onnx_without_its_exporter_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(UserError, match=r"pip install 'ddpm-core\[onnx\]'"):
        Trained(tmp_path).export(tmp_path / "out", "onnx")
    assert not (tmp_path / "out").exists()


def test_scores_of_other_weights_are_not_exported(tmp_path: Path) -> None:
    trained = Trained(tmp_path)
    for number, options in enumerate(({"sample": {"ema": "none"}}, {"step": 2 * STEP})):
        said = trained.export(tmp_path / f"{number}", **options)
        assert "; these weights have no scores." in said
        assert not {"scores.json", "grid.png"} & files(tmp_path / f"{number}")
        assert "These weights have no scores." in (tmp_path / f"{number}/README.md").read_text()
    trained.workspace.write_json(RESULTS, {})
    assert "Exported step 8" in trained.export(tmp_path / "newest")


def test_edited_score_is_not_exported(tmp_path: Path) -> None:
    trained = Trained(tmp_path)
    edited = trained.put_score(5.25).plain() | {"score": 1.0}
    trained.workspace.write_json(RESULTS, {"rows": [edited]})
    with pytest.raises(UserError, match="was edited or damaged"):
        trained.export(tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "gguf"}, "--format: got 'gguf'; must be one of diffusers, safetensors, onnx"),
        ({"model": "models:/ddpm@x", "step": 4}, "--step and --model: got both"),
        ({"model": "ddpm"}, "--model: got 'ddpm'; must be models:/NAME/VERSION"),
        ({"model": "models:/ddpm/7"}, "version=7"),
        ({"step": 5}, r"no checkpoint of step 5 .*\(available: 4, 8\)"),
        ({}, "diffusion.prediction: got 'edm'; must be one of noise, x0, v"),
    ],
)
def test_what_cannot_be_exported_is_named(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    trained = Trained(tmp_path, prediction="edm")
    put_store(tmp_path / "mlflow.db")
    with pytest.raises(UserError, match=message):
        trained.export(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_export_does_not_overwrite_a_folder(tmp_path: Path) -> None:
    trained, mine = Trained(tmp_path), tmp_path / "mine"
    mine.mkdir()
    (mine / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="already exists and is not empty"):
        trained.export(mine)
    assert files(mine) == {"mine.txt"}


# Registered versions


@pytest.mark.slow
def test_version_stores_the_folder_that_export_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained, out = Trained(tmp_path), tmp_path / "out"
    put_store(tmp_path / "mlflow.db")
    registration = register(trained.config(), trained.workspace)
    stored = artifacts(trained, registration.version)
    trained.export(out / "run")
    trained.export(out / "version", model="models:/ddpm/1")
    trained.export(out / "champion", model="models:/ddpm@champion")
    for folder in (out / "version", out / "champion", stored / "diffusers"):
        assert_same(folder, out / "run")
    for name in ("scores.json", "grid.png"):  # a version of an earlier release
        (stored / name).unlink()
    said = trained.export(out / "earlier", "safetensors", model="models:/ddpm/1")
    assert "fd_in_domain_500 5.25" in said and not (out / "earlier/grid.png").exists()
    assert "no folder for diffusers" not in capsys.readouterr().err


def test_network_that_diffusers_lacks_is_registered_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = Trained(tmp_path, "text")
    put_store(tmp_path / "mlflow.db")
    for said in (1, 0):  # the second time, nothing is new
        registration = register(trained.config(), trained.workspace)
        printed = capsys.readouterr().err
        assert printed.count("has no folder for diffusers. model.conditioning: got text") == said
    stored = artifacts(trained, registration.version)
    assert registration.version == "1"
    assert {path.name for path in stored.iterdir()} == {
        *("README.md", "checkpoint", "grid.png", "scores.json"),
    }


def artifacts(trained: Trained, version: str) -> Path:
    folder = connect(trained.uri).get_model_version_download_uri("ddpm", version)
    return Path(folder.removeprefix("file://")) / "artifacts"
