"""Moments of the training images: measured when a run starts, and stored with every network."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from faults.attempt import together
from safetensors.torch import load_file, save_file
from support.digits_workspace import digits, put_data
from support.models import spoil, write_checkpoint
from support.program import TINY, ddpm, new_run, prepare_run, settings
from support.runs import bits, final, rows
from support.served_models import OWN, drawn

from ddpm_core.checkpoint import MOMENTS, Checkpoint
from ddpm_core.config import Diffusion
from ddpm_core.config import load as params
from ddpm_core.data.dataset import PackedDataset, open_dataset
from ddpm_core.diffusion.moments import Moments
from ddpm_core.diffusion.objective import ADAPTIVE_METHODS
from ddpm_core.diffusion.predictions import PREDICTIONS, WITH_MOMENTS, make_prediction
from ddpm_core.diffusion.process import make_schedule
from ddpm_core.diffusion.weightings import WEIGHTINGS
from ddpm_core.errors import Corrupt, UserError
from ddpm_core.interop.checkpoints import import_checkpoint
from ddpm_core.interop.diffusers import export_folder
from ddpm_core.models.config import UNetConfig
from ddpm_core.models.unet import UNet
from ddpm_core.registry.package import write_checkpoint as write_package
from ddpm_core.registry.serving import Served
from ddpm_core.runtime.distributed import World
from ddpm_core.sampling.loading import load_moments
from ddpm_core.storage import seal
from ddpm_core.storage.workspace import Workspace
from ddpm_core.training.init import initial_weights, network_config
from ddpm_core.training.moments import measure, run_moments, uses_pca

CPU = torch.device("cpu")
WIENER = TINY.replace("timesteps: 50", "timesteps: 50, prediction: wiener")


def dataset(root: Path, count: int = 600) -> PackedDataset:
    """Return `count` digits of 8x8 pixels as a training split."""
    images, labels = digits(8)
    workspace = Workspace.open(str(root))
    put_data(workspace, images[: count + 10], labels[: count + 10], held_out=10)
    return open_dataset(workspace)


def seen(data: PackedDataset) -> np.ndarray:
    """Return the images as the network sees them, float64 (N, 64)."""
    return (np.asarray(data.images) / 127.5 - 1.0).reshape(len(data), -1)


def full_covariance(moments: Moments) -> np.ndarray:
    unit = torch.eye(64, dtype=torch.float64).view(64, 1, 8, 8)
    z = moments.coordinates(unit).flatten(1)
    return (z * moments.variances.double().flatten() @ z.T).numpy()


# Measured


@pytest.mark.parametrize("flip", [False, True])
def test_principal_moments_are_those_of_the_images(tmp_path: Path, flip: bool) -> None:
    data = dataset(tmp_path)
    x = seen(data)
    if flip:
        mirrored = x.reshape(-1, 8, 8)[:, :, ::-1].reshape(x.shape)
        x = np.concatenate([x, mirrored])
    moments = measure(data, flip)
    assert moments.basis.shape == (64, 64)
    assert np.allclose(moments.mean.flatten(), x.mean(0), atol=1e-6)
    # The borders of digits never change; their variance is that of rounding to 8 bits.
    assert np.allclose(full_covariance(moments), np.cov(x.T, bias=True), atol=1e-5)


@pytest.mark.parametrize("flip", [False, True])
def test_few_images_have_the_variances_of_their_dct(tmp_path: Path, flip: bool) -> None:
    """With fewer images than values, every direction still has a plausible variance."""
    data = dataset(tmp_path, count=60)
    x = torch.from_numpy(seen(data)).view(-1, 1, 8, 8)
    x = torch.cat([x, x.flip(3)]) if flip else x
    moments = measure(data, flip)
    assert moments.basis.shape == (1, 1)
    assert torch.allclose(moments.mean.double(), x.mean(0), atol=1e-6)
    z = moments.coordinates(x - x.mean(0))
    assert torch.allclose(moments.variances.double(), z.square().mean(0), atol=1e-5)
    assert int((moments.variances < 1e-5).sum()) < 8
    assert np.linalg.matrix_rank(np.cov(seen(data).T)) < 60


@pytest.mark.parametrize(
    ("images", "values", "pca"),
    [(50_000, 768, True), (50_000, 769, False), (1536, 768, True), (1535, 768, False)],
)
def test_principal_components_require_enough_images(images: int, values: int, pca: bool) -> None:
    assert uses_pca(images, values) is pca


def test_config_knows_which_noise_levels_use_moments() -> None:
    def measures(given: str) -> bool:
        return params.load(None, [given]).measures_moments

    weightings = {w for w in WEIGHTINGS if measures(f"train.loss.weighting={w}")}
    adaptive = {
        method
        for method in ADAPTIVE_METHODS
        if method != "replay" and measures(f"train.timesteps.adaptive={method}")
    }
    assert (weightings, adaptive) == ({"edm"}, {"wiener_gate"})


def test_config_knows_which_predictions_use_moments() -> None:
    used = {name for name in PREDICTIONS if Diffusion(prediction=name).uses_moments}
    assert used == set(WITH_MOMENTS)


@pytest.mark.parametrize("count", [60, 600])
def test_new_network_is_the_linear_denoiser(tmp_path: Path, count: int) -> None:
    """Its error on the images is below that of any other linear function of the same basis."""
    config = params.load(None, ["diffusion.prediction=wiener", "prepare.image_size=8"])
    data = dataset(tmp_path, count)
    moments = run_moments(config, data, World(0, 1, CPU))
    assert moments is not None
    model = UNet(network_config(config, data)).eval()
    initial_weights(model, config)
    t = torch.tensor([0, 500, 999])
    x = torch.linspace(-1, 1, 3 * 64).view(3, 1, 8, 8)
    with torch.no_grad():
        output = model(x, t)
    assert not output.any()
    alpha_bar = make_schedule("cosine", 1000).alphas_bar[t].view(-1, 1, 1, 1)
    variances = moments.variances.double()
    gain = variances * alpha_bar.sqrt() / (variances * alpha_bar + 1 - alpha_bar)
    z = moments.coordinates(x.double() - alpha_bar.sqrt() * moments.mean)
    linear = moments.mean + moments.images(gain * z)
    found = make_prediction("wiener", moments).to_x0(output, x, alpha_bar)
    assert torch.allclose(found.double(), linear, atol=1e-5)


# Runs


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_run(tmp_path_factory.mktemp("prepared"), WIENER)


@pytest.fixture(scope="module")
def whole(prepared: Path) -> Path:
    folder = new_run(prepared, "whole", WIENER)
    ddpm(folder, "train")
    return folder


def snapshot(folder: Path, step: int = 12) -> Path:
    return folder / f"workspace/snapshots/step-{step:08d}"


def test_resumed_run_has_the_same_moments_and_weights(prepared: Path, whole: Path) -> None:
    folder = new_run(prepared, "resumed", WIENER)
    ddpm(folder, "train", *settings("train.steps=8"))
    assert (snapshot(folder, 8) / MOMENTS).is_file()
    ddpm(folder, "train")
    assert bits(final(folder, 12)) == bits(final(whole, 12))


@pytest.mark.slow
def test_resuming_reads_the_moments_of_the_snapshot(prepared: Path) -> None:
    folder = new_run(prepared, "changed", WIENER)
    ddpm(folder, "train", *settings("train.steps=8"))
    file = snapshot(folder, 8) / MOMENTS
    changed = {name: 0.5 * tensor for name, tensor in load_file(file).items()}
    save_file(changed, file)
    (snapshot(folder, 8) / "manifest.json").unlink()
    seal(snapshot(folder, 8))
    ddpm(folder, "train")
    assert torch.equal(load_file(snapshot(folder) / MOMENTS)["mean"], changed["mean"])


@pytest.mark.parametrize(
    "chosen", ["train.loss.weighting=edm", "train.timesteps.adaptive=wiener_gate"]
)
def test_noise_levels_measure_moments_once(prepared: Path, chosen: str) -> None:
    """A resumed run reads them from its snapshot; a network that draws with v needs none."""
    folder = new_run(prepared, chosen.rpartition("=")[2], WIENER)
    given = settings("diffusion.prediction=v", "train.snapshot_every=4", chosen)
    ddpm(folder, "train", *given)
    before = bits(final(folder, 12))
    file = snapshot(folder, 8) / MOMENTS
    measured = load_file(file)
    data = open_dataset(Workspace.open(str(folder / "workspace")))
    assert torch.equal(measured["mean"], measure(data, flip=False).mean)
    ddpm(folder, "train", *given, "--from-step", "8")
    assert bits(final(folder, 12)) == before
    assert all(torch.equal(load_file(snapshot(folder) / MOMENTS)[n], measured[n]) for n in measured)
    checkpoint = Checkpoint.open(snapshot(folder))
    assert load_moments(checkpoint) is None
    assert MOMENTS not in checkpoint.used_files("auto")


@pytest.mark.slow
def test_two_workers_share_the_moments_of_one(prepared: Path, whole: Path) -> None:
    folder = new_run(prepared, "two", WIENER)
    together(folder, 2, "train")
    assert {row["world_size"] for row in rows(folder)} == {2}
    found, expected = (load_file(snapshot(where) / MOMENTS) for where in (folder, whole))
    assert found.keys() == {"mean", "variances", "basis"}
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_checkpoint_is_sampled_and_exported_by_name_only(whole: Path) -> None:
    assert "20 images" in ddpm(whole, "sample") or (whole / "workspace/samples").is_dir()
    said = ddpm(whole, "export", "exported", status=1)
    assert "diffusion.prediction: got 'wiener'; must be one of noise, x0, v" in said
    assert "draw the images with ddpm" in said
    assert not (whole / "exported").exists()


def test_rescaled_schedule_is_exported_by_name_only(prepared: Path) -> None:
    folder = new_run(prepared, "rescaled", WIENER)
    ddpm(folder, "train", *settings("diffusion.zero_terminal_snr=true", "diffusion.prediction=v"))
    ddpm(folder, "sample")
    said = ddpm(folder, "export", "exported", status=1)
    assert "diffusion.zero_terminal_snr: got true; must be false" in said


def test_imported_network_cannot_predict_with_moments(tmp_path: Path) -> None:
    model = UNet(UNetConfig(8, 3, 128, (1, 1), 1, (4,)))
    initial_weights(model, params.load())
    export_folder(
        model, Diffusion(schedule="cosine", timesteps=50, prediction="v"), tmp_path / "theirs"
    )
    shutil.rmtree(tmp_path / "theirs/scheduler")
    process = {"schedule": "cosine", "timesteps": 50, "prediction": "edm"}
    with pytest.raises(UserError, match="--prediction: got edm; must be noise, x0 or v"):
        import_checkpoint(tmp_path / "theirs/unet", tmp_path / "imported", process)


# Checkpoints and packages


@pytest.mark.parametrize("prediction", WITH_MOMENTS)
def test_registered_package_draws_the_same_images(tmp_path: Path, prediction: str) -> None:
    checkpoint = write_checkpoint(tmp_path / "step", prediction=prediction)
    write_package(checkpoint, {**OWN, "precision": "fp32"}, tmp_path / "package")
    package = Checkpoint.open(tmp_path / "package")
    assert package.checksums[MOMENTS] == checkpoint.checksums[MOMENTS]
    expected = drawn(checkpoint, 3, precision="fp32")
    assert np.array_equal(drawn(package, 3), expected)
    assert not np.array_equal(drawn(write_checkpoint(tmp_path / "v"), 3), expected)
    served = Served(tmp_path / "package")
    images = list(served.images(served.tasks([{"n": 3, "format": "array"}])))
    found = np.array([image["image"] for image in images])
    assert np.abs(found - expected.astype(int)).max() <= 1


def test_checkpoint_without_its_moments_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "step", prediction="wiener").folder
    for name in (MOMENTS, "manifest.json"):
        (folder / name).unlink()
    seal(folder)
    with pytest.raises(Corrupt, match=f"its manifest does not list {MOMENTS}"):
        load_moments(Checkpoint.open(folder))
    with pytest.raises(Corrupt, match=MOMENTS):
        Served(folder)


def test_moments_of_other_images_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "step", prediction="wiener").folder
    wrong = {**load_file(folder / MOMENTS), "basis": torch.eye(63)}
    save_file(wrong, folder / MOMENTS)
    (folder / "manifest.json").unlink()
    seal(folder)
    with pytest.raises(Corrupt, match=r"basis has shape \(63, 63\); must be \(64, 64\)"):
        load_moments(Checkpoint.open(folder))


def test_moments_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "step", prediction="edm").folder
    spoil(folder, float("nan"))
    with pytest.raises(Corrupt, match="values that are not finite"):
        load_moments(Checkpoint.open(folder))
