"""Any number of workers, constant or changing, trains the same model up to rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults.attempt import together
from support.program import TINY, new_run, prepare_run, write_params
from support.runs import Tensors, at_start, distance, final, of_file, rows

STEPS = 60
# Neither 3 nor 4 divides the batch size. There is a warm-up because rounding decides the sign of
# Adam's first steps if a gradient is almost zero.
SETTINGS = (
    TINY.replace("attention: [8]}", "attention: [], dropout: 0.1, conditioning: class}")
    .replace("batch_size: 8\n  log_every: 2", "batch_size: 10\n  precision: fp32\n  log_every: 10")
    .replace("steps: 12", f"steps: {STEPS}")
    .replace("snapshot_every: 4", "snapshot_every: 20\n  flip: true\n  reduction: flat")
    .replace("milestone_every: 6", f"milestone_every: {STEPS}")
    .replace("keep: 2", "keep: 9")
    .replace("grid: 4", "grid: 0")
    .replace("warmup: 2", "warmup: 10")
)
SAME_MODEL = 1e-3  # relative to the distance from the start; measured 1e-6
SAME_LOSS = 1e-6  # relative; measured 7e-8


def train(folder: Path, size: int, steps: int) -> None:
    write_params(folder, SETTINGS.replace(f"steps: {STEPS}", f"steps: {steps}"))
    together(folder, size, "train")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_run(tmp_path_factory.mktemp("worlds"), SETTINGS)


@pytest.fixture(scope="module")
def alone(prepared: Path) -> Path:
    """The folder of a run of one worker."""
    folder = new_run(prepared, "alone", SETTINGS)
    train(folder, 1, STEPS)
    return folder


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


@pytest.mark.slow
@pytest.mark.parametrize("worlds", [{STEPS: 4}, {20: 1, 40: 3, STEPS: 2}])
def test_any_workers_train_the_model_of_one(
    prepared: Path, alone: Path, start: Tensors, worlds: dict[int, int]
) -> None:
    """`worlds` is the number of workers up to a step."""
    folder = new_run(prepared, f"{len(worlds)}-worlds", SETTINGS)
    for last, size in worlds.items():
        train(folder, size, last)
    logged = {row["step"]: row["world_size"] for row in rows(folder)}
    assert list(logged) == [row["step"] for row in rows(alone)]
    for step, size in logged.items():
        assert size == next(size for last, size in worlds.items() if step <= last)
    assert losses_apart(alone, folder) <= SAME_LOSS
    assert models_apart(alone, folder, start) <= SAME_MODEL
