"""The benchmarks run and write the documented fields."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `benchmarks`, which is beside the tests and not installed, importable."""
    monkeypatch.syspath_prepend(Path(__file__).parent.parent)


def measured(name: str, file: Path, *arguments: str) -> dict[str, Any]:
    """Run a benchmark and return the JSON that it writes."""
    importlib.import_module(f"benchmarks.{name}").main(["--json", str(file), *arguments])
    result: dict[str, Any] = json.loads(file.read_text())
    return result


@pytest.mark.slow
def test_peers_writes_ratios_seconds_and_random_share(tmp_path: Path) -> None:
    given = ("--quick", "--networks", "digits", "--rounds", "1")
    result = measured("peers", tmp_path / "peers.json", *given)
    for work in ("train", "sample"):
        assert result[work]["diffusers"] == result["networks"]["digits"][work] > 0
        assert result["seconds"]["digits"][work].keys() == {"diffusers", "ours"}
    assert 0 < result["random_share"]["digits"] < 1
    assert result["machine"]["threads"] == 1
    assert result["versions"].keys() == {"python", "torch", "diffusers"}


def test_snapshot_benchmark_measures_the_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("--network", "digits", "--rounds", "1")
    result = measured("snapshot", tmp_path / "snapshot.json", *given)
    assert result["stall_at_one_a_minute"] == result["stall"] / 60 > 0
    assert result["step"] > 0
    assert result["bytes"] > 16 * 1_500_000  # weights, their average and Adam's two moments
    ours = importlib.import_module("benchmarks.ours")
    monkeypatch.setattr(ours, "initial_weights", lambda model, config: None)  # only counted below
    with torch.device("meta"):
        weights = ours.unet(importlib.import_module("benchmarks.networks").ho(1)).parameters()
    assert sum(parameter.numel() for parameter in weights) == pytest.approx(35.7e6, rel=2e-3)


@pytest.mark.slow
def test_overhead_benchmark_measures_every_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("benchmarks.overhead")
    methods = {"none": None, "kim": None, "replay": None}
    monkeypatch.setattr(module, "ADAPTIVE_METHODS", methods)
    result = measured("overhead", tmp_path / "overhead.json", "--rounds", "1")
    augmentations = {"augment crop", "augment edm"}
    assert result["parts"].keys() == {"average power:0.05", "kim", "replay"} | augmentations
    assert all(0 < part["share"] < 0.5 for part in result["parts"].values())
    assert result["parts"]["kim"]["probe"] > 0 == result["parts"]["replay"]["probe"]
    assert result["machine"]["threads"] == 1


def test_gpu_checks_continue_after_failures_and_time_out(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    checks = importlib.import_module("benchmarks.gpu").Checks("cpu", 60, file, {"card": "none"})
    checks.check("fails", 60, checks.run, "json.tool", str(tmp_path / "missing"))
    checks.check("has no end", 16, checks.run, "http.server", "0")  # 15 s of them are reserved
    checks.check("passes", 60, checks.run, "platform")
    checks.check("the preset", 60, checks.preset, str(tmp_path), tmp_path / "missing")
    found = json.loads(file.read_text())
    assert found["card"] == "none"
    states = [(check["check"], check["state"]) for check in found["checks"]]
    assert states == [
        ("fails", "fail"),
        ("has no end", "not reached"),
        ("passes", "pass"),
        ("the preset", "not reached"),
    ]
    assert "No such file" in found["checks"][0]["why"]
    assert "Timed out" in found["checks"][1]["why"] and found["checks"][1]["took"] < 12


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_checks_without_a_gpu_exit_with_status_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu"])
    assert importlib.import_module("benchmarks.gpu").main() == 3
    assert "CUDA finds no GPU" in capsys.readouterr().err


def test_peers_can_run_diffusers_in_bf16(tmp_path: Path) -> None:
    given = ("--networks", "demo", "--rounds", "1", "--batch", "2", "--diffusers", "bf16")
    result = measured("peers", tmp_path / "peers.json", *given, "--train-only")
    assert result["precision"]["diffusers"] == "bf16" and "sample" not in result
    assert result["batch"]["demo"] == {"train": 2, "sample": 2}
