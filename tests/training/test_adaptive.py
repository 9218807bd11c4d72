"""Noise levels that adapt to the loss are the same on every worker and in every snapshot."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from faults.attempt import together
from support.program import TINY, Program, new_run, prepare_run, run_in, settings
from support.runs import bits, final

from ddpm_core.diffusion import objective, probed
from ddpm_core.diffusion.noise_levels import NoiseLevels, Statistics
from ddpm_core.diffusion.probed import HeldOut, Probed

SETTINGS = (
    TINY.replace("batch_size: 8", "batch_size: 7\n  precision: fp32\n  reduction: exact", 1)
    .replace("grid: 4", "grid: 0")
    .replace("train:", "train:\n  timesteps: {adaptive: held_out}", 1)
)


class Astray(HeldOut):
    """Simulates a memory fault of the second worker."""

    def update(self, statistics: Statistics) -> None:
        super().update(statistics)
        if os.environ["RANK"] == "1":
            self.weights[3] *= 2


def often() -> None:
    """Evaluate a small probe at every fifth step."""
    probed.PER_BIN = 2
    Probed.probe_due = lambda self, step: step % 5 == 0  # type: ignore[method-assign]


def run_often(folder: Path, arguments: tuple[str, ...], output: Path) -> None:
    often()
    run_in({}, folder, arguments, output)


def train_alone(folder: Path, *given: str) -> None:
    program = Program(folder, ("train", *settings(*given)), run_often)
    said = program.ended()
    assert program.returncode == 0, said


def astray() -> None:
    often()
    objective.ADAPTIVE_METHODS["held_out"] = Astray


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_run(tmp_path_factory.mktemp("adaptive"), SETTINGS)


@pytest.mark.slow
def test_probe_and_tables_are_the_same_after_resuming_on_two_workers(prepared: Path) -> None:
    """Held-out images are evaluated at steps 5 and 10, and killing the run is at step 7."""
    one, two = (new_run(prepared, name, SETTINGS) for name in ("one", "two"))
    train_alone(one)
    train_alone(two, "train.steps=7")
    together(two, 2, "train", beside=often)
    assert np.ptp(final(one, 12)["noise_levels/previous"]) > 0
    assert bits(final(one, 12)) == bits(final(two, 12))


@pytest.mark.slow
def test_noise_levels_that_differ_between_workers_stop_the_run(prepared: Path) -> None:
    folder = new_run(prepared, "astray", SETTINGS)
    said = together(folder, 2, "train", beside=astray, status=1)
    assert "(noise_levels.safetensors)" in said and "ranks 0 against 1" in said


def test_noise_level_tables_are_updated_in_place() -> None:
    levels = NoiseLevels(torch.full((4,), 0.25), torch.ones(4))
    tables = levels.state_dict()
    levels.set_tables_(torch.tensor([0.0, 0.0, 3.0, 1.0]), torch.arange(4.0))
    assert tables["weight"].tolist() == [0, 1, 2, 3]
    places = torch.tensor([0.0, 0.7, 0.8])
    assert levels.draw(lambda index: places[index], torch.arange(3)).tolist() == [2, 2, 3]
