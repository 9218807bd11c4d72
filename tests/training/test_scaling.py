"""`ddpm bench scaling` measures real runs and does not touch the user's workspace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.program import TINY, ddpm, write_params


@pytest.mark.slow
def test_bench_measures_one_and_two_workers(tmp_path: Path) -> None:
    write_params(tmp_path, TINY)
    arguments = ("bench", "scaling", "--workers", "2", "--steps", "6", "--json", "scaling.json")
    said = ddpm(tmp_path, *arguments)
    assert "efficiency" in said
    assert "communication" in said
    assert {path.name for path in tmp_path.iterdir()} == {"params.yaml", "scaling.json"}
    one, two = json.loads((tmp_path / "scaling.json").read_text())["scaling"]
    assert (one["workers"], one["speedup"], one["efficiency"]) == (1, 1, 1)
    assert 0 <= one["communication"] < two["communication"] < 1
    assert two["speedup"] == pytest.approx(two["images_per_second"] / one["images_per_second"])
    assert two["efficiency"] == pytest.approx(two["speedup"] / 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--workers", "9"), "--workers: got 9; must be from 1 to train.batch_size (8)."),
        (("--steps", "1"), "--steps: got 1; must be at least 2"),
        (("-S", "prepare.source=nowhere"), "nowhere"),
    ],
)
def test_bench_refuses_invalid_arguments(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    write_params(tmp_path, TINY)
    said = ddpm(tmp_path, "bench", "scaling", *arguments, status=1)
    assert message in said
    assert "Traceback" not in said
