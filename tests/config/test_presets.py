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
from ddpm_core.config.template import excerpt, presets, template
from ddpm_core.runtime.device import choose_precision
from ddpm_core.runtime.distributed import world
from ddpm_core.training.dry_run import ExpectedImages, memory_needed
from ddpm_core.training.timing import activation_bytes, made_up_batch, made_up_state

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


NAMES = ["odd, name: x", "p #1", "123", "null", "1e3", "{a}", "new\nline", "caf\u00e9 'x'"]


@pytest.mark.parametrize("name", NAMES)
def test_an_excerpt_has_the_given_settings_and_reasons(name: str) -> None:
    values = {"train": {"optimizer": {"lr": 0.5}, "flip": True}, "prepare": {"source": name}}
    reasons = {"prepare.source": "a", "train.optimizer.lr": "b", "train.flip": "c"}
    text = excerpt(values, reasons, "first\nsecond")
    config = params.load_text(text, "excerpt")
    assert (config.prepare.source, config.train.optimizer.lr, config.train.flip) == (
        name,
        0.5,
        True,
    )
    lines = text.splitlines()
    assert lines[:2] == ["# first", "# second"] and len(lines) == 2 + 2 + 2 * 2 + 2
    assert [line[-1] for line in lines if line[-3:-1] == "# "] == ["a", "b", "c"]


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


@dataclass(frozen=True)
class Expected:
    """A preset's number of classes, and what its training takes in fp32."""

    classes: int
    parameters: int
    gigabytes: float


EXPECTED = {
    "animals10": Expected(10, 37_070_339, 47.4),
    "cifar10": Expected(0, 35_746_307, 14.35),  # Ho's network
    "digits": Expected(0, 1_112_801, 0.15),
    "dtd": Expected(47, 49_660_131, 20.4),
    "dtd-10": Expected(10, 22_083_139, 13.4),
    "sysu-shape": Expected(5, 57_894_531, 8.57),
}


QUICK = "digits"


@pytest.mark.parametrize(
    "preset", [QUICK, *(pytest.param(p, marks=pytest.mark.slow) for p in EXPECTED if p != QUICK)]
)
def test_a_preset_takes_a_step_in_known_memory(
    preset: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two images are trained on; the memory of a full batch is computed from them."""
    config = params.load(FOLDER / f"{preset}.yaml", ["device=cpu", "train.precision=fp32"])
    expected = EXPECTED[preset]
    names = [str(number) for number in range(expected.classes)]
    images = ExpectedImages(config.prepare.image_size, 1 if preset == "digits" else 3, names, "")
    with world("cpu", {}) as here:
        state = made_up_state(config, images, here)
        before = [weights.detach().clone() for weights in state.parameters]
        one, two = (made_up_batch(config, images, count, here.device) for count in (1, 2))
        activations = activation_bytes(state, (one, two))
    assert state.step == 2 and not int(state.bad_step)
    # The first steps change few weights: many layers are followed by one that starts at zero.
    assert not all(map(torch.equal, before, state.parameters))
    parameters = sum(weights.numel() for weights in state.parameters)
    fixed = memory_needed(config, parameters, 1)[0]
    gigabytes = (fixed + activations * config.train.batch_size) / 1e9
    with capsys.disabled():
        print(f" {preset}: {parameters:,} parameters, {gigabytes:.2f} GB ", end="")
    assert parameters == expected.parameters
    assert gigabytes == pytest.approx(expected.gigabytes, rel=0.05)
