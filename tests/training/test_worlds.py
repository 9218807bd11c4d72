"""Any number of workers, constant or changing, trains the same model up to rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults.attempt import together
from support.program import TINY, new_run, prepare_run, write_params
from support.runs import Tensors, at_start, distance, final, of_file, rows

STEPS = 200
# Neither 3 nor 4 divides the batch size. There is a warm-up because rounding decides the sign of
# Adam's first steps if a gradient is almost zero.
SETTINGS = (
    TINY.replace("attention: [8]}", "attention: [], dropout: 0.1, conditioning: class}")
    .replace("batch_size: 8\n  log_every: 2", "batch_size: 10\n  precision: fp32\n  log_every: 10")
    .replace("steps: 12", f"steps: {STEPS}")
    .replace("snapshot_every: 4", "snapshot_every: 50\n  flip: true\n  reduction: flat")
    .replace("milestone_every: 6", f"milestone_every: {STEPS}")
    .replace("keep: 2", "keep: 9")
    .replace("grid: 4", "grid: 0")
    .replace("warmup: 2", "warmup: 20")
)
SAME_MODEL = 1e-3  # relative to the distance from the start; measured 1e-6
SAME_LOSS = 1e-6  # relative; measured 7e-8


def train(folder: Path, size: int, steps: int = STEPS) -> None:
    write_params(folder, SETTINGS.replace(f"steps: {STEPS}", f"steps: {steps}"))
    together(folder, size, "train")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_run(tmp_path_factory.mktemp("worlds"), SETTINGS)


@pytest.fixture(scope="module")
def undisturbed(prepared: Path) -> dict[int, Path]:
    """The folder of a run of each world size."""
    folders = {size: new_run(prepared, str(size), SETTINGS) for size in (1, 2, 3, 4)}
    for size, folder in folders.items():
        train(folder, size)
        assert {row["world_size"] for row in rows(folder)} == {size}
    return folders


@pytest.fixture(scope="module")
def start(prepared: Path) -> Tensors:
    return of_file(at_start(new_run(prepared, "start", SETTINGS)))


def losses_apart(one: Path, other: Path) -> float:
    """Return the largest relative difference between two loss curves."""
    pairs = zip(rows(one), rows(other), strict=True)
    return max(abs(a["loss"] - b["loss"]) / a["loss"] for a, b in pairs)


def models_apart(one: Path, other: Path, start: Tensors) -> float:
    """Return the distance between two models, relative to how far the first one moved."""
    return distance(of_file(final(other, STEPS)), of_file(final(one, STEPS)), start)


def test_one_to_four_workers_train_the_same_model(
    undisturbed: dict[int, Path], start: Tensors
) -> None:
    for size in (2, 3, 4):
        assert losses_apart(undisturbed[1], undisturbed[size]) <= SAME_LOSS
        assert models_apart(undisturbed[1], undisturbed[size], start) <= SAME_MODEL


def test_changing_the_number_of_workers_keeps_the_model(
    prepared: Path, undisturbed: dict[int, Path], start: Tensors
) -> None:
    folder = new_run(prepared, "changing", SETTINGS)
    for size, steps in ((1, 60), (3, 130), (2, STEPS)):
        train(folder, size, steps)
    worlds = {row["step"]: row["world_size"] for row in rows(folder)}
    logged = [row["step"] for row in rows(undisturbed[1])]
    assert worlds == {s: 1 if s <= 60 else 3 if s <= 130 else 2 for s in logged}
    assert losses_apart(undisturbed[1], folder) <= SAME_LOSS
    assert models_apart(undisturbed[1], folder, start) <= SAME_MODEL
