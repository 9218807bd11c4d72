"""The commands export and import-diffusers keep networks unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from safetensors.torch import load_file
from support.program import TINY, ddpm, write_params

from ddpm_core.models.config import DETAILS
from ddpm_core.storage import seal
from ddpm_core.storage.workspace import step_name

NETWORK = "channels: 8, multipliers: [1], blocks: 1, attention: [8]"


def snapshot(folder: Path, step: int) -> Path:
    return folder / "workspace/snapshots" / step_name(step)


def network(folder: Path, step: int) -> dict[str, Any]:
    described: dict[str, Any] = json.loads((snapshot(folder, step) / "config.json").read_text())
    return described["network"]


def test_export_import_and_warm_start_keep_the_weights(tmp_path: Path) -> None:
    own = "channels: 16, multipliers: [1, 2], blocks: 1, attention: [4], dropout: 0.1"
    write_params(tmp_path, TINY.replace(NETWORK, own).replace("steps: 12", "steps: 3"))
    ddpm(tmp_path, "prepare")
    ddpm(tmp_path, "train")
    ddpm(tmp_path, "export", "there")
    assert (tmp_path / "there" / "model_index.json").is_file()
    output = ddpm(tmp_path, "import-diffusers", "there", "back")
    assert "train.init" in output and "'dropout': 0.1" in output and "'variance': 'large'" in output
    average = load_file(tmp_path / "workspace/snapshots/step-00000003/ema-0.9.safetensors")
    back = load_file(tmp_path / "back/model.safetensors")
    assert set(back) == set(average)
    assert all(torch.allclose(back[name], average[name], atol=1e-6) for name in back)
    output = ddpm(tmp_path, "train", "-S", "train.init=back", "-S", "train.steps=1")
    assert "train.init: None -> back" in output
    assert "already exists" in ddpm(tmp_path, "import-diffusers", "there", "back", status=1)


@pytest.mark.slow
def test_imported_network_keeps_its_details_in_training(tmp_path: Path) -> None:
    """Padding, time embedding and norms are not settings, and survive resuming."""
    their = UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        block_out_channels=(32, 48),
        norm_num_groups=16,
        layers_per_block=1,
        down_block_types=("AttnDownBlock2D", "AttnDownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D"),
    )
    DDPMPipeline(their, DDPMScheduler()).save_pretrained(tmp_path / "theirs")
    own = "channels: 32, multipliers: [1, 1.5], blocks: 1, attention: [8, 4]"
    process = "{prediction: noise, schedule: linear}"
    given = TINY.replace(NETWORK, own).replace("{timesteps: 50}", process)
    write_params(tmp_path, given)
    ddpm(tmp_path, "prepare")
    ddpm(tmp_path, "import-diffusers", "theirs", "imported")
    for init, steps in (("imported", 1), ("imported", 2), ("theirs", 1)):
        ddpm(tmp_path, "train", "-S", f"train.init={init}", "-S", f"train.steps={steps}")
        ddpm(tmp_path, "export", f"{init}-{steps}")
        back = UNet2DModel.from_pretrained(tmp_path / f"{init}-{steps}" / "unet")
        plain = json.loads(json.dumps(dict(their.config)))
        same = {name: value for name, value in plain.items() if not name.startswith("_")}
        assert {name: back.config[name] for name in same} == same


def test_run_of_an_earlier_version_keeps_its_network(tmp_path: Path) -> None:
    """Without a recorded number, the groups of norms differ from layer to layer."""
    write_params(tmp_path, TINY.replace(NETWORK, NETWORK.replace("[1]", "[1, 2]")))
    ddpm(tmp_path, "prepare")
    ddpm(tmp_path, "train", "-S", "train.steps=1")
    assert network(tmp_path, 1)["norm_num_groups"] == 2
    folder = snapshot(tmp_path, 1)
    settings = json.loads((folder / "config.json").read_text())
    for name in DETAILS:
        del settings["network"][name]
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "manifest.json").unlink()
    seal(folder)
    assert "resuming from step 1" in ddpm(tmp_path, "train", "-S", "train.steps=2")
    assert network(tmp_path, 2)["norm_num_groups"] is None
    ddpm(tmp_path, "sample", "-S", "sample.checkpoints=latest", "-S", "train.steps=2")
    assert "cannot be exported" in ddpm(tmp_path, "export", "out", status=1)


def test_bare_network_is_imported_with_its_process(tmp_path: Path) -> None:
    UNet2DModel(
        sample_size=8,
        block_out_channels=(32,),
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
    ).save_pretrained(tmp_path / "bare")
    output = ddpm(tmp_path, "import-diffusers", "bare", "own", status=1)
    assert "Give --schedule, --timesteps, --prediction as the network was trained" in output
    process = "--schedule", "linear", "--timesteps", "1000", "--prediction"
    output = ddpm(tmp_path, "import-diffusers", "bare", "own", *process, "sound", status=1)
    assert "diffusion.prediction: got 'sound'" in output
    ddpm(tmp_path, "import-diffusers", "bare", "own", *process, "noise")
    assert (tmp_path / "own" / "model.safetensors").is_file()
