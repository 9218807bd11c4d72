"""The comparison with other people's code runs and writes what it promises."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest


def test_peers_writes_ratios_seconds_and_the_share_of_random_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent.parent)
    peers = importlib.import_module("benchmarks.peers")
    file = tmp_path / "peers.json"
    peers.main(["--json", str(file), "--quick", "--networks", "digits", "--rounds", "1"])
    result = json.loads(file.read_text())
    for work in ("train", "sample"):
        assert result[work]["diffusers"] == result["networks"]["digits"][work] > 0
        assert result["seconds"]["digits"][work].keys() == {"diffusers", "ours"}
    assert 0 < result["random_share"]["digits"] < 1
    assert result["machine"]["threads"] == 1
    assert result["versions"].keys() == {"python", "torch", "diffusers"}
