"""Guidance away from an earlier checkpoint of the run: sample.guide."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.models import spoil, write_checkpoint
from support.program import TINY, ddpm, new_run, prepare_run, settings
from support.scored import row
from support.served_models import OWN

from ddpm_core.checkpoint import GUIDE, Checkpoint
from ddpm_core.config import load as params
from ddpm_core.errors import Corrupt, UserError
from ddpm_core.registry.package import write_checkpoint as write_package
from ddpm_core.registry.register import with_guide
from ddpm_core.registry.serving import Served
from ddpm_core.sampling.loading import load_guide
from ddpm_core.sampling.plan import chosen_steps, guide_step
from ddpm_core.sampling.sampler import ImageSampler
from ddpm_core.storage import seal
from ddpm_core.storage.workspace import Workspace, snapshot_key

CPU = torch.device("cpu")
GUIDED = ("sample.guide=auto", "sample.guidance=2", "sample.precision=fp32")


def pair(root: Path) -> Checkpoint:
    """Return a checkpoint of step 8 whose guide is the one of step 4."""
    guide = write_checkpoint(root / "earlier", seed=1, step=4)
    return replace(write_checkpoint(root / "later", seed=2, step=8), guide=guide)


def drawn(checkpoint: Checkpoint, guidance: float, guided: bool = True) -> np.ndarray:
    given = {"guidance": guidance, "guide": 4, "precision": "fp32", **OWN}
    sample = checkpoint.params.sample.model_copy(update=given)
    guide = load_guide(checkpoint, 0.9, CPU) if guided else None
    model, diffusion = checkpoint.load(0.9, CPU), checkpoint.params.diffusion
    data = checkpoint.training_data
    return ImageSampler(model, data, sample, diffusion, guide=guide).images(range(3))


# The output


def test_output_is_extrapolated_away_from_the_guide(tmp_path: Path) -> None:
    """Output = guide + g (main - guide), for a network without a condition."""
    checkpoint = pair(tmp_path)
    model, guide = checkpoint.load(0.9, CPU), load_guide(checkpoint, 0.9, CPU)
    assert guide is not None
    sample = checkpoint.params.sample.model_copy(update={"guidance": 3.0, "precision": "fp32"})
    x, t = torch.linspace(-1, 1, 128).view(2, 1, 8, 8), torch.tensor([30, 30])
    expected = guide(x, t) + 3.0 * (model(x, t) - guide(x, t))
    data, diffusion = checkpoint.training_data, checkpoint.params.diffusion
    sampler = ImageSampler(model, data, sample, diffusion, guide=guide)
    with torch.no_grad():
        assert torch.allclose(sampler._guided(x, t, None), expected, atol=1e-5)


def test_scale_1_and_equal_guide_change_nothing(tmp_path: Path) -> None:
    checkpoint = pair(tmp_path)
    plain = drawn(checkpoint, 1.0, guided=False)
    assert np.array_equal(drawn(checkpoint, 1.0), plain)
    same = replace(checkpoint, guide=replace(checkpoint))
    assert np.abs(drawn(same, 3.0).astype(int) - plain).max() <= 1
    assert np.abs(drawn(checkpoint, 3.0).astype(int) - plain).max() > 10


# The choice


@pytest.mark.parametrize(
    ("step", "expected"), [(400, 200), (600, 200), (800, 200), (1000, 200), (1600, 400)]
)
def test_auto_is_the_milestone_nearest_to_a_quarter(step: int, expected: int) -> None:
    config = params.load(None, [*GUIDED, "train.milestone_every=200", "train.steps=1600"])
    assert guide_step(config, [*range(200, 1601, 200), 50, 350], step) == expected


def test_steps_without_an_earlier_checkpoint_are_refused() -> None:
    config = params.load(None, GUIDED)
    with pytest.raises(UserError, match="there is no milestone before step 200"):
        guide_step(config, [200, 400], 200)
    config = params.load(None, [*GUIDED, "sample.guide=300"])
    with pytest.raises(UserError, match=r"got 300; must be .* before step 800 \(available: 200\)"):
        guide_step(config, [200, 800], 800)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("sample.guidance=1",), r"sample\.guidance: got 1\.0; must not be 1 with a guide"),
        (("train.milestone_every=800",), r"sample\.guide: got 'auto'; requires a milestone before"),
        (("sample.checkpoints=[200, 800]",), "requires a milestone before step 200"),
        (("sample.guide=800",), r"sample\.guide: got 800; must be below 800"),
        (("sample.guide=200", "sample.checkpoints=[200]"), "must be below 200"),
        (("sample.guide=earlier",), r"sample\.guide: got 'earlier'"),
    ],
)
def test_impossible_guides_are_refused_by_the_settings(
    given: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        params.load(None, [*GUIDED, *given])
    assert params.load(None, GUIDED).sample.guide == "auto"


# Runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without conditions, with milestones at steps 6 and 12."""
    folder = prepare_run(tmp_path_factory.mktemp("guided"), TINY)
    ddpm(folder, "train")
    return folder


def copy_of(trained: Path, name: str) -> Path:
    folder = new_run(trained, name, TINY)
    shutil.copytree(trained / "workspace/snapshots", folder / "workspace/snapshots")
    return folder


def manifest(folder: Path) -> dict[str, object]:
    file = folder / "workspace/samples/step-00000012/manifest.json"
    found: dict[str, object] = json.loads(file.read_text())
    return found


def test_guided_samples_name_their_guide(trained: Path) -> None:
    ddpm(trained, "sample", *settings("sample.checkpoints=latest"))
    plain = manifest(trained)
    assert "guide" not in plain
    # The milestone of step 6 has none before it, so `all` leaves it out.
    ddpm(trained, "sample", *settings(*GUIDED))
    assert [p.name for p in (trained / "workspace/samples").iterdir()] == ["step-00000012"]
    guided, earlier = (
        manifest(trained),
        Checkpoint.open(trained / "workspace/snapshots/step-00000006"),
    )
    assert guided["guide"] == {"step": 6, "weights": earlier.weights_hash()}
    assert guided["samples_fingerprint"] != plain["samples_fingerprint"]
    assert "up to date" in ddpm(trained, "sample", *settings(*GUIDED))
    workspace = Workspace.open(str(trained / "workspace"))
    config = params.load(trained / "params.yaml", GUIDED)
    assert chosen_steps(config, workspace) == [12]


def test_guide_with_other_weights_repeats_the_sampling(trained: Path) -> None:
    folder = copy_of(trained, "other")
    ddpm(folder, "sample", *settings(*GUIDED))
    before = manifest(folder)["samples_fingerprint"]
    spoil(folder / "workspace/snapshots/step-00000006", 0.5)
    assert "up to date" not in ddpm(folder, "sample", *settings(*GUIDED))
    assert manifest(folder)["samples_fingerprint"] != before


def test_run_without_an_earlier_milestone_is_refused(trained: Path) -> None:
    folder = copy_of(trained, "single")
    shutil.rmtree(folder / "workspace/snapshots/step-00000006")
    said = ddpm(folder, "sample", *settings(*GUIDED), status=1)
    assert "sample.guide: got auto, but there is no milestone before step 12" in said


# Registered models


def test_package_contains_the_guide_and_serves_with_it(tmp_path: Path) -> None:
    checkpoint = pair(tmp_path)
    sampled = {**OWN, "guide": "auto", "guidance": 3.0, "precision": "fp32"}
    write_package(checkpoint, sampled, tmp_path / "package")
    package = Checkpoint.open(tmp_path / "package")
    assert checkpoint.guide is not None
    assert package.checksums[GUIDE] == checkpoint.guide.weights_hash(0.9)
    served = Served(tmp_path / "package")
    for request, guidance in (({}, 3.0), ({"guidance": 1.0}, 1.0)):
        tasks = served.tasks([{"n": 3, "format": "array", **request}])
        found = np.array([image["image"] for image in served.images(tasks)])
        assert np.abs(found - drawn(checkpoint, guidance).astype(int)).max() <= 1


def test_package_without_its_guide_is_refused(tmp_path: Path) -> None:
    sampled = {**OWN, "guide": "auto", "guidance": 3.0}
    write_package(pair(tmp_path), sampled, tmp_path / "package")
    for name in (GUIDE, "manifest.json"):
        (tmp_path / "package" / name).unlink()
    seal(tmp_path / "package")
    with pytest.raises(Corrupt, match=f"its settings require {GUIDE}"):
        Served(tmp_path / "package")


def test_registering_requires_the_guide_of_the_score(tmp_path: Path) -> None:
    workspace = Workspace.open(str(tmp_path / "run"))
    for step in (4, 8):
        write_checkpoint(workspace.path(snapshot_key(step)), seed=step, step=step)
    earlier, later = (Checkpoint.open(workspace.path(snapshot_key(step))) for step in (4, 8))
    guide = {"step": 4, "weights": earlier.weights_hash()}
    found = with_guide(workspace, later, row(5.0, guide=guide))
    assert found.guide is not None and found.guide.step == 4
    assert with_guide(workspace, later, row(5.0)).guide is None
    for wrong in ({**guide, "weights": "changed"}, {**guide, "step": 2}):
        with pytest.raises(UserError, match=r"guided the samples .* is gone or has changed"):
            with_guide(workspace, later, row(5.0, guide=wrong))
