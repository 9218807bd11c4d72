"""The pipeline passes on its inputs unchanged, with any characters."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpm_core.errors import Interrupted, UserError
from ddpm_core.storage.workspace import Workspace
from ddpm_kube import steps
from ddpm_kube.record import Run, open_run

RARE = "第\U00020bb7野 \U0001f600"  # beyond U+FFFF: a CJK character, an emoji


@pytest.mark.parametrize(
    "source",
    [
        f"/workspace/{RARE}",
        f"s3://bucket/{RARE}",
        "/workspace/ü",
        'a"b\\c',
        "\\ud842\\udfb7",
        "a\tb\x07\x7f\x85\u2028\ufeff\ufffe",
        "dvc:https://host/r.git#photos of 'us'@v1",
        "${x} $(HOME) %s {y}",
        "12",
        "no",
        "word " * 60 + "end",
    ],
)
def test_a_source_reaches_the_config_unchanged(source: str, tmp_path: Path) -> None:
    config = steps.make_config("", [], str(tmp_path / RARE), source)
    assert config.prepare.source == source
    reference = Run(Workspace.open(config.workspace), "a-run").save(config)
    assert open_run(reference)[0] == config


def test_settings_that_were_changed_or_removed_are_refused(tmp_path: Path) -> None:
    reference = Run(Workspace.open(str(tmp_path)), "a-run").save(
        steps.make_config("", [], str(tmp_path))
    )
    (file,) = tmp_path.rglob("settings.json")
    file.write_text(file.read_text().replace('"seed": 0', '"seed": 1'))
    for _ in range(2):
        with pytest.raises(UserError, match=r"settings.json is missing or was changed.*submit"):
            open_run(reference)
        file.unlink(missing_ok=True)


@pytest.mark.slow
def test_the_workspace_reaches_the_workers_of_a_pod_unchanged(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / RARE
    given = ["train.processes=2", "train.restarts=0", "device=cpu", "tracking.uri=''"]
    with pytest.raises(Interrupted):
        steps.train_here(steps.make_config("", given, str(place)))
    assert f"There are no prepared data in {place}" in capfd.readouterr().err
