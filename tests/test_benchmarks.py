"""The comparison with other people's code runs and writes what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_peers_writes_ratios_seconds_and_the_share_of_random_numbers(tmp_path: Path) -> None:
    file = tmp_path / "peers.json"
    root = Path(__file__).parent.parent
    command = [sys.executable, "-m", "benchmarks.peers", "--json", str(file), "--quick"]
    subprocess.run([*command, "--networks", "digits"], cwd=root, check=True, capture_output=True)
    result = json.loads(file.read_text())
    for work in ("train", "sample"):
        assert result[work]["diffusers"]["digits"] > 0
        assert result["seconds"]["digits"][work].keys() == {"diffusers", "ours"}
    assert 0 < result["random_share"]["digits"] < 1
    assert result["machine"]["threads"] == 1
    assert result["versions"].keys() == {"python", "torch", "diffusers"}
