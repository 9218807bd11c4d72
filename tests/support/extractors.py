"""Digits and a trained in-domain classifier for the tests of extractors."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch

from ddpm_core.data.dataset import PackedDataset, open_dataset
from ddpm_core.evaluation.in_domain import (
    InDomain,
    train_extractor,
)
from ddpm_core.storage.workspace import Workspace
from support.digits_workspace import (
    digits,
    put_data,
)

CPU = torch.device("cpu")


def workspace_at(root: Path, **data: Any) -> Workspace:
    workspace = Workspace.open(str(root))
    images, labels = digits()
    put_data(workspace, **{"images": images, "labels": labels, **data})
    return workspace


def splits(workspace: Workspace) -> tuple[PackedDataset, PackedDataset]:
    return open_dataset(workspace), open_dataset(workspace, "holdout")


@functools.cache
def trained(seed: int = 0, steps: int | None = None) -> InDomain:
    with tempfile.TemporaryDirectory() as folder:
        return train_extractor(*splits(workspace_at(Path(folder))), seed, steps)


def few(count: int = 3) -> torch.Tensor:
    return torch.from_numpy(digits()[0][:count])
