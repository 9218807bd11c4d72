"""A checkpoint of another version is opened where it can be, and else told from a damaged one."""

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


def written(folder: Path, change: Callable[[Settings], object], made: str | None = "9.9") -> None:
    """A checkpoint of version `made`, with changed settings."""
    write_checkpoint(folder)
    settings = json.loads((folder / SETTINGS).read_text())
    settings.update({} if made is None else {"ddpm": made})
    change(settings)
    (folder / SETTINGS).write_text(json.dumps(settings))
    reseal(folder)


def test_a_checkpoint_says_which_version_wrote_it(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    workspace = Workspace.open(config.workspace)
    put_data(workspace, *digits(8))
    assert resume.settings_of(config, open_dataset(workspace))["ddpm"] == __version__


def test_what_a_network_does_not_need_may_be_another_versions(tmp_path: Path) -> None:
    def change(settings: Settings) -> None:
        settings["params"]["prepare"]["denoise"] = True
        settings["params"]["publish"] = {"to": "all"}

    written(tmp_path / "newer", change)
    assert Checkpoint.open(tmp_path / "newer").params.prepare.image_size == 8
    written(tmp_path / "older", lambda _: None, made=None)
    assert Checkpoint.open(tmp_path / "older").step == 4


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda s: s["params"]["train"]["optimizer"].update(eps=1e-8), "train.optimizer.eps"),
        (lambda s: s["params"]["sample"].update(sampler="heun"), "sample.sampler: got 'heun'"),
        (lambda s: s["network"].update(norm="rms"), "norm"),
    ],
)
def test_what_another_version_means_names_that_version_and_no_damage(
    tmp_path: Path, change: Callable[[Settings], object], told: str
) -> None:
    config = make_config(tmp_path, train={"steps": 4})
    workspace = Workspace.open(config.workspace)
    written(workspace.path(snapshot_key(4)), change)
    with pytest.raises(UserError, match=rf"(?s){told}.*by ddpm 9\.9, and this is") as caught:
        look_at_checkpoint(workspace, 4)
    assert not isinstance(caught.value, Corrupt)
    with pytest.raises(UserError, match=r"by ddpm 9\.9") as caught:
        plan.look_at_chosen(config, workspace)
    assert plan.MENDING not in str(caught.value)
    with pytest.raises(UserError, match=r"by ddpm 9\.9"):  # and it stays where it is
        resume.damaged(workspace, [4], 0)


def test_settings_that_no_version_can_mean_are_damage(tmp_path: Path) -> None:
    written(tmp_path / "bad", lambda s: s["params"]["sample"].update(steps=-1), made=__version__)
    with pytest.raises(Corrupt, match=r"sample\.steps: got -1"):
        Checkpoint.open(tmp_path / "bad")
