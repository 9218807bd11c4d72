"""Another number of workers gives the same bits, where `train.reduction` is exact."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from program import TINY, ddpm, write_params
from safetensors.torch import load_file
from torch import nn

from ddpm_core import params
from ddpm_core.distributed import World
from ddpm_core.training.identity import differences, identity
from ddpm_core.training.reduction import Exact

EXACT = (
    TINY.replace("attention: [4]}", "attention: [4], dropout: 0.2, conditioning: class}")
    .replace("batch_size: 8", "batch_size: 7\n  reduction: exact\n  precision: fp32", 1)
    .replace("ema: [0.9]", "ema: [0.9]\n  flip: true")
    .replace("grid: 4", "grid: 0")
)


def test_one_two_and_three_workers_agree_bit_by_bit(tmp_path: Path) -> None:
    write_params(tmp_path, EXACT)
    ddpm(tmp_path, "prepare")
    runs = {1: (), 2: ("train.processes=2",), 3: ("train.processes=3", "train.microbatches=2")}
    results = {}
    for workers, settings in runs.items():
        folder = tmp_path / str(workers)
        (folder / "workspace").mkdir(parents=True)
        (folder / "workspace" / "data").symlink_to(tmp_path / "workspace" / "data")
        write_params(folder, EXACT)
        ddpm(folder, "train", *(part for s in settings for part in ("-S", s)))
        lines = (folder / "workspace/log.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert {row["world_size"] for row in rows} == {workers}
        last = folder / "workspace/snapshots/step-00000012"
        tensors = {
            (file.name, name): tensor
            for file in last.glob("*.safetensors")
            for name, tensor in load_file(file).items()
        }
        results[workers] = tensors, [(row["loss"], row["grad_norm"]) for row in rows]
    weights, curve = results[1]
    for other, other_curve in (results[2], results[3]):
        assert other_curve == curve
        assert other.keys() == weights.keys()
        assert all(torch.equal(other[name], weights[name]) for name in weights)


def test_the_exact_sum_is_the_mean_and_tells_what_it_cannot_hold() -> None:
    layer, world = nn.Linear(1, 1, bias=False), World(0, 1, torch.device("cpu"))

    def mean(values: list[float]) -> tuple[float, float]:
        reduction = Exact(layer, world, 1, len(values))
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


def test_the_reduction_is_part_of_what_a_run_is() -> None:
    flat = identity(params.load(), "data")
    exact = identity(params.load(None, ["train.reduction=exact"]), "data")
    assert differences(flat, exact) == ["train.reduction: flat -> exact"]
