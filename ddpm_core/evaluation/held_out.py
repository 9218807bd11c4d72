"""Held-out images and their nearest training images: what nearness is without memory. Kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from ddpm_core.console import warn
from ddpm_core.data.dataset import PackedDataset
from ddpm_core.errors import Corrupt
from ddpm_core.evaluation.memorisation import EXAMINED, Neighbours, nearest
from ddpm_core.evaluation.reference import FOLDER, forget
from ddpm_core.evaluation.statistics import shuffled
from ddpm_core.sampling.images import Pixels
from ddpm_core.storage import verify
from ddpm_core.storage.files import read_tensors, save_tensors
from ddpm_core.storage.workspace import Workspace, fingerprint

RECIPE = 2  # raised when the same images would give other numbers
_FILE = "neighbours.safetensors"


def open_held_out(
    workspace: Workspace, train: PackedDataset, holdout: PackedDataset, device: torch.device
) -> tuple[Pixels, Neighbours]:
    """At most 2,000 held-out images (n, H, W, C) and their neighbours; (0, ...) where none are."""
    images = holdout.take(shuffled(len(holdout), EXAMINED))
    key = fingerprint([train.fingerprint, holdout.fingerprint, EXAMINED, RECIPE])
    key = f"{FOLDER}/neighbours-{key}"
    if workspace.storage.exists(key):
        try:
            return images, load(workspace.path(key), len(images), len(train))
        except Corrupt as error:
            warn(f"{error} The neighbours of held-out images are searched again.")
    found = nearest(images, train, device)
    forget(workspace, "neighbours")
    with workspace.storage.new_folder(key) as folder:
        arrays = {name: torch.from_numpy(array) for name, array in vars(found).items()}
        save_tensors(arrays, folder / _FILE)
    return images, found


def load(folder: Path, count: int, rows: int) -> Neighbours:
    """Of `count` images among `rows`. Raises Corrupt."""
    verify(folder)
    tensors = read_tensors(folder / _FILE)
    kinds = {"distance": np.float64, "index": np.int64, "mirrored": np.bool_}
    arrays = {name: tensor.numpy() for name, tensor in tensors.items() if name in kinds}
    if {name: (array.dtype, array.shape) for name, array in arrays.items()} != {
        name: (np.dtype(kind), (count,)) for name, kind in kinds.items()
    } or not ((arrays["index"] >= 0) & (arrays["index"] < rows)).all():
        raise Corrupt(f"{folder.name} is damaged: it holds no neighbours of {count} images.")
    return Neighbours(**arrays)
