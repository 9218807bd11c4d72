"""Networks travel to diffusers and back, and what can't travel is refused with a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from ddpm_core import rng
from ddpm_core.diffusion.process import make_schedule
from ddpm_core.errors import UserError
from ddpm_core.interop.diffusers import WEIGHTS, export_folder, import_folder
from ddpm_core.models.unet import UNet, UNetConfig


def normals(name: str, shape: tuple[int, ...]) -> Tensor:
    key = rng.key(rng.Purpose.INIT, int.from_bytes(name.encode(), "big"))
    return rng.normal(key, torch.tensor([0]), shape)[0]


def randomised(network: Any) -> Any:
    """Every weight random, so that none of them can be lost or mistaken for another."""
    with torch.no_grad():
        for name, weight in network.named_parameters():
            spread = (2.0 / max(1, weight[0].numel())) ** 0.5 if weight.ndim > 1 else 0.1
            around = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            weight.copy_(around + spread * normals(name, tuple(weight.shape)))
    return network.eval()


def ours(**changes: Any) -> UNet:
    settings = {"image_size": 8, "in_channels": 3, "channels": 128, "multipliers": (1, 1)}
    return randomised(UNet(UNetConfig(**settings | {"blocks": 1, "attention": (4,)} | changes)))


def theirs(**changes: Any) -> UNet2DModel:
    """A small network in the layout of google/ddpm-cifar10-32."""
    settings = {
        "sample_size": 8,
        "block_out_channels": (128, 128),
        "layers_per_block": 1,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": None,
        "downsample_padding": 0,
        "flip_sin_to_cos": False,
        "freq_shift": 1,
        "norm_eps": 1e-6,
    }
    return randomised(UNet2DModel(**settings | changes))


def google_ddpm_cifar10() -> UNet2DModel:
    return theirs(
        sample_size=32,
        block_out_channels=(128, 256, 256, 256),
        layers_per_block=2,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    )


def saved(network: UNet2DModel, folder: Path, **scheduler: Any) -> Path:
    DDPMPipeline(network, DDPMScheduler(**scheduler)).save_pretrained(folder)
    return folder


def imported(folder: Path) -> UNet:
    config, weights, _ = import_folder(folder)
    network = UNet(config).eval()
    network.load_state_dict(weights)
    return network


def difference(own: UNet, their: UNet2DModel, **labels: Tensor) -> float:
    """The largest one between the outputs for the same images."""
    config = own.config
    shape = (2, config.in_channels, config.image_size, config.image_size)
    x, t = normals("images", shape), torch.tensor([7, 900])
    with torch.no_grad():
        expected = their(x, t, class_labels=labels.get("theirs")).sample
        output = own(x, t, labels.get("ours"))
    assert 0.1 < expected.std() < 100
    return float((output - expected).abs().max())


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# An imported network computes what diffusers computes


def test_the_layout_of_google_ddpm_cifar10_32_gives_the_same_output(tmp_path: Path) -> None:
    their = google_ddpm_cifar10()
    own = imported(saved(their, tmp_path))
    assert difference(own, their) < 1e-4
    assert sum(weight.numel() for weight in own.parameters()) == 35_746_307


def test_the_old_flat_layout_and_the_old_names_of_attention_are_read(tmp_path: Path) -> None:
    their = theirs()
    folder = saved(their, tmp_path)
    tensors = load_file(folder / "unet" / WEIGHTS)
    for new, old in (
        ("to_q", "query"),
        ("to_k", "key"),
        ("to_v", "value"),
        ("to_out.0", "proj_attn"),
    ):
        tensors = {name.replace(f".{new}.", f".{old}."): part for name, part in tensors.items()}
    save_file(tensors, folder / WEIGHTS)
    (folder / "unet" / WEIGHTS).unlink()
    (folder / "unet/config.json").rename(folder / "config.json")
    (folder / "scheduler/scheduler_config.json").rename(folder / "scheduler_config.json")
    assert difference(imported(folder), their) < 1e-4


@pytest.mark.parametrize("head_dim", [None, 32])
def test_one_head_or_several_give_the_same_output(tmp_path: Path, head_dim: int | None) -> None:
    their = theirs(attention_head_dim=head_dim)
    own = imported(saved(their, tmp_path))
    assert own.config.heads == (1 if head_dim is None else 4)
    assert difference(own, their) < 1e-4


def test_a_class_conditional_network_gets_a_mean_vector_for_no_class(tmp_path: Path) -> None:
    their = theirs(num_class_embeds=5)
    own = imported(saved(their, tmp_path))
    labels = torch.tensor([4, 0])
    assert own.config.classes == 5
    assert difference(own, their, ours=labels, theirs=labels) < 1e-4
    vectors = own.state_dict()["condition.embedding.weight"]
    assert torch.allclose(vectors[5], vectors[:5].mean(0))


LINEAR_100 = {"num_train_timesteps": 100, "beta_start": 1e-3, "beta_end": 0.2}
COSINE = {"beta_schedule": "squaredcos_cap_v2"}


@pytest.mark.parametrize(
    ("scheduler", "settings"),
    [
        ({}, ("linear", 1000, "noise")),
        (COSINE | {"prediction_type": "sample"}, ("cosine", 1000, "x0")),
        (LINEAR_100 | {"prediction_type": "v_prediction"}, ("linear", 100, "v")),
    ],
)
def test_the_process_is_read_from_the_scheduler(
    tmp_path: Path, scheduler: dict[str, Any], settings: tuple[str, int, str]
) -> None:
    read = import_folder(saved(theirs(), tmp_path, **scheduler))[2]
    assert read == dict(zip(("schedule", "timesteps", "prediction"), settings, strict=True))


# An exported network is one to diffusers


@pytest.mark.parametrize(("schedule", "timesteps"), [("linear", 1000), ("cosine", 100)])
def test_the_exported_folder_loads_and_gives_the_same_output(
    tmp_path: Path, schedule: str, timesteps: int
) -> None:
    own = ours(in_channels=1, dropout=0.1)
    export_folder(own, schedule, timesteps, "v", tmp_path / "new")
    pipeline = DDPMPipeline.from_pretrained(tmp_path / "new")
    assert difference(own, pipeline.unet.eval()) < 1e-4
    assert pipeline.scheduler.config.prediction_type == "v_prediction"
    alphas_bar = make_schedule(schedule, timesteps).alphas_bar.float()
    assert torch.allclose(pipeline.scheduler.alphas_cumprod, alphas_bar, rtol=1e-4, atol=1e-8)
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline(batch_size=2, num_inference_steps=2, output_type="np").images.shape[0] == 2


def test_export_and_import_give_back_every_weight(tmp_path: Path) -> None:
    own = ours(conditioning="class", classes=3, heads=4)
    export_folder(own, "cosine", 1000, "x0", tmp_path / "new")
    config, weights, settings = import_folder(tmp_path / "new")
    assert config == own.config
    assert settings == {"schedule": "cosine", "timesteps": 1000, "prediction": "x0"}
    for name, weight in own.state_dict().items():
        assert torch.equal(weights[name], weight), name


def test_a_class_conditional_export_says_how_labels_are_passed(tmp_path: Path) -> None:
    own = ours(conditioning="class", classes=3)
    notes = export_folder(own, "linear", 500, "noise", tmp_path)
    their = DDPMPipeline.from_pretrained(tmp_path).unet.eval()
    assert difference(own, their, ours=torch.tensor([2, 0]), theirs=torch.tensor([2, 0])) < 1e-4
    assert difference(own, their, theirs=torch.tensor([3, 3])) < 1e-4  # 3: no class
    assert "num_inference_steps=500" in notes[0]
    assert "label 3 is no class" in notes[1]


# What can't travel is refused, and nothing is left behind


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"channels": 32}, r"model.channels 32 the layers are normed in \[8, 16\] groups"),
        ({"multipliers": (1, 2), "heads": 2, "attention": (8,)}, "heads is 2 at layers of"),
        ({"multipliers": (2, 2)}, "first multiplier is 1"),
        ({"conditioning": "text"}, "conditioned on text"),
    ],
)
def test_a_network_that_diffusers_has_no_words_for_is_not_exported(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        export_folder(ours(**changes), "linear", 1000, "noise", tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_holds_something_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        export_folder(ours(), "linear", 1000, "noise", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_all_fields_of_another_network_are_named_at_once(tmp_path: Path) -> None:
    folder = saved(UNet2DModel(sample_size=8, block_out_channels=(32, 64, 64, 64)), tmp_path)
    with pytest.raises(UserError) as refused:
        import_folder(folder)
    for field in ("downsample_padding", "flip_sin_to_cos", "freq_shift", "norm_eps"):
        assert field in str(refused.value)


@pytest.mark.parametrize(
    ("file", "changes", "sentence"),
    [
        ("unet/config.json", {"norm_num_groups": 16}, "norm_num_groups is 16"),
        ("unet/config.json", {"block_out_channels": [128, 256]}, "shape"),
        ("unet/config.json", {"block_out_channels": None}, "damaged"),
        ("unet/config.json", {"sample_size": 7}, "multiple of 2"),
        ("unet/config.json", {"num_class_embeds": 3}, "lack class_embedding.weight"),
        ("unet/config.json", {"up_block_types": ["UpBlock2D", "UpBlock2D"]}, "mirror image"),
        ("scheduler/scheduler_config.json", {"beta_end": 0.012}, "beta_end is 0.012"),
        ("scheduler/scheduler_config.json", {"prediction_type": "flow"}, "'flow'"),
        ("scheduler/scheduler_config.json", {"rescale_betas_zero_snr": True}, "zero_snr"),
    ],
)
def test_what_is_not_ours_is_refused_with_its_name(
    tmp_path: Path, file: str, changes: dict[str, Any], sentence: str
) -> None:
    folder = saved(theirs(), tmp_path)
    edit(folder / file, **changes)
    with pytest.raises(UserError, match=sentence):
        import_folder(folder)


def test_pickles_are_never_read(tmp_path: Path) -> None:
    folder = tmp_path / "pipeline"
    DDPMPipeline(theirs(), DDPMScheduler()).save_pretrained(folder, safe_serialization=False)
    with pytest.raises(UserError, match="a pickle, which runs code"):
        import_folder(folder)


def test_damaged_and_absent_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no folder"):
        import_folder(tmp_path / "absent")
    with pytest.raises(UserError, match="no scheduler"):
        import_folder(tmp_path)
    folder = saved(theirs(), tmp_path / "pipeline")
    (folder / "unet" / WEIGHTS).write_bytes(b"\x00" * 64)
    with pytest.raises(UserError, match="is damaged"):
        import_folder(folder)
    (folder / "unet/config.json").write_text("{")
    with pytest.raises(UserError, match="is no JSON"):
        import_folder(folder)
