"""Any number of workers, or a number that changes, trains the same model, up to rounding."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from program import TINY, ddpm, new_run, prepare_run
from safetensors.torch import load_file

from ddpm_core.training.runlog import read_rows

STEPS = 200
# The batch is divided by neither 3 nor 4. Warm-up, since rounding chooses the sign of Adam's
# first steps where a gradient is all but zero.
SETTINGS = (
    TINY.replace("attention: [4]}", "attention: [4], dropout: 0.1, conditioning: class}")
    .replace("batch_size: 8\n  log_every: 2", "batch_size: 10\n  precision: fp32\n  log_every: 10")
    .replace("steps: 12", f"steps: {STEPS}")
    .replace("snapshot_every: 4", "snapshot_every: 50\n  flip: true\n  reduction: flat")
    .replace("milestone_every: 6", f"milestone_every: {STEPS}")
    .replace("keep: 2", "keep: 9")
    .replace("grid: 4", "grid: 0")
    .replace("warmup: 2", "warmup: 20")
)
SAME_MODEL = 1e-3  # of how far it moved; 1e-6 was seen
SAME_LOSS = 1e-6  # relative; 7e-8 was seen


@dataclass
class Result:
    """The snapshot at the end, and the log."""

    tensors: dict[tuple[str, str], torch.Tensor]
    rows: dict[int, dict[str, float]]

    @classmethod
    def of(cls, folder: Path, step: int = STEPS) -> Result:
        last = folder / f"workspace/snapshots/step-{step:08d}"
        files = [(file.name, load_file(file)) for file in last.glob("*.safetensors")]
        rows = {row["step"]: row for row in read_rows(folder / "workspace/log.jsonl")}
        return cls({(name, key): t for name, group in files for key, t in group.items()}, rows)

    def weights(self) -> torch.Tensor:
        names = sorted(name for name in self.tensors if name[0] == "model.safetensors")
        return torch.cat([self.tensors[name].double().flatten() for name in names])

    def losses(self) -> list[float]:
        return [row["loss"] for row in self.rows.values()]

    def worlds(self) -> dict[int, float]:
        return {step: row["world_size"] for step, row in self.rows.items()}


def train(folder: Path, size: int, steps: int = STEPS) -> None:
    more = (f"train.steps={steps}", f"train.processes={size}")
    ddpm(folder, "train", *(part for setting in more for part in ("-S", setting)))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_run(tmp_path_factory.mktemp("worlds"), SETTINGS)


@pytest.fixture(scope="module")
def undisturbed(prepared: Path) -> dict[int, Result]:
    """A run of each world."""
    results = {}
    for size in (1, 2, 3, 4):
        folder = new_run(prepared, str(size), SETTINGS)
        train(folder, size)
        results[size] = Result.of(folder)
        assert set(results[size].worlds().values()) == {size}
    return results


@pytest.fixture(scope="module")
def start(prepared: Path) -> torch.Tensor:
    """The weights after one step of a vanishing rate: those of the start."""
    folder = new_run(prepared, "start", SETTINGS)
    ddpm(folder, "train", "-S", "train.steps=1", "-S", "train.optimizer.lr=1e-30")
    return Result.of(folder, 1).weights()


def agree(one: Result, other: Result, start: torch.Tensor) -> None:
    """Whole models and loss curves are the same up to rounding, and the model has moved."""
    a, b = one.weights(), other.weights()
    distance = float((a - b).norm() / (a - start).norm())
    pairs = zip(one.losses(), other.losses(), strict=True)
    loss = max(abs(x - y) / x for x, y in pairs)
    assert distance <= SAME_MODEL
    assert loss <= SAME_LOSS


def test_one_to_four_workers_have_the_same_losses_and_the_same_model(
    undisturbed: dict[int, Result], start: torch.Tensor
) -> None:
    for size in (2, 3, 4):
        agree(undisturbed[1], undisturbed[size], start)


def test_a_run_whose_number_of_workers_changes_trains_the_same_model(
    prepared: Path, undisturbed: dict[int, Result], start: torch.Tensor
) -> None:
    folder = new_run(prepared, "changing", SETTINGS)
    for size, steps in ((1, 60), (3, 130), (2, STEPS)):
        train(folder, size, steps)
    changed = Result.of(folder)
    expected = {s: 1 if s <= 60 else 3 if s <= 130 else 2 for s in undisturbed[1].rows}
    assert changed.worlds() == expected
    agree(undisturbed[1], changed, start)
