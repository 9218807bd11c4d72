"""The real images' side of every score: measured once for a data set and an extractor, and kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ddpm_core.console import progress, warn
from ddpm_core.data.dataset import Indices, PackedDataset
from ddpm_core.errors import Corrupt
from ddpm_core.evaluation.features import Extractor
from ddpm_core.evaluation.metrics import Moments
from ddpm_core.evaluation.statistics import BATCH, KEPT, Features, extract, shuffled
from ddpm_core.sampling.images import Pixels
from ddpm_core.storage import verify
from ddpm_core.storage.files import parse_object, read_tensors_and_metadata, save_tensors
from ddpm_core.storage.workspace import EVALUATION, Workspace, fingerprint

FOLDER = f"{EVALUATION}/reference"
RECIPE = 2  # raised when the same images would give other numbers
_FILE = "features.safetensors"


@dataclass(frozen=True)
class Reference:
    """Features of the training images, with the moments of all, and of held-out images.

    Held-out images that are training images too are left out: they would make the floor too low.
    """

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
            return load(workspace.path(key), extractor)
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
    held = _untrained(train, holdout)[:KEPT]
    name = f"evaluate: reference ({extractor.name})"
    with progress(name, len(train) + len(held), "images") as advance:
        return Reference(
            extractor,
            extract(extractor, in_order(train, shuffled(len(train))), advance, keep_logits=False),
            extract(extractor, in_order(holdout, held), advance),
        )


def _untrained(train: PackedDataset, holdout: PackedDataset) -> Indices:
    """Held-out images, in the order of `shuffled`, whose pixels are those of no training image.

    A source with splits of its own may have one in both, and pictures that differ may be the same
    once they are small.
    """
    order = shuffled(len(holdout))
    digests = list(_digests(holdout, order))
    held = set(digests)
    trained = {digest for digest in _digests(train, np.arange(len(train))) if digest in held}
    untrained: Indices = order[np.array([d not in trained for d in digests], dtype=bool)]
    return untrained


def _digests(data: PackedDataset, order: Indices) -> Iterator[bytes]:
    for images in in_order(data, order):
        yield from (hashlib.sha256(image.tobytes()).digest() for image in images)


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
    save_tensors(tensors, folder / _FILE, {"counts": json.dumps(counts)})


def load(folder: Path, extractor: Extractor) -> Reference:
    verify(folder)
    tensors, metadata = read_tensors_and_metadata(folder / _FILE)
    counts = parse_object(metadata.get("counts", "").encode(), f"{folder.name}/{_FILE}")
    parts = [_features(tensors, counts.get(name), name, folder) for name in ("train", "holdout")]
    return Reference(extractor, *parts)


def _features(tensors: dict[str, Tensor], count: Any, name: str, folder: Path) -> Features:
    """What `_save` has put under a name. Raises Corrupt where the sizes don't fit each other."""
    kept, logits = tensors.get(f"{name}.kept"), tensors.get(f"{name}.logits")
    mean, covariance = tensors.get(f"{name}.mean"), tensors.get(f"{name}.covariance")
    sizes = [tuple(part.shape) for part in (kept, mean, covariance) if part is not None]
    d = sizes[0][-1:] if sizes else ()
    wanted = [(len(kept), *d)] if kept is not None and kept.dim() == 2 else []
    wanted += [d, (*d, *d)] if isinstance(count, int) and count > 1 else []
    floats = all(part.is_floating_point() for part in tensors.values())
    if not wanted or sizes != wanted or not floats or kept is None:
        raise Corrupt(f"{folder.name} is damaged: its features of {name} have sizes {sizes}.")
    if logits is not None and (logits.dim() != 2 or not len(logits)):
        raise Corrupt(f"{folder.name} is damaged: its logits of {name} have no rows.")
    if mean is None or covariance is None:
        return Features(None, kept, logits)
    return Features(Moments(count, mean, covariance), kept, logits)
