"""Noise levels that adapt to the loss are the same on every worker and in every snapshot."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from faults.attempt import together
from support.program import TINY, Program, new_run, prepare_run, run_in, settings
from support.runs import bits, final
from torch import Tensor

from ddpm_core.diffusion.noise_levels import (
    TIMESTEP_SAMPLERS,
    NoiseLevels,
    NoiseLevelSettings,
    Statistics,
)
from ddpm_core.diffusion.process import Schedule

SETTINGS = TINY.replace(
    "batch_size: 8", "batch_size: 7\n  precision: fp32\n  reduction: exact", 1
).replace("grid: 4", "grid: 0")


class SecondMoment(NoiseLevels):
    """p(t) prop. to the root of the mean squared loss at t, a tenth of it uniform; weight / (T p).

    After Nichol & Dhariwal (2021), "Improved denoising diffusion probabilistic models", eq. 18.
    """

    adaptive: ClassVar[bool] = True

    def __init__(self, schedule: Schedule, weight: Tensor, settings: NoiseLevelSettings) -> None:
        super().__init__(torch.full_like(schedule.betas, 1.0 / schedule.timesteps), weight)
        self._base = self.weights.clone()
        self._squares = torch.ones_like(self._base)

    def update(self, statistics: Statistics) -> None:
        zero, seen = torch.zeros_like(self._base), torch.ones_like(statistics.error)
        counts = zero.index_add(0, statistics.t, seen)
        mean = zero.index_add(0, statistics.t, statistics.error.square()) / counts.clamp(min=1)
        self._squares.lerp_(mean, 0.5 * (counts > 0))
        root = self._squares.sqrt()
        p = 0.9 * root / root.sum() + 0.1 / len(root)
        self.set_tables_(p, self._base / (len(p) * p))

    def state_dict(self) -> dict[str, Tensor]:
        return {**super().state_dict(), "squares": self._squares}


class Astray(SecondMoment):
    """Simulates a memory fault of the second worker."""

    def update(self, statistics: Statistics) -> None:
        super().update(statistics)
        if os.environ["RANK"] == "1":
            self.weights[3] *= 2


def learning() -> None:
    TIMESTEP_SAMPLERS["uniform"] = SecondMoment


def astray() -> None:
    TIMESTEP_SAMPLERS["uniform"] = Astray


def run_learning(folder: Path, arguments: tuple[str, ...], output: Path) -> None:
    learning()
    run_in({}, folder, arguments, output)


def alone(folder: Path, *given: str) -> None:
    program = Program(folder, ("train", *settings(*given)), run_learning)
    said = program.ended()
    assert program.returncode == 0, said


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_run(tmp_path_factory.mktemp("adaptive"), SETTINGS)


def test_noise_levels_are_the_same_after_resuming_on_two_workers(prepared: Path) -> None:
    one, two = (new_run(prepared, name, SETTINGS) for name in ("one", "two"))
    alone(one)
    alone(two, "train.steps=7")
    together(two, 2, "train", beside=learning)
    learned = final(one, 12)["noise_levels/probability"]
    assert np.ptp(learned) > 0.1 * learned.mean()
    assert bits(final(one, 12)) == bits(final(two, 12))


def test_noise_levels_that_differ_between_workers_stop_the_run(prepared: Path) -> None:
    folder = new_run(prepared, "astray", SETTINGS)
    said = together(folder, 2, "train", beside=astray, status=1)
    assert "(noise_levels.safetensors)" in said and "ranks 0 against 1" in said


def test_noise_level_tables_are_updated_in_place() -> None:
    levels = NoiseLevels(torch.full((4,), 0.25), torch.ones(4))
    tables = levels.state_dict()
    levels.set_tables_(torch.tensor([0.0, 0.0, 3.0, 1.0]), torch.arange(4.0))
    assert tables["weight"].tolist() == [0, 1, 2, 3]
    assert levels.draw(torch.tensor([0.0, 0.7, 0.8])).tolist() == [2, 2, 3]
