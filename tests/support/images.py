"""Images and folders of images for the tests of prepare."""

from __future__ import annotations

import csv
import io
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ddpm_core.config import Config
from ddpm_core.data.dataset import PackedDataset, open_dataset
from ddpm_core.data.prepare import prepare
from ddpm_core.storage.workspace import Workspace


def config(source: Path | str, batch_size: int = 1, **prepare: Any) -> Config:
    """Return params that prepare a source as 8x8 images; by default none is held out."""
    settings = {"source": str(source), "image_size": 8, "holdout": 0.0, **prepare}
    size = settings["image_size"]
    network = {"multipliers": [1, 2], "attention": [size // 2]}
    train = {"batch_size": batch_size}
    return Config.model_validate({"prepare": settings, "model": network, "train": train})


def prepared(
    tmp_path: Path, source: Path | str, split: str = "train", **settings: Any
) -> PackedDataset:
    """Prepare into tmp_path/workspace and open the result."""
    workspace = Workspace.open(str(tmp_path / "workspace"))
    prepare(config(source, **settings), workspace)
    return open_dataset(workspace, split)  # type: ignore[arg-type]


def noise(seed: int, size: tuple[int, int] = (12, 10), mode: str = "RGB") -> Image.Image:
    """Return a random image that differs for every seed; `size` is (width, height)."""
    channels = len(Image.new(mode, (1, 1)).getbands())
    values = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], channels), np.uint8)
    return Image.fromarray(values[:, :, 0] if channels == 1 else values, mode)


def flat(color: Any, size: tuple[int, int] = (12, 12), mode: str = "RGB") -> Image.Image:
    return Image.new(mode, size, color)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def write(path: Path, content: bytes | str | Image.Image, **options: Any) -> Path:
    """Write a file and its parent folders; an image is saved as `kind` (default PNG)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, Image.Image):
        content = encoded(content, options.pop("kind", "PNG"), **options)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def write_classes(root: Path, classes: Iterable[str], each: int = 3, seed: int = 0) -> Path:
    """Write `each` different images into a folder for each class."""
    for name in classes:
        for number in range(each):
            seed += 1
            write(root / name / f"{number:03d}.png", noise(seed))
    return root


def rejected(workspace_root: Path) -> dict[str, str]:
    """Return the reason for each path in rejected.csv."""
    with (workspace_root / "data/rejected.csv").open(encoding="utf-8", newline="") as file:
        return {row["path"]: row["reason"] for row in csv.DictReader(file)}


def dies(chunk: Any) -> None:
    """Kill the worker, as the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def loaded(chunk: Any) -> set[str]:
    """Return the modules that a worker has imported."""
    return set(sys.modules)
