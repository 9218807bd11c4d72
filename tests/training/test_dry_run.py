"""A dry run says what training will take, before the data are there too."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.digits_workspace import digits, put_data

from ddpm_core.config import load as params
from ddpm_core.config.template import PRESETS, presets
from ddpm_core.errors import UserError
from ddpm_core.storage.workspace import Workspace
from ddpm_core.training.dry_run import describe, expected


def said(workspace: Path, *overrides: str, preset: str | None = None) -> str:
    file = PRESETS / f"{preset}.yaml" if preset else None
    given = ("device=cpu", *overrides)
    config = params.load(file, given, str(workspace))
    return describe(config, Workspace.open(config.workspace), 1)


@pytest.mark.parametrize("preset", presets())
def test_a_preset_is_told_before_its_data_are_prepared(preset: str, tmp_path: Path) -> None:
    told = said(tmp_path / "run", preset=preset)
    assert "data        waits for `ddpm prepare`; below is for images of " in told
    assert "how many epochs waits for `ddpm prepare`" in told
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
def test_what_the_settings_do_not_say_of_the_pictures_is_assumed_and_told(
    overrides: list[str], channels: int, classes: int, assumed: str
) -> None:
    found = expected(params.load(None, overrides))
    assert (found.channels, len(found.classes), found.assumed) == (channels, classes, assumed)


def test_whether_diffusers_will_take_the_network_is_told_before_training(tmp_path: Path) -> None:
    assert "diffusers   This network can be exported." in said(tmp_path, preset="dtd")
    told = said(tmp_path, "model.conditioning=text")
    assert "diffusers   model.conditioning: got text; must be none or class" in told


def test_data_that_training_would_refuse_are_refused(tmp_path: Path) -> None:
    put_data(Workspace.open(str(tmp_path)), *digits(8))
    with pytest.raises(UserError, match=r"prepare.image_size is 16\. Run `ddpm prepare` again"):
        said(tmp_path)
    told = said(tmp_path, "prepare.image_size=8")
    assert "images of 8x8x1, fingerprint" in told and "epochs" in told
