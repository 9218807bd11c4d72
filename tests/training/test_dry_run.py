"""A dry run reports what training needs, also before the data is prepared."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.digits_workspace import digits, put_data

from ddpm_core.config import load as params
from ddpm_core.config.template import PRESETS, presets
from ddpm_core.errors import UserError
from ddpm_core.storage.workspace import Workspace
from ddpm_core.training.dry_run import describe, expected_images


def said(workspace: Path, *overrides: str, preset: str | None = None) -> str:
    file = PRESETS / f"{preset}.yaml" if preset else None
    given = ("device=cpu", *overrides)
    config = params.load(file, given, str(workspace))
    return describe(config, Workspace.open(config.workspace), 1)


@pytest.mark.parametrize("preset", presets())
def test_dry_run_describes_a_preset_without_prepared_data(preset: str, tmp_path: Path) -> None:
    told = said(tmp_path / "run", preset=preset)
    assert "data        waits for `ddpm prepare`; the lines below are for images of " in told
    assert "number of epochs known after `ddpm prepare`" in told
    for line in ("network     ", "disk        ", "memory      ", "devices     1 x cpu"):
        assert f"\n{line}" in told
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "channels", "classes", "assumed"),
    [
        (["prepare.source=digits"], 1, 10, ""),
        (["prepare.source=dtd"], 3, 47, ""),
        (["prepare.source=dtd", "prepare.classes=[a, b]", "prepare.channels=1"], 1, 2, ""),
        (["prepare.source=photos"], 3, 10, "3 channels"),
        (["prepare.source=photos", "model.conditioning=class"], 3, 10, "3 channels and 10 classes"),
    ],
)
def test_dry_run_names_what_it_assumes_about_the_images(
    overrides: list[str], channels: int, classes: int, assumed: str
) -> None:
    found = expected_images(params.load(None, overrides))
    assert (found.channels, len(found.classes), found.assumed) == (channels, classes, assumed)


def test_dry_run_reports_whether_diffusers_supports_the_network(tmp_path: Path) -> None:
    assert "diffusers   This network can be exported." in said(tmp_path, preset="cifar10")
    told = said(tmp_path, "model.conditioning=text")
    assert "diffusers   model.conditioning: got text; must be none or class" in told


def test_dry_run_refuses_data_that_training_would_refuse(tmp_path: Path) -> None:
    put_data(Workspace.open(str(tmp_path)), *digits(8))
    with pytest.raises(UserError, match=r"prepare.image_size is 16\. Run `ddpm prepare`\."):
        said(tmp_path)
    told = said(tmp_path, "prepare.image_size=8")
    assert "images of 8x8x1, fingerprint" in told and "epochs" in told
