"""With `train.reduction: exact`, every number of workers gives the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from faults.attempt import together
from support.program import TINY, new_run, prepare_run, settings
from support.runs import bits, final, rows
from torch import nn

from ddpm_core.config import load as params
from ddpm_core.runtime.distributed import World
from ddpm_core.training.identity import differences, identity
from ddpm_core.training.reduction import Exact

EXACT = (
    TINY.replace("attention: [8]}", "attention: [8], dropout: 0.2, conditioning: class}")
    .replace("batch_size: 8", "batch_size: 7\n  reduction: exact\n  precision: fp32", 1)
    .replace("ema: [0.9]", "ema: [0.9]\n  flip: true\n  augment: edm\n  balance: classes")
    .replace("grid: 4", "grid: 0")
)


@pytest.mark.slow
def test_one_to_three_workers_give_the_same_bits(tmp_path: Path) -> None:
    prepare_run(tmp_path, EXACT)
    runs = {1: (), 2: (), 3: ("train.microbatches=2",)}
    results = {}
    for workers, given in runs.items():
        folder = new_run(tmp_path, str(workers), EXACT)
        together(folder, workers, "train", *settings(*given))
        logged = rows(folder)
        assert {row["world_size"] for row in logged} == {workers}
        curve = [(row["loss"], row["grad_norm"]) for row in logged]
        results[workers] = bits(final(folder, 12)), curve
    assert results[1] == results[2] == results[3]


def test_exact_reduction_is_the_mean_and_nan_on_overflow() -> None:
    layer, world = nn.Linear(1, 1, bias=False), World(0, 1, torch.device("cpu"))

    def mean(values: list[float]) -> tuple[float, float]:
        reduction = Exact(list(layer.parameters()), world, 1, len(values))
        for value in values:
            loss = (layer.weight * value).sum() / len(values)
            reduction.add(loss, loss)
        loss = reduction.finish(torch.zeros(()))
        assert layer.weight.grad is not None
        return float(layer.weight.grad), float(loss)

    nn.init.ones_(layer.weight)
    assert mean([1.0, -3.0, 4.0, 0.5]) == (0.625, 0.625)
    assert all(value != value for value in mean([1.0, 1e7]))
    assert all(value != value for value in mean([1.0, float("inf")]))


def test_reduction_is_part_of_the_identity() -> None:
    flat = identity(params.load(), "data")
    exact = identity(params.load(None, ["train.reduction=exact"]), "data")
    assert differences(flat, exact) == ["train.reduction: flat -> exact"]
