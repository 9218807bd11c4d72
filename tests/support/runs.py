"""Read the results of a training run: log rows, tensors of a snapshot, and their distance."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load

from support.program import ddpm

Tensors = dict[str, np.ndarray[Any, Any]]


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return every row of the log."""
    text = (folder / "workspace" / "log.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def final(folder: Path, step: int) -> Tensors:
    """Return every tensor of a snapshot by `file/name`."""
    snapshot = folder / "workspace" / "snapshots" / f"step-{step:08d}"
    return tensors((path.name, path.read_bytes()) for path in snapshot.iterdir())


def tensors(files: Iterable[tuple[str, bytes]]) -> Tensors:
    """Return every tensor in files given by name and content."""
    return {
        f"{file.removesuffix('.safetensors')}/{name}": array
        for file, data in files
        if file.endswith(".safetensors")
        for name, array in load(data).items()
    }


def of_file(found: Tensors, file: str = "model") -> Tensors:
    return {name: array for name, array in found.items() if name.startswith(f"{file}/")}


def bits(found: Tensors) -> dict[str, bytes]:
    """Return bytes to compare bit by bit, including NaN and the sign of zero."""
    return {name: array.tobytes() for name, array in found.items()}


def at_start(folder: Path) -> Tensors:
    """Return the initial weights of a run, from one step with a tiny learning rate."""
    ddpm(folder, "train", "-S", "train.steps=1", "-S", "train.optimizer.lr=1e-30")
    return final(folder, 1)


def distance(a: Tensors, b: Tensors, start: Tensors) -> float:
    """Return the distance of `a` and `b` over all tensors, relative to how far `b` moved."""
    apart = sum(float(np.square(a[n].astype(np.float64) - b[n]).sum()) for n in b)
    moved = sum(float(np.square(b[n].astype(np.float64) - start[n]).sum()) for n in b)
    return float((apart / moved) ** 0.5)
