"""A tiny experiment of `ddpm compare`, on a few digits, with recorded costs."""

from __future__ import annotations

from pathlib import Path

from ddpm_core.comparison.cost import COST, Cost, settings_of_cost
from ddpm_core.comparison.experiment import Experiment, load
from ddpm_core.storage.workspace import Workspace

STEPS = 4

EXPERIMENT = """
data: digits
budget: 10s
seeds: [3, 4]
samples: 12
ddpm_samples: 8
dpmpp_steps: 2
settings:
  tracking: {uri: ""}
  prepare: {image_size: 16, workers: 1, classes: ["0", "1"], holdout: 0.8}
  model: {channels: 8, multipliers: [1], blocks: 1, attention: []}
  diffusion: {timesteps: 10}
  train.batch_size: 4
  train.optimizer: {warmup: 1}
  train.ema: [0.9]
  train.snapshot_every: 1
  sample.batch_size: 12
baseline: uniform
methods:
  uniform: {settings: {train.loss.weighting: uniform}, learning_rates: [1.0e-3, 2.0e-3]}
  variance: {settings: {train.timesteps.adaptive: variance}, controls: [other_seed]}
"""


def write_experiment(folder: Path, text: str = EXPERIMENT) -> Path:
    """Write tiny.yaml into a folder."""
    file = folder / "tiny.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def record_cost(file: Path) -> Experiment:
    """Record a cost with which every run has STEPS steps; return the experiment."""
    experiment = load(file)
    workspace = Workspace.open(str(file.parent / "comparisons" / file.stem))
    configs = {name: experiment.config(name, workspace.uri) for name in experiment.methods}
    cost = Cost(
        seconds=dict.fromkeys(configs, experiment.seconds / STEPS),
        settings={name: settings_of_cost(config) for name, config in configs.items()},
        evaluation=0.001,
        threads=1,
        device="cpu",
    )
    workspace.write_json(COST, cost.model_dump())
    return experiment
