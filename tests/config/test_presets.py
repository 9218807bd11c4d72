"""Presets are valid, match the published recipes, and explain every setting."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.program import ddpm

from ddpm_core.config import Config
from ddpm_core.config import load as params
from ddpm_core.config.template import presets, template
from ddpm_core.models.unet import UNet
from ddpm_core.runtime.device import choose_precision
from ddpm_core.training.init import network_config

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "ddpm_core" / "presets"
PRESETS = sorted(FOLDER.glob("*.yaml"))


def test_every_published_data_set_has_a_preset() -> None:
    expected = {"animals10", "cifar10", "digits", "dtd", "dtd-10", "sysu-shape"}
    assert expected <= {path.stem for path in PRESETS}


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_is_valid(path: Path) -> None:
    config = params.load(path)
    assert config.train.steps % config.train.milestone_every == 0
    assert config.train.milestone_every % config.train.snapshot_every == 0
    assert config.sample.count % config.sample.batch_size == 0


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_has_every_section_of_the_dvc_stages(path: Path) -> None:
    """dvc repro refuses a params.yaml in which a section is missing."""
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    named = {name for stage in stages.values() for name in stage["params"]}
    assert named <= set(yaml.safe_load(path.read_text()))


def test_the_digits_preset_equals_the_defaults() -> None:
    written = yaml.safe_load((FOLDER / "digits.yaml").read_text())
    assert params.load(FOLDER / "digits.yaml") == params.load(None)
    assert set(written) == set(Config().dump())


@pytest.mark.parametrize("preset", [None, *presets()])
def test_a_printed_params_file_explains_every_setting(preset: str | None, tmp_path: Path) -> None:
    file = tmp_path / "params.yaml"
    file.write_text(template(preset), encoding="utf-8")
    assert params.load(file) == params.load(FOLDER / f"{preset}.yaml" if preset else None)
    for line in file.read_text(encoding="utf-8").splitlines():
        assert not line or line.startswith("#") or line.partition("  # ")[2].strip(), line
    assert set(yaml.safe_load(file.read_text())) == set(Config().dump())


def test_params_yaml_equals_the_printed_template() -> None:
    assert (ROOT / "params.yaml").read_text(encoding="utf-8") == template()


def test_ddpm_params_prints_and_lists_presets(tmp_path: Path) -> None:
    assert ddpm(tmp_path, "params", "dtd-10") == template("dtd-10")
    assert "must be one of animals10, cifar10" in ddpm(tmp_path, "params", "cifar", status=1)
    assert "sysu-shape" in ddpm(tmp_path, "params", "--help")


def test_dtd_10_is_dtd_with_ten_classes() -> None:
    ten, all_classes = params.load(FOLDER / "dtd-10.yaml"), params.load(FOLDER / "dtd.yaml")
    published = "cracked crystalline fibrous grooved honeycombed marbled scaly studded veined woven"
    assert list(ten.prepare.classes or ()) == published.split()
    assert ten.prepare.model_copy(update={"classes": None}) == all_classes.prepare


def test_cifar10_is_the_published_recipe() -> None:
    """Ho et al. (2020), appendix B."""
    config = params.load(FOLDER / "cifar10.yaml")
    expected: dict[str, dict[str, Any]] = {
        "model": {"channels": 128, "multipliers": [1, 2, 2, 2], "attention": [16], "dropout": 0.1},
        "diffusion": {"schedule": "linear", "timesteps": 1000, "prediction": "noise"},
        "train": {"steps": 800_000, "batch_size": 128, "ema": [0.9999], "flip": True},
        "sample": {"sampler": "ddpm", "steps": 1000, "count": 50_000, "variance": "large"},
    }
    found = config.dump()
    for section, values in expected.items():
        assert {key: found[section][key] for key in values} == values
    optimizer = config.train.optimizer
    assert (optimizer.lr, optimizer.warmup, optimizer.clip) == (2e-4, 5000, 1.0)
    assert (optimizer.betas, optimizer.weight_decay) == ((0.9, 0.999), 0.0)
    assert (optimizer.schedule, config.train.loss.weighting) == ("constant", "uniform")
    assert not config.train.ema_warmup


def test_cifar10_uses_published_precision_and_neighbours() -> None:
    """fp32 on every device, and precision and recall of 3 neighbours as in tqch/ddpm-torch."""
    config = params.load(FOLDER / "cifar10.yaml")
    for setting in (config.train.precision, config.sample.precision):
        assert choose_precision(setting, torch.device("cuda")) == "fp32"
    assert config.evaluate.neighbours == 3


CLASSES = {"animals10": 10, "cifar10": 0, "digits": 0, "dtd": 47, "dtd-10": 10, "sysu-shape": 5}
MILLIONS = {"cifar10": 35.7}  # Ho's network


@dataclass(frozen=True)
class Images:
    """The facts about a data set that a network depends on."""

    image_size: int
    channels: int
    classes: list[str]


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_the_network_of_a_preset_runs(path: Path) -> None:
    config = params.load(path)
    size, classes = config.prepare.image_size, [str(i) for i in range(CLASSES[path.stem])]
    channels = 1 if path.stem == "digits" else 3
    settings = network_config(config, Images(size, channels, classes))
    network = UNet(settings)
    condition = torch.zeros(1, dtype=torch.int64) if classes else None
    with torch.no_grad():
        output = network(torch.zeros(1, channels, size, size), torch.zeros(1), condition)
    assert output.shape == (1, channels, size, size) and settings.classes == len(classes)
    weights = sum(parameter.numel() for parameter in network.parameters()) / 1e6
    assert round(weights, 1) == MILLIONS.get(path.stem, round(weights, 1))
