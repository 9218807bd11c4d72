"""The pipeline passes on its inputs unchanged, with any characters."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpm_core.errors import Interrupted
from ddpm_kube import steps

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
def test_a_source_reaches_the_config_unchanged(source: str) -> None:
    config = steps.make_config("", [], "/workspace/run", source)
    assert config.prepare.source == source
    assert steps.open_settings(steps.to_text(config))[0] == config


def test_the_workspace_reaches_the_workers_of_a_pod_unchanged(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / RARE
    given = ["train.processes=2", "train.restarts=0", "device=cpu", "tracking.uri=''"]
    with pytest.raises(Interrupted):
        steps.train_here(steps.make_config("", given, str(place)))
    assert f"There are no prepared data in {place}" in capfd.readouterr().err
