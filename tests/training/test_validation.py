"""The held-out loss: its value, its cost, its trend, and that training does not depend on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from faults.attempt import together
from support.digits_workspace import digits, put_data
from support.program import TINY, ddpm, new_run, prepare_run, settings
from support.runs import bits, final, rows

from ddpm_core import rng
from ddpm_core.config import Train
from ddpm_core.config import load as params
from ddpm_core.data.dataset import open_dataset
from ddpm_core.evaluation.curves import loss_curves
from ddpm_core.runtime.distributed import World
from ddpm_core.sampling.images import to_model
from ddpm_core.storage.workspace import Workspace
from ddpm_core.tracking.validation import BINS, Measurement, key, measurements, trend
from ddpm_core.training.identity import identity
from ddpm_core.training.init import fresh_network
from ddpm_core.training.optim import Execution
from ddpm_core.training.state import TrainState
from ddpm_core.training.step import next_batch, step
from ddpm_core.training.validation import Validation, image_count, is_due

SETTINGS = TINY.replace("  grid: 4", "  grid: 0\n  validate_every: 4\n  precision: fp32")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_run(tmp_path_factory.mktemp("validation"), SETTINGS)


def losses(folder: Path) -> dict[int, dict[str, float]]:
    """Return the losses of a run by step."""
    return {
        row["step"]: {name: value for name, value in row.items() if name.startswith("val_")}
        for row in rows(folder)
        if "val_loss" in row
    }


def state_on(
    root: Path, held_out: int, train: int, **given: object
) -> tuple[TrainState, Workspace]:
    """Return a state before its first step, and its workspace with so many digits of 8x8."""
    images, labels = digits(8)
    workspace = Workspace.open(str(root))
    count = held_out + train
    put_data(workspace, images[:count], labels[:count], held_out=held_out)
    values = {"prepare": {"image_size": 8}, "model": {"channels": 8, "multipliers": [1]}}
    config = params.validate({**values, "train": {"precision": "fp32", **given}})
    data, world = open_dataset(workspace), World(0, 1, torch.device("cpu"))
    model, _ = fresh_network(config, data)
    return TrainState.create(config, world, Execution("fp32", False), model), workspace


def train_for(state: TrainState, workspace: Workspace, steps: int) -> None:
    data = open_dataset(workspace)
    for _ in range(steps):
        step(state, next_batch(state.config, data, state.world, state.step), torch.zeros(1))


def test_losses_are_those_of_the_formula(tmp_path: Path) -> None:
    state, workspace = state_on(tmp_path, 40, 200, batch_size=16, ema=[0.5])
    train_for(state, workspace, 3)
    before = {name: tensor.clone() for name, tensor in state.model.state_dict().items()}
    validation = Validation.create(state, workspace, open_dataset(workspace))
    assert validation is not None
    found = validation.measure(state)
    assert all(torch.equal(before[n], tensor) for n, tensor in state.model.state_dict().items())
    for split in ("held_out", "train"):
        probe = validation.probes[split]
        alpha_bar = state.alphas_bar[probe.t].view(-1, 1, 1, 1)
        x0 = to_model(probe.pixels)
        noise = rng.normal(
            rng.key(rng.Purpose.VALIDATION, 0), torch.arange(len(x0)), x0.shape[1:], 0
        )
        seen = (alpha_bar.sqrt() * x0 + (1 - alpha_bar).sqrt() * noise).float()
        v = alpha_bar.sqrt() * noise - (1 - alpha_bar).sqrt() * x0
        for average, weights in (("", before), ("ema", state.emas[0].tensors)):
            state.model.load_state_dict(weights)
            with torch.no_grad():
                error = (state.model(seen, probe.t) - v).square().mean((1, 2, 3))
            snr = (alpha_bar / (1 - alpha_bar)).flatten()
            weighted = snr.clamp(max=5.0) / (snr + 1) * error
            assert found[key(split, average)] == pytest.approx(float(weighted.mean()), rel=1e-4)
            lowest = weighted.view(BINS, -1)[0].mean()
            assert found[key(split, average, 1)] == pytest.approx(float(lowest), rel=1e-4)
    assert found["val_loss"] != found["val_loss_ema"]


def test_splits_have_their_own_images_at_the_same_levels(tmp_path: Path) -> None:
    state, workspace = state_on(tmp_path, 5, 100)
    validation = Validation.create(state, workspace, open_dataset(workspace))
    assert validation is not None
    held_out, train = validation.probes["held_out"], validation.probes["train"]
    assert torch.equal(held_out.t, train.t)
    assert bool((held_out.t.diff() >= 0).all())
    images = {image.tobytes() for image in np.asarray(open_dataset(workspace, "holdout").images)}
    assert {image.tobytes() for image in held_out.pixels.numpy()} == images
    assert not {image.tobytes() for image in train.pixels.numpy()} & images


def test_weights_do_not_depend_on_validation(prepared: Path) -> None:
    on, off = new_run(prepared, "on", SETTINGS), new_run(prepared, "off", SETTINGS)
    ddpm(on, "train")
    ddpm(off, "train", *settings("train.validate_every=0"))
    assert bits(final(on, 12)) == bits(final(off, 12))
    assert sorted(losses(on)) == [4, 8, 12]
    assert not losses(off)


@pytest.mark.slow
def test_two_workers_and_a_resumed_run_measure_the_same(prepared: Path) -> None:
    exact = SETTINGS.replace("precision: fp32", "precision: fp32\n  reduction: exact")
    whole, resumed = new_run(prepared, "whole", exact), new_run(prepared, "resumed", exact)
    ddpm(whole, "train")
    ddpm(resumed, "train", *settings("train.steps=8"))
    together(resumed, 2, "train")
    assert losses(resumed) == losses(whole)


def test_end_of_training_and_status_name_the_held_out_loss(prepared: Path) -> None:
    run = new_run(prepared, "named", SETTINGS)
    said = ddpm(run, "train")
    value = losses(run)[12]["val_loss_ema"]
    expected = f"The held-out loss is {value:.4g} at step 12, the lowest so far."
    assert expected in said.replace("\n", " ")
    assert expected in ddpm(run, "status").replace("\n", " ")


def test_run_without_held_out_images_says_so(prepared: Path) -> None:
    run = new_run(prepared, "none", SETTINGS, "empty")
    said = ddpm(run, "prepare", *settings("prepare.holdout=0"))
    said = ddpm(run, "train", *settings("prepare.holdout=0"))
    assert "without held-out images, their loss is not measured" in said
    assert not losses(run)


@pytest.mark.slow
def test_loss_of_memorized_images_parts_from_held_out_ones(tmp_path: Path) -> None:
    given = {"batch_size": 8, "ema": [0.9], "optimizer": {"lr": 5e-3, "warmup": 10}}
    state, workspace = state_on(tmp_path, 40, 4, **given)
    validation = Validation.create(state, workspace, open_dataset(workspace))
    assert validation is not None
    found: list[Measurement] = []
    for _ in range(6):
        train_for(state, workspace, 40)
        found.append({"step": state.step, **validation.measure(state)})
    last = found[-1]
    assert last["val_train_loss_ema"] < 0.6 * last["val_loss_ema"]
    happening = trend(found)
    assert happening is not None
    assert happening.rises


@pytest.mark.parametrize(
    ("every", "batch", "count"),
    [(200, 32, 72), (1, 8, 64), (5000, 128, 1024), (1000, 32, 360)],
)
def test_validation_takes_less_than_2_percent(every: int, batch: int, count: int) -> None:
    assert image_count(Train(validate_every=every, batch_size=batch)) == count
    if count > 64:
        assert 4 * count / 3 / batch / every < 0.02


def test_validation_is_due_at_the_first_row_after_a_multiple() -> None:
    assert [s for s in range(20, 220, 20) if is_due(50, s, 20)] == [60, 100, 160, 200]


def made_up(values: list[float]) -> list[Measurement]:
    return [
        {"step": 100 * i, "val_loss": value, "val_train_loss": 1 / i}
        | {key(split, "", part): value for split in ("held_out", "train") for part in range(1, 9)}
        for i, value in enumerate(values, start=1)
    ]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3, 2, 1], "is 1 at step 300, the lowest so far."),
        ([3, 1, 1.2, 1.2], "is 1.2 at step 400; lowest: 1 at step 200."),
        ([3, 1, 1.2, 1.005, 1.3], "is 1.3 at step 500; lowest: 1 at step 200."),
        (
            [3, 1, 1.2, 1.1, 1.3],
            "rises from step 200 on, from 1 to 1.3: the network memorizes. The best milestone by "
            "this loss is step 250.",
        ),
    ],
)
def test_trend_names_the_step_from_which_the_loss_rises(values: list[float], expected: str) -> None:
    found = trend(made_up(values))
    assert found is not None
    assert found.sentence([0, 250, 500]) == f"The held-out loss {expected}"


def test_curves_show_both_splits_by_step_and_level() -> None:
    by_step, by_level = loss_curves(made_up([3, 1, 1.2]))
    assert by_step.lines[0].points == [(100, 3), (200, 1), (300, 1.2)]
    assert by_step.lines[1].points == [(100, 1), (200, 1 / 2), (300, 1 / 3)]
    assert by_step.mark == (200, 1)
    assert by_level.lines[0].points == [(float(part), 1.2) for part in range(1, 9)]
    assert loss_curves([]) == []
    assert trend([]) is None


def test_rows_without_losses_are_no_measurements(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(
        '{"step": 1, "loss": 2}\n{"step": 2, "val_loss": "x"}\n{"step": 3, "val_loss": 1.5}\n'
    )
    assert measurements(Workspace.open(str(tmp_path))) == [{"step": 3, "val_loss": 1.5}]


def test_measuring_is_no_part_of_the_identity() -> None:
    given = params.validate({})
    without = given.model_copy(
        update={"train": given.train.model_copy(update={"validate_every": 0})}
    )
    assert identity(given, "data") == identity(without, "data")
