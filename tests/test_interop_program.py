"""A checkpoint goes to diffusers and comes back the same, by the program's commands."""

from __future__ import annotations

from pathlib import Path

import torch
from program import TINY, ddpm, write_params
from safetensors.torch import load_file


def test_export_import_and_a_warm_start_keep_the_weights(tmp_path: Path) -> None:
    write_params(
        tmp_path,
        TINY.replace(
            "channels: 8, multipliers: [1], blocks: 1, attention: [8]",
            "channels: 128, multipliers: [1, 1], blocks: 1, attention: [4], dropout: 0.1",
        ).replace("steps: 12", "steps: 3"),
    )
    ddpm(tmp_path, "prepare")
    ddpm(tmp_path, "train")
    ddpm(tmp_path, "export-diffusers", "there")
    assert (tmp_path / "there" / "model_index.json").is_file()
    said = ddpm(tmp_path, "import-diffusers", "there", "back")
    assert "train.init" in said and "'dropout': 0.1" in said
    average = load_file(tmp_path / "workspace/snapshots/step-00000003/ema-0.9.safetensors")
    back = load_file(tmp_path / "back/model.safetensors")
    assert set(back) == set(average)
    assert all(torch.allclose(back[name], average[name], atol=1e-6) for name in back)
    said = ddpm(tmp_path, "train", "-S", "train.init=back", "-S", "train.steps=1")
    assert "train.init: None -> back" in said
    assert "exists already" in ddpm(tmp_path, "import-diffusers", "there", "back", status=1)
