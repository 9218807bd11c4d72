"""Experiment files: overrides, and all problems at once before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.comparison import EXPERIMENT, write_experiment
from support.program import ddpm

from ddpm_core.comparison.experiment import Arm, Run, load, merged
from ddpm_core.errors import UserError

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def problems(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load(write_experiment(tmp_path, text), overrides)
    return str(caught.value)


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    text = """
budget: soon
seeds: [1, 1]
baseline: uniforn
methods:
  uniform: {settings: {train.loss.weighting: uniforn}}
  kim: {settings: {train.timesteps.adaptive: kimm}, controls: [other_seed]}
  other: {settings: {prepare.image_size: 32, train.steps: 9}, controls: [last]}
"""
    found = problems(tmp_path, text)
    for line in (
        "budget: got 'soon'; must be a time of training such as 90s, 10m or 2h",
        "seeds: got [1, 1]; must not repeat a seed",
        "baseline: got 'uniforn'; must be one of the methods: uniform, kim, other",
        "methods.uniform.settings.train.loss.weighting: got 'uniforn'; must be 'uniform',",
        "methods.kim.settings.train.timesteps.adaptive: got 'kimm'; must be",
        "methods.other.settings.prepare.image_size: got 32; must be the same for all methods",
        "methods.other.settings.train.steps: got 9; the comparison sets it",
        "methods.other.controls: got ['last']; requires train.timesteps.adaptive",
    ):
        assert line in found


def test_unknown_keys_and_types_are_reported_together(tmp_path: Path) -> None:
    text = (
        "budget: 1m\nseeds: 1\nbaseline: a\nmethods: {a: {learning_rate: [1]}, ../b: {}}\nworker: 2"
    )
    found = problems(tmp_path, text)
    assert "worker: unknown key; did you mean workers?" in found
    assert "seeds: got 1; must be a list" in found
    assert "methods.a.learning_rate: unknown key" in found and "learning_rates" in found
    assert "methods.../b: got '../b'; must be letters" in found


def test_contradictory_settings_name_the_method(tmp_path: Path) -> None:
    text = (
        EXPERIMENT + "  zero: {settings: {diffusion: {prediction: noise, zero_terminal_snr: true}}}"
    )
    assert "methods.zero.settings.diffusion" in problems(tmp_path, text)


def test_problem_of_the_shared_settings_is_reported_once(tmp_path: Path) -> None:
    found = problems(tmp_path, EXPERIMENT, "settings.train.batch_size=0")
    assert found.count("train.batch_size") == 1 and "settings.train.batch_size: got 0" in found


def test_refusal_leaves_no_folder(tmp_path: Path) -> None:
    write_experiment(tmp_path, "methods: {}")
    output = ddpm(tmp_path, "compare", "tiny.yaml", status=1)
    assert "Traceback" not in output and "problems in tiny.yaml" in output
    assert not (tmp_path / "comparisons").exists()


def test_overrides_apply_to_fields_and_settings(tmp_path: Path) -> None:
    file = write_experiment(tmp_path)
    given = ["seeds=[7, 8]", "data=photos/", "settings.model.channels=16"]
    experiment = load(file, given)
    config = experiment.config("variance", "w")
    assert experiment.seeds == (7, 8) and config.prepare.source == "photos/"
    assert config.model.channels == 16 and config.train.timesteps.adaptive == "variance"


def test_dotted_and_nested_settings_merge() -> None:
    assert merged({"a": {"b": 1, "c": 2}}, {"a.b": 3, "a": {"d": 4}}) == {
        "a": {"b": 3, "c": 2, "d": 4}
    }


def test_control_replays_the_tables_of_its_method(tmp_path: Path) -> None:
    experiment = load(write_experiment(tmp_path))
    arm = Arm("variance-other_seed", "variance", "other_seed")
    config = experiment.run_config(Run(arm, 0.5, 3, 8, "x/tables"), tmp_path)
    timesteps = config.train.timesteps
    assert (timesteps.adaptive, timesteps.order) == ("replay", "recorded")
    assert timesteps.tables == str(tmp_path / "x/tables")
    assert (config.seed, config.train.steps, config.train.optimizer.lr) == (3, 8, 0.5)
    assert config.sample.checkpoints == (2, 4, 8)


@pytest.mark.parametrize("file", sorted(EXPERIMENTS.glob("*.yaml")), ids=lambda file: file.stem)
def test_experiments_of_the_repository_are_valid(file: Path) -> None:
    assert len(load(file).methods) >= 2
