"""A workspace of digits with samples of several checkpoints, ready to evaluate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddpm_core.config import Config
from ddpm_core.evaluation import in_domain, plots
from ddpm_core.evaluation.evaluate import evaluate
from ddpm_core.evaluation.freshness import stale
from ddpm_core.storage.workspace import RESULTS, Workspace
from support.digits_workspace import (
    Pixels,
    digits,
    make_config,
    put_data,
    put_samples,
    put_snapshot,
)


class Run:
    """A workspace of 8x8 digits. Samples are digits with noise, less at later steps."""

    def __init__(self, root: Path, **sections: Any) -> None:
        self.config = make_config(root, prepare={"image_size": 8}, **sections)
        self.workspace = Workspace.open(self.config.workspace)
        self.images, self.labels = digits(8)

    def put_data(self, **data: Any) -> str:
        return put_data(self.workspace, **{"images": self.images, "labels": self.labels, **data})

    def put_samples(self, step: int, noise: float, count: int = 100, **recipe: Any) -> Path:
        data = self.workspace.read_json("data/manifest.json")["fingerprint"]
        put_snapshot(self.workspace, step)
        drawn = noisy(self.images[400 : 400 + count], noise)
        return put_samples(self.workspace, step, drawn, data, **recipe)

    def results(self) -> dict[str, Any]:
        return self.workspace.read_json(RESULTS)

    def evaluate(self, **settings: Any) -> dict[int, dict[str, Any]]:
        changed = self.config.evaluate.model_copy(update=settings)
        config = self.config.model_copy(update={"evaluate": changed})
        return {row["step"]: row for row in evaluate(config, self.workspace)}

    def stale(self, config: Config | None = None) -> str | None:
        return stale(config or self.config, self.workspace)

    def row_times(self) -> list[int]:
        folder = self.workspace.path("evaluation/rows")
        return [path.stat().st_mtime_ns for path in sorted(folder.iterdir())]


@contextmanager
def in_haste() -> Iterator[None]:
    """Train classifiers for two steps and draw no plots, which take most of an evaluation."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_domain, "STEPS", (2, 2))
        patch.setattr(plots, "draw", lambda ranked: {})
        yield


def noisy(images: Pixels, deviation: float) -> Pixels:
    noise = np.random.default_rng(int(deviation)).normal(0, deviation, images.shape)
    return (images + noise).round().clip(0, 255).astype(np.uint8)
