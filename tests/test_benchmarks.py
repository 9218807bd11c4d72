"""The comparison with other people's code runs and writes what it promises."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """They lie beside the tests, in no package."""
    monkeypatch.syspath_prepend(Path(__file__).parent.parent)


def measured(name: str, file: Path, *arguments: str) -> dict[str, Any]:
    """What a benchmark writes."""
    importlib.import_module(f"benchmarks.{name}").main(["--json", str(file), *arguments])
    result: dict[str, Any] = json.loads(file.read_text())
    return result


def test_peers_writes_ratios_seconds_and_the_share_of_random_numbers(tmp_path: Path) -> None:
    given = ("--quick", "--networks", "digits", "--rounds", "1")
    result = measured("peers", tmp_path / "peers.json", *given)
    for work in ("train", "sample"):
        assert result[work]["diffusers"] == result["networks"]["digits"][work] > 0
        assert result["seconds"]["digits"][work].keys() == {"diffusers", "ours"}
    assert 0 < result["random_share"]["digits"] < 1
    assert result["machine"]["threads"] == 1
    assert result["versions"].keys() == {"python", "torch", "diffusers"}


def test_the_snapshot_benchmark_measures_the_stall_and_ho_has_his_number_of_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("--network", "digits", "--rounds", "1")
    result = measured("snapshot", tmp_path / "snapshot.json", *given)
    assert result["stall_at_one_a_minute"] == result["stall"] / 60 > 0
    assert result["step"] > 0
    assert result["bytes"] > 16 * 1_500_000  # weights, their average and Adam's two moments
    ours = importlib.import_module("benchmarks.ours")
    monkeypatch.setattr(ours, "initial_weights", lambda model, config: None)  # counted, not used
    with torch.device("meta"):
        weights = ours.unet(importlib.import_module("benchmarks.networks").ho(1)).parameters()
    assert sum(parameter.numel() for parameter in weights) == pytest.approx(35.7e6, rel=2e-3)
