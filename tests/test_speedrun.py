"""The speedrun: interpolation and factors, and a tiny run from end to end."""

from __future__ import annotations

import importlib
import json
import math
from math import prod
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def speedrun(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the module; `benchmarks` is beside the tests and not installed."""
    monkeypatch.syspath_prepend(Path(__file__).parent.parent)
    return importlib.import_module("benchmarks.speedrun")


def test_lag_is_that_of_the_worst_space(speedrun: Any) -> None:
    reference = {"a": 2.0, "b": 4.0, "kid": 0.0}
    assert speedrun.lag({"a": 4.0, "b": 2.0}, reference, ["a", "b"]) == math.log(2)
    assert speedrun.lag({"a": 2.0, "b": 2.0}, reference, ["a", "b"]) == 0
    assert speedrun.lag({}, reference, ["a", "b"]) == math.inf


def test_crossing_interpolates_in_the_logarithm_of_time(speedrun: Any) -> None:
    assert speedrun.crossing({0.1: 3.0, 0.2: 1.0, 0.8: -1.0}) == pytest.approx((0.8, 0.4))
    assert speedrun.crossing({0.1: 3.0, 0.2: 0.0}) == pytest.approx((0.2, 0.2))
    assert speedrun.crossing({0.1: -3.0}) == (0.1, 0.1)
    assert speedrun.crossing({0.1: math.inf, 0.2: -1.0}) == (0.2, 0.2)
    assert speedrun.crossing({0.5: 2.0, 1.0: 1.0}) == speedrun.crossing({}) == (None, None)


def test_verdict_on_the_shortest_run_is_a_bound(speedrun: Any) -> None:
    scores = {0.1: {"a": 2.0}, 0.2: {"a": 1.0}}
    found = speedrun.Ladder(scores=scores, reached=0.2, interpolated=0.16).verdict
    assert found.startswith("5.0 times as fast") and found.endswith("(interpolated: 6.2 times)")
    shortest = speedrun.Ladder(scores={0.1: {"a": 1.0}}, reached=0.1, interpolated=0.1).verdict
    assert shortest.startswith("at least 10.0 times as fast")
    assert speedrun.Ladder(scores=scores).verdict == "does not reach the scores of diffusers"


def test_every_step_of_the_chain_changes_one_thing(speedrun: Any) -> None:
    experiment = speedrun.experiment_of(speedrun.parsed(["--size", "32"]))
    configs = {name: experiment.config(name, "w").dump() for name in speedrun.CHAIN}
    changed = [
        {
            section if section != "train" else f"train.{name}"
            for section in ("diffusion", "train")
            for name in configs[after][section]
            if configs[before][section][name] != configs[after][section][name]
        }
        for before, after in zip(speedrun.CHAIN, speedrun.CHAIN[1:], strict=False)
    ]
    rest = {"train.optimizer", "train.ema", "train.ema_warmup"}
    assert changed == [{"diffusion"}, {"train.loss"}, rest]


@pytest.fixture
def tiny(speedrun: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the speedrun tiny: 10 steps of diffusers, and 8 and 20 of ddpm with --budget 2s."""
    common = {
        "prepare": {"workers": 1, "classes": ["0", "1"], "holdout": 0.8},
        "model": {"channels": 32, "multipliers": [1], "blocks": 1, "attention": []},
        "train.batch_size": 4,
        "tracking": {"uri": ""},
    }
    short = {"train.optimizer.warmup": 1}
    recipes = {name: speedrun.merged(s, short) for name, s in speedrun.recipes().items()}

    def measure(turns: dict[str, Any]) -> dict[str, float]:
        for turn in turns.values():
            assert turn(1).clock > 0
        return dict.fromkeys(turns, 0.1) | {"diffusers": 0.2}

    for name, value in {
        "COMMON": common,
        "SHARES": (0.5, 1.0),
        "recipes": lambda: recipes,
    }.items():
        monkeypatch.setattr(speedrun, name, value)
    monkeypatch.setattr(speedrun.reference, "WARMUP", 1)
    monkeypatch.setattr("ddpm_core.comparison.cost.measure", measure)
    return speedrun


@pytest.mark.slow
def test_speedrun_reports_when_ddpm_reaches_diffusers(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "speedrun.json"
    given = ["-w", str(tmp_path / "w"), "--json", str(file), "--budget", "2s", "--samples", "16"]
    tiny.main([*given, "--decompose"])
    result = json.loads(file.read_text())
    theirs, distances = result["diffusers"]["scores"], result["distances"]
    assert result["diffusers"]["steps"] == 10 and len(distances) == 4
    assert result["recipes"].keys() == {"static", *tiny.CHAIN}
    for recipe in result["recipes"].values():
        assert recipe["steps"] == {"0.5": 8, "1.0": 20}
        lags = {float(s): tiny.lag(got, theirs, distances) for s, got in recipe["scores"].items()}
        assert (recipe["reached"], recipe["interpolated"]) == tiny.crossing(lags)
        assert len(lags) == (1 if recipe["reached"] == 0.5 else 2)
    assert result["factors"].keys() == set(tiny.FACTORS) and result["factors"]["throughput"] == 2

    # The same command trains nothing again.
    monkeypatch.setattr(tiny.reference, "Reference", None)
    monkeypatch.setattr("ddpm_core.comparison.runs.train", None)
    file.unlink()
    capsys.readouterr()
    tiny.main([*given, "--decompose"])
    assert json.loads(file.read_text()) == result
    assert "throughput      2.00 times" in capsys.readouterr().out


def test_budget_within_the_warm_up_is_an_error(
    tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        tiny.main(["-w", str(tmp_path), "--budget", "0.2s", "--samples", "16"])
    assert stopped.value.code == 1
    assert "is 1 step of diffusers; must be longer than its warm-up" in capsys.readouterr().err


def test_invalid_options_are_reported_together(speedrun: Any, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        speedrun.main(["-w", str(tmp_path / "w"), "--seeds", "0", "--samples", "1"])
    error = capsys.readouterr().err
    assert "samples" in error and "seeds" in error and not (tmp_path / "w").exists()


def test_factors_multiply_to_the_speed_up(speedrun: Any) -> None:
    shares = dict(zip(speedrun.CHAIN, (0.4, 0.3, 0.2, 0.1), strict=True))
    ladders = {name: speedrun.Ladder(interpolated=share) for name, share in shares.items()}
    cost = speedrun.Cost(
        seconds={"diffusers": 0.2, "theirs": 0.1},
        settings={},
        evaluation=0.1,
        threads=1,
        device="cpu",
    )
    found = speedrun.factors(cost, ladders)
    assert found == pytest.approx(
        {
            "throughput": 2,
            "network": 1.25,
            "parametrization": 4 / 3,
            "objective": 1.5,
            "rest": 2,
        }
    )
    assert prod(found.values()) == pytest.approx(10)
    ladders["objective"].interpolated = None
    found = speedrun.factors(cost, ladders)
    assert found["network"] == 1.25 and found["objective"] is found["rest"] is None
