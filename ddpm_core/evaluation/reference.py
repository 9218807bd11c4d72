"""Features and nearest neighbours of the real images, measured once and kept in the workspace.

Each kept folder is named after everything that its content depends on, so it is never out of date.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddpm_core.console import progress, warn
from ddpm_core.data.dataset import Indices, PackedDataset
from ddpm_core.errors import Corrupt
from ddpm_core.evaluation.features import BATCH, KEPT, Extractor, Features, extract, shuffled
from ddpm_core.evaluation.memorisation import EXAMINED, Neighbours, nearest
from ddpm_core.evaluation.metrics import Moments
from ddpm_core.sampling.images import Pixels
from ddpm_core.storage import verify
from ddpm_core.storage.files import (
    parse_object,
    read_tensors,
    read_tensors_and_metadata,
    save_tensors,
)
from ddpm_core.storage.workspace import EVALUATION, Workspace, fingerprint

FOLDER = f"{EVALUATION}/reference"
RECIPE = 2  # increase it when a change gives different features for the same images
NEIGHBOURS_RECIPE = 2  # the same for neighbours
_FEATURES = "features.safetensors"
_NEIGHBOURS = "neighbours.safetensors"


@dataclass(frozen=True)
class Reference:
    """Features of all training images, and of held-out images.

    Held-out images that are training images too are left out: they would make the floor too low.
    """

    extractor: Extractor
    train: Features
    holdout: Features


def open_reference(
    workspace: Workspace, extractor: Extractor, train: PackedDataset, holdout: PackedDataset
) -> Reference:
    """Return the reference for this data and extractor: the kept one, or a new one."""
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
            return load_reference(workspace.path(key), extractor)
        except Corrupt as error:
            warn(f"{error} The reference features are measured again.")
    reference = _measure(extractor, train, holdout)
    _remove_outdated(workspace, extractor.name)
    with workspace.storage.new_folder(key, {"facts": facts}) as folder:
        _save(reference, folder)
    return reference


def open_neighbours(
    workspace: Workspace, train: PackedDataset, holdout: PackedDataset, device: torch.device
) -> tuple[Pixels, Neighbours]:
    """Return at most 2,000 held-out images (n, H, W, C) and their nearest training images."""
    images = holdout.take(shuffled(len(holdout), EXAMINED))
    facts = [train.fingerprint, holdout.fingerprint, EXAMINED, NEIGHBOURS_RECIPE]
    key = f"{FOLDER}/neighbours-{fingerprint(facts)}"
    if workspace.storage.exists(key):
        try:
            return images, load_neighbours(workspace.path(key), len(images), len(train))
        except Corrupt as error:
            warn(f"{error} The neighbours of held-out images are searched again.")
    found = nearest(images, train, device)
    _remove_outdated(workspace, "neighbours")
    with workspace.storage.new_folder(key) as folder:
        arrays = {name: torch.from_numpy(array) for name, array in vars(found).items()}
        save_tensors(arrays, folder / _NEIGHBOURS)
    return images, found


def _remove_outdated(workspace: Workspace, name: str) -> None:
    """Remove the folders of a name that belong to other data. One of Inception takes 150 MB."""
    for folder in workspace.storage.names(FOLDER):
        if folder.startswith(f"{name}-"):
            workspace.storage.remove(f"{FOLDER}/{folder}")


def _measure(extractor: Extractor, train: PackedDataset, holdout: PackedDataset) -> Reference:
    held = _untrained(train, holdout)[:KEPT]
    name = f"evaluate: reference ({extractor.name})"
    with progress(name, len(train) + len(held), "images") as advance:
        return Reference(
            extractor,
            extract(extractor, _take(train, shuffled(len(train))), advance, keep_logits=False),
            extract(extractor, _take(holdout, held), advance),
        )


def _take(data: PackedDataset, order: Indices) -> Iterator[Pixels]:
    """Yield images in an order, uint8 (B, H, W, C) at a time."""
    for start in range(0, len(order), BATCH):
        yield data.take(order[start : start + BATCH])


def _untrained(train: PackedDataset, holdout: PackedDataset) -> Indices:
    """Return the held-out images whose pixels differ from every training image, `shuffled`.

    A source with its own splits may have an image in both. Different images may also become equal
    when they are scaled down.
    """
    order = shuffled(len(holdout))
    digests = list(_digests(holdout, order))
    held = set(digests)
    trained = {digest for digest in _digests(train, np.arange(len(train))) if digest in held}
    untrained: Indices = order[np.array([d not in trained for d in digests], dtype=bool)]
    return untrained


def _digests(data: PackedDataset, order: Indices) -> Iterator[bytes]:
    for images in _take(data, order):
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
    save_tensors(tensors, folder / _FEATURES, {"counts": json.dumps(counts)})


def load_reference(folder: Path, extractor: Extractor) -> Reference:
    """Return the reference in a folder. Raises Corrupt."""
    verify(folder)
    tensors, metadata = read_tensors_and_metadata(folder / _FEATURES)
    counts = parse_object(metadata.get("counts", "").encode(), f"{folder.name}/{_FEATURES}")
    parts = [_features(tensors, counts.get(name), name, folder) for name in ("train", "holdout")]
    return Reference(extractor, *parts)


def _features(tensors: dict[str, Tensor], count: Any, name: str, folder: Path) -> Features:
    """Return what `_save` stored under a name. Raises Corrupt if the shapes do not match."""
    kept, logits = tensors.get(f"{name}.kept"), tensors.get(f"{name}.logits")
    mean, covariance = tensors.get(f"{name}.mean"), tensors.get(f"{name}.covariance")
    sizes = [tuple(part.shape) for part in (kept, mean, covariance) if part is not None]
    d = sizes[0][-1:] if sizes else ()
    wanted = [(len(kept), *d)] if kept is not None and kept.dim() == 2 else []
    wanted += [d, (*d, *d)] if isinstance(count, int) and count > 1 else []
    floats = all(part.is_floating_point() for part in tensors.values())
    if not wanted or sizes != wanted or not floats or kept is None:
        raise Corrupt(f"{folder.name} is corrupt: its {name} features have shapes {sizes}.")
    if logits is not None and (logits.dim() != 2 or not len(logits)):
        raise Corrupt(f"{folder.name} is corrupt: its {name} logits have no rows.")
    if mean is None or covariance is None:
        return Features(None, kept, logits)
    return Features(Moments(count, mean, covariance), kept, logits)


def load_neighbours(folder: Path, count: int, rows: int) -> Neighbours:
    """Return the neighbours of `count` images among `rows` training images. Raises Corrupt."""
    verify(folder)
    tensors = read_tensors(folder / _NEIGHBOURS)
    kinds = {"distance": np.float64, "index": np.int64, "mirrored": np.bool_}
    arrays = {name: tensor.numpy() for name, tensor in tensors.items() if name in kinds}
    if {name: (array.dtype, array.shape) for name, array in arrays.items()} != {
        name: (np.dtype(kind), (count,)) for name, kind in kinds.items()
    } or not ((arrays["index"] >= 0) & (arrays["index"] < rows)).all():
        raise Corrupt(f"{folder.name} is corrupt: it does not hold neighbours of {count} images.")
    return Neighbours(**arrays)
