"""Whether a disturbed run ended as one that nobody disturbed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from .play import Playing, Worlds
from .schedule import STEPS

Tensors = dict[str, np.ndarray[Any, Any]]
TOLERANCE = 1e-3  # of the movement from the start, where the world changed


def judge(run: Playing, worlds: Worlds) -> None:
    """Raises AssertionError unless weights, averages, optimizer and log are as they should be.

    With one world size they are bitwise those of the undisturbed run of that size; with several,
    weights and averages differ by rounding.
    """
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(2, STEPS + 1, 2)), "rows are not in order"
    sizes = {int(row["world_size"]) for row in rows}
    assert sizes == worlds, f"world sizes in the log: {sizes}, scheduled: {worlds}"
    assert not [name for name in run.snapshots() if name.startswith(".")], run.snapshots()
    undisturbed = run.stage.undisturbed(min(sizes))
    ended, wanted = final(run.folder), final(undisturbed)
    if len(sizes) == 1:
        differ = sorted(n for n in wanted if not np.array_equal(_bits(ended[n]), _bits(wanted[n])))
        assert not differ, f"tensors that are not bitwise the same: {differ}"
        assert curve(rows) == curve(_rows(undisturbed)), "the loss curves differ"
    start = final(run.stage.undisturbed(0), step=1)
    for file in ("model", "ema-0.9"):
        far = distance(_of(ended, file), _of(wanted, file), _of(start, file))
        assert far < TOLERANCE, f"{file} is {far:.2g} of its movement away"
    if run.schedule.kind == "mlflow-down":
        check_mlflow(run, rows)


def final(folder: Path, step: int = STEPS) -> Tensors:
    """Every tensor of the last snapshot by `file/name`."""
    snapshot = folder / "workspace" / "snapshots" / f"step-{step:08d}"
    return {
        f"{file.stem}/{name}": array
        for file in snapshot.glob("*.safetensors")
        for name, array in load_file(file).items()
    }


def curve(rows: list[dict[str, float]]) -> list[tuple[float, ...]]:
    return [(row["step"], row["loss"], row["grad_norm"], row["lr"]) for row in rows]


def distance(a: Tensors, b: Tensors, start: Tensors) -> float:
    """The whole model's difference, relative to how far it moved from its start."""
    apart = sum(float(np.square(a[n].astype(np.float64) - b[n]).sum()) for n in b)
    moved = sum(float(np.square(b[n].astype(np.float64) - start[n]).sum()) for n in b)
    return float((apart / moved) ** 0.5)


def check_mlflow(run: Playing, rows: list[dict[str, float]]) -> None:
    """The server's history of every metric is log.jsonl, row for row."""
    from mlflow import MlflowClient

    client = MlflowClient(run.stage.server().uri)
    run_id = json.loads((run.workspace / "run.json").read_text())["mlflow"]["run_id"]
    numbers = [n for n, v in rows[0].items() if isinstance(v, int | float)]
    for name in sorted(set(numbers) - {"step", "time"}):
        history = client.get_metric_history(run_id, f"train/{name}")
        there = sorted((metric.step, metric.value) for metric in history)
        wanted = [(row["step"], row[name]) for row in rows]
        assert there == wanted, f"{name}: {len(there)} entries on the server, {len(wanted)} rows"
    assert client.get_run(run_id).info.status == "FINISHED", "the MLflow run has not ended"


def _of(tensors: Tensors, file: str) -> Tensors:
    return {n: t for n, t in tensors.items() if n.startswith(f"{file}/")}


def _bits(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.frombuffer(array.tobytes(), np.uint8)


def _rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(r) for r in (folder / "workspace/log.jsonl").read_text().splitlines()]
