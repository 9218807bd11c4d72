"""Power-function averages of a run, and samples of a width that is reconstructed from them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faults.attempt import together
from safetensors.torch import load_file
from support.program import TINY, ddpm, new_run, prepare_run, settings
from support.runs import Tensors, bits, distance, final, of_file
from support.scored import row

from ddpm_core.checkpoint import Checkpoint, open_checkpoint, with_earlier
from ddpm_core.config import load as params
from ddpm_core.errors import UserError
from ddpm_core.registry.package import write_checkpoint as write_package
from ddpm_core.registry.register import scored_checkpoint
from ddpm_core.registry.serving import Served
from ddpm_core.storage.workspace import Workspace, snapshot_key
from ddpm_core.training.init import open_origin

STEPS = 24
SETTINGS = (
    TINY.replace("batch_size: 8", "batch_size: 7\n  precision: fp32\n  reduction: exact", 1)
    .replace("grid: 4", "grid: 0")
    .replace("steps: 12", f"steps: {STEPS}")
    .replace("ema: [0.9]", "ema: [power:0.05, power:0.10]")
)
STORED = ("ema-power-0.05", "ema-power-0.1")
WIDTH = ("sample.ema=0.07", "sample.precision=fp32")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = prepare_run(tmp_path_factory.mktemp("power"), SETTINGS)
    ddpm(folder, "train")
    return folder


def opened(folder: Path, step: int = STEPS, ema: float = 0.07) -> Checkpoint:
    workspace = Workspace.open(str(folder / "workspace"))
    return with_earlier(workspace, open_checkpoint(workspace, step), ema, fetch=True)


def manifest(folder: Path, step: int = STEPS) -> dict[str, Any]:
    file = folder / f"workspace/samples/step-{step:08d}/manifest.json"
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def weights(tensors: dict[str, torch.Tensor]) -> Tensors:
    return {f"weights/{name}": tensor.numpy() for name, tensor in tensors.items()}


def renamed(found: Tensors, file: str) -> Tensors:
    return {n.replace(f"{file}/", "weights/"): array for n, array in of_file(found, file).items()}


@pytest.mark.slow
def test_resumed_run_on_two_workers_has_the_same_averages(trained: Path) -> None:
    folder = new_run(trained, "resumed", SETTINGS)
    ddpm(folder, "train", *settings("train.steps=7"))
    together(folder, 2, "train")
    expected = bits(final(trained, STEPS))
    assert {name.partition("/")[0] for name in expected} >= {*STORED, "model", "optimizer"}
    assert bits(final(folder, STEPS)) == expected


@pytest.mark.slow
def test_reconstructed_width_is_near_the_average_kept_directly(trained: Path) -> None:
    folder = new_run(trained, "direct", SETTINGS.replace("ema: [", "ema: [power:0.07, "))
    ddpm(folder, "train")
    found = final(folder, STEPS)
    assert bits(of_file(found)) == bits(of_file(final(trained, STEPS)))
    direct = renamed(found, "ema-power-0.07")
    checkpoint = opened(trained)
    assert [part.step for part in checkpoint.earlier] == [6, 12, 18]
    # Relative to how far the run moved after its first snapshot.
    start = renamed(final(trained, 6), "model")
    near = distance(weights(checkpoint.tensors(0.07)), direct, start)
    others = [distance(renamed(found, name), direct, start) for name in STORED]
    assert near < 0.01 < 0.03 < min(others), (near, others)


def test_width_of_a_stored_average_is_its_file(trained: Path) -> None:
    checkpoint = opened(trained, ema=0.1)
    assert checkpoint.earlier == ()
    file = trained / f"workspace/snapshots/step-{STEPS:08d}/ema-power-0.1.safetensors"
    expected = load_file(file)
    for ema in (0.1, 0.05, "auto"):
        equal = [torch.equal(t, expected[n]) for n, t in checkpoint.tensors(ema).items()]
        assert all(equal) == (ema == 0.1)
    assert checkpoint.weights_name("auto") == "ema-power-0.05.safetensors"


@pytest.mark.slow
def test_samples_are_identified_by_their_width(trained: Path) -> None:
    ddpm(trained, "sample", *settings(*WIDTH))
    found = manifest(trained)
    assert found["sampler"]["ema"] == 0.07
    assert found["weights"] == opened(trained).weights_hash(0.07)
    assert "up to date" in ddpm(trained, "sample", *settings(*WIDTH))
    ddpm(trained, "sample", *settings(*WIDTH, "sample.ema=0.08"))
    other = manifest(trained)
    assert other["samples_fingerprint"] != found["samples_fingerprint"]
    assert other["weights"] != found["weights"]
    # The first two milestones alone do not represent a width of 0.13.
    ddpm(trained, "sample", *settings(*WIDTH, "sample.ema=0.13"))
    assert manifest(trained, 18)["sampler"]["ema"] == 0.13
    assert manifest(trained, 6)["sampler"]["ema"] == 0.08


def test_package_and_export_have_the_reconstructed_weights(trained: Path, tmp_path: Path) -> None:
    checkpoint = opened(trained)
    expected = checkpoint.tensors(0.07)
    write_package(checkpoint, {"ema": 0.07, "seed": 5, "precision": "fp32"}, tmp_path / "package")
    package = Checkpoint.open(tmp_path / "package")
    assert package.params.sample.ema == 0.07
    assert set(package.checksums) == {"config.json", "ema-power-0.07.safetensors"}
    given = package.tensors(package.params.sample.ema)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in given.items())
    assert len(list(Served(tmp_path / "package").images([]))) == 0
    started = open_origin(params.load(None, [f"train.init={tmp_path / 'package'}"])).weights
    assert all(torch.equal(tensor, expected[name]) for name, tensor in started.items())
    ddpm(trained, "export", "there", *settings(*WIDTH))
    ddpm(trained, "import-diffusers", "there", "back")
    back = load_file(trained / "back/model.safetensors")
    assert all(torch.allclose(back[name], expected[name], atol=1e-6) for name in back)


def test_registering_requires_the_files_of_the_width(trained: Path) -> None:
    workspace = Workspace.open(str(trained / "workspace"))
    own, earlier = (opened(trained, step).weights_hash(0.07) for step in (STEPS, 12))
    sampled = {"ema": 0.07, "steps": 4}
    guide = {"step": 12, "weights": earlier}
    scored = row(5.0, weights=own, sampler=sampled, guide=guide).model_copy(update={"step": STEPS})
    found = scored_checkpoint(workspace, scored)
    expected = opened(trained).tensors(0.07)
    assert found.guide is not None and [part.step for part in found.guide.earlier] == [6]
    assert all(torch.equal(t, expected[n]) for n, t in found.tensors(0.07).items())
    for wrong in ({"weights": "changed"}, {"guide": {**guide, "weights": "changed"}}):
        evidence = scored.evidence.model_copy(update=wrong)
        with pytest.raises(UserError, match="changed"):
            scored_checkpoint(workspace, scored.model_copy(update={"evidence": evidence}))


def test_damaged_earlier_average_stops_the_sampling(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    workspace = Workspace.open(str(folder / "workspace"))
    shutil.copytree(trained / "workspace", folder / "workspace", ignore=_no_samples)
    (folder / "params.yaml").write_text(SETTINGS)
    file = workspace.path(snapshot_key(12)) / "ema-power-0.05.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    latest = settings(*WIDTH, "sample.checkpoints=latest")
    said = ddpm(folder, "sample", *latest, status=1)
    assert "step-00000012/ema-power-0.05.safetensors was changed or damaged" in said


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("train.ema=[0.99]",), r"must be one of train\.ema, \[0\.99\]; any width requires"),
        (("sample.ema=0.25",), r"sample\.ema: got 0\.25; must be a width that .* is 0\.145"),
        (("sample.ema=0.9",), "the averages up to step 800 represent; the nearest is 0.145"),
        (("train.ema=[power:0.05]",), "represent; the nearest is 0.05"),
        (("train.ema=[power:0.3]",), r"train\.ema\[0\]: got 'power:0\.3'; must be a decay"),
        (("train.ema=[power]",), r"must be a decay between 0 and 1, or a width from power:0\.01"),
        (("train.ema=[true]",), r"train\.ema\[0\]: got true; must be a decay"),
        (("train.ema=[power:0.1, power:0.10]",), "must not repeat a decay or width"),
        (("train.ema=[0.1, power:0.1]",), "must not repeat a decay or width"),
    ],
)
def test_impossible_widths_are_refused(given: tuple[str, ...], message: str) -> None:
    pair = ("train.ema=[power:0.05, power:0.10]", "sample.ema=0.07")
    config = params.load(None, pair)
    assert config.train.ema == ("power:0.05", "power:0.1") and config.train.widths == [0.05, 0.1]
    with pytest.raises(UserError, match=message):
        params.load(None, [*pair, *given])


def test_trained_checkpoint_refuses_other_widths(trained: Path) -> None:
    with pytest.raises(
        UserError, match=r"sample\.ema: got 0\.2; must be .* step 6 represent; the nearest is 0\.12"
    ):
        opened(trained, 6, 0.2)
    said = ddpm(trained, "sample", *settings("sample.ema=0.2"), status=1)
    assert "sample.ema: got 0.2; must be a width that the averages up to step 24" in said


def _no_samples(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name == "samples"]


def test_first_step_replaces_the_initial_weights(trained: Path) -> None:
    folder = new_run(trained, "short", SETTINGS)
    ddpm(folder, "train", *settings("train.steps=1"))
    found = final(folder, 1)
    for name in STORED:
        for key, array in renamed(found, name).items():
            assert np.array_equal(array, renamed(found, "model")[key])
