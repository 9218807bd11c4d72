"""Checkpoints of other versions open if possible; otherwise the error is not about damage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.digits_workspace import digits, make_config, put_data
from support.models import write_checkpoint
from support.mutations import reseal

from ddpm_core import __version__
from ddpm_core.checkpoint import SETTINGS, Checkpoint, look_at_checkpoint
from ddpm_core.data.dataset import open_dataset
from ddpm_core.errors import Corrupt, UserError
from ddpm_core.sampling import plan
from ddpm_core.storage.workspace import Workspace, snapshot_key
from ddpm_core.training import resume

Settings = dict[str, Any]


def write_with(
    folder: Path, change: Callable[[Settings], object], made: str | None = "9.9"
) -> None:
    """Write a checkpoint of version `made` with changed settings."""
    write_checkpoint(folder)
    settings = json.loads((folder / SETTINGS).read_text())
    settings.update({} if made is None else {"ddpm": made})
    change(settings)
    (folder / SETTINGS).write_text(json.dumps(settings))
    reseal(folder)


def test_checkpoint_records_the_version_that_wrote_it(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    workspace = Workspace.open(config.workspace)
    put_data(workspace, *digits(8))
    assert resume.checkpoint_settings(config, open_dataset(workspace)).ddpm == __version__


def test_unknown_settings_without_effect_are_ignored(tmp_path: Path) -> None:
    def change(settings: Settings) -> None:
        settings["params"]["prepare"]["denoise"] = True
        settings["params"]["publish"] = {"to": "all"}

    write_with(tmp_path / "newer", change)
    assert Checkpoint.open(tmp_path / "newer").params.prepare.image_size == 8
    write_with(tmp_path / "older", lambda _: None, made=None)
    assert Checkpoint.open(tmp_path / "older").step == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["params"]["train"]["optimizer"].update(eps=1e-8), "train.optimizer.eps"),
        (lambda s: s["params"]["sample"].update(sampler="unipc"), "sample.sampler: got 'unipc'"),
        (lambda s: s["network"].update(norm="rms"), "norm"),
    ],
)
def test_other_version_is_reported_and_not_as_damage(
    tmp_path: Path, change: Callable[[Settings], object], message: str
) -> None:
    config = make_config(tmp_path, train={"steps": 4})
    workspace = Workspace.open(config.workspace)
    write_with(workspace.path(snapshot_key(4)), change)
    with pytest.raises(UserError, match=rf"(?s){message}.*by ddpm 9\.9; this is") as caught:
        look_at_checkpoint(workspace, 4)
    assert not isinstance(caught.value, Corrupt)
    with pytest.raises(UserError, match=r"by ddpm 9\.9") as caught:
        plan.look_at_chosen(config, workspace)
    assert plan.REPAIR not in str(caught.value)
    with pytest.raises(UserError, match=r"by ddpm 9\.9"):  # and the snapshot stays in its place
        resume.damaged(workspace, [4], 0)


def test_settings_invalid_for_every_version_are_damage(tmp_path: Path) -> None:
    write_with(tmp_path / "bad", lambda s: s["params"]["sample"].update(steps=-1), made=__version__)
    with pytest.raises(Corrupt, match=r"sample\.steps: got -1"):
        Checkpoint.open(tmp_path / "bad")
