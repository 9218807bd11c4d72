"""The real images' side of every score: measured once for a data set and an extractor, and kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from ddpm_core.console import progress, warn
from ddpm_core.data.dataset import Indices, PackedDataset
from ddpm_core.evaluation.extractors import Extractor
from ddpm_core.evaluation.metrics import Moments
from ddpm_core.evaluation.statistics import BATCH, KEPT, Features, extract, shuffled
from ddpm_core.images import Pixels
from ddpm_core.storage import Corrupt, verify
from ddpm_core.workspace import EVALUATION, Workspace, fingerprint

FOLDER = f"{EVALUATION}/reference"
RECIPE = 1  # raised when the same images would give other numbers
_FILE = "features.safetensors"


@dataclass(frozen=True)
class Reference:
    """Features of the training images, with the moments of all, and of held-out images."""

    extractor: Extractor
    train: Features
    holdout: Features


def open_reference(
    workspace: Workspace, extractor: Extractor, train: PackedDataset, holdout: PackedDataset
) -> Reference:
    """The kept one if it is of this data, extractor and weights, and whole; else a new one."""
    facts = {
        "data": train.fingerprint,
        "holdout": holdout.fingerprint,
        "extractor": extractor.fingerprint,
        "kept": KEPT,
        "recipe": RECIPE,
    }
    key = f"{FOLDER}/{extractor.name}-{fingerprint(facts)}"
    if workspace.storage.exists(key):
        try:
            return _load(workspace.path(key), extractor)
        except Corrupt as error:
            warn(f"{error} The reference is measured again.")
    reference = _measure(extractor, train, holdout)
    forget(workspace, extractor.name)
    with workspace.storage.new_folder(key, {"facts": facts}) as folder:
        _save(reference, folder)
    return reference


def in_order(data: PackedDataset, order: Indices) -> Iterator[Pixels]:
    """Batches of images (B, H, W, C) uint8 in an order."""
    for start in range(0, len(order), BATCH):
        yield data.take(order[start : start + BATCH])


def forget(workspace: Workspace, name: str) -> None:
    """Remove what is kept under a name of other data; a reference for Inception has 150 MB."""
    for folder in workspace.storage.names(FOLDER):
        if folder.startswith(f"{name}-"):
            workspace.storage.remove(f"{FOLDER}/{folder}")


def _measure(extractor: Extractor, train: PackedDataset, holdout: PackedDataset) -> Reference:
    held = shuffled(len(holdout), KEPT)
    name = f"evaluate: reference ({extractor.name})"
    with progress(name, len(train) + len(held), "images") as advance:
        return Reference(
            extractor,
            extract(extractor, in_order(train, shuffled(len(train))), advance, keep_logits=False),
            extract(extractor, in_order(holdout, held), advance),
        )


def _save(reference: Reference, folder: Path) -> None:
    tensors: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    for name, features in (("train", reference.train), ("holdout", reference.holdout)):
        tensors[f"{name}.kept"] = features.kept
        if features.logits is not None:
            tensors[f"{name}.logits"] = features.logits
        if features.moments is not None:
            tensors[f"{name}.mean"] = features.moments.mean
            tensors[f"{name}.covariance"] = features.moments.covariance
            counts[name] = features.moments.count
    save_file(tensors, folder / _FILE, {"counts": json.dumps(counts)})


def _load(folder: Path, extractor: Extractor) -> Reference:
    verify(folder)
    try:
        tensors = load_file(folder / _FILE)
        parts = [_features(tensors, name, folder) for name in ("train", "holdout")]
    except Exception as error:
        raise Corrupt(f"{folder.name} is damaged: {error!r}.") from error
    return Reference(extractor, *parts)


def _features(tensors: dict[str, Tensor], name: str, folder: Path) -> Features:
    moments = None
    if f"{name}.mean" in tensors:
        count = _counts(folder)[name]
        moments = Moments(count, tensors[f"{name}.mean"], tensors[f"{name}.covariance"])
    return Features(moments, tensors[f"{name}.kept"], tensors.get(f"{name}.logits"))


def _counts(folder: Path) -> dict[str, Any]:
    from safetensors import safe_open

    with safe_open(folder / _FILE, framework="pt") as file:
        return dict(json.loads(file.metadata()["counts"]))
