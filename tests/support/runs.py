"""What a training run left: rows of its log, tensors of a snapshot, and how far they moved."""

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
    """Every line of the log."""
    text = (folder / "workspace" / "log.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def final(folder: Path, step: int) -> Tensors:
    """Every tensor of a snapshot by `file/name`."""
    snapshot = folder / "workspace" / "snapshots" / f"step-{step:08d}"
    return tensors((path.name, path.read_bytes()) for path in snapshot.iterdir())


def tensors(files: Iterable[tuple[str, bytes]]) -> Tensors:
    """Every tensor of a snapshot's files, given by name and content."""
    return {
        f"{file.removesuffix('.safetensors')}/{name}": array
        for file, data in files
        if file.endswith(".safetensors")
        for name, array in load(data).items()
    }


def of_file(found: Tensors, file: str = "model") -> Tensors:
    return {name: array for name, array in found.items() if name.startswith(f"{file}/")}


def bits(found: Tensors) -> dict[str, bytes]:
    """To compare bit by bit, NaN and the sign of zero included."""
    return {name: array.tobytes() for name, array in found.items()}


def at_start(folder: Path) -> Tensors:
    """What training begins with in an empty run: one step of a vanishing rate."""
    ddpm(folder, "train", "-S", "train.steps=1", "-S", "train.optimizer.lr=1e-30")
    return final(folder, 1)


def distance(a: Tensors, b: Tensors, start: Tensors) -> float:
    """The whole model's difference, relative to how far `b` moved from its start."""
    apart = sum(float(np.square(a[n].astype(np.float64) - b[n]).sum()) for n in b)
    moved = sum(float(np.square(b[n].astype(np.float64) - start[n]).sum()) for n in b)
    return float((apart / moved) ** 0.5)
