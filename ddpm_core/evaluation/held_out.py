"""Held-out images and their nearest training images: what nearness is without memory. Kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from ddpm_core.console import warn
from ddpm_core.data.dataset import PackedDataset
from ddpm_core.evaluation.memorisation import EXAMINED, Neighbours, nearest
from ddpm_core.evaluation.reference import FOLDER, forget
from ddpm_core.evaluation.statistics import shuffled
from ddpm_core.images import Pixels
from ddpm_core.storage import Corrupt, verify
from ddpm_core.workspace import Workspace, fingerprint

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
            return images, _load(workspace.path(key))
        except Corrupt as error:
            warn(f"{error} The neighbours of held-out images are searched again.")
    found = nearest(images, train, device)
    forget(workspace, "neighbours")
    with workspace.storage.new_folder(key) as folder:
        save_file(vars(found), folder / _FILE)
    return images, found


def _load(folder: Path) -> Neighbours:
    verify(folder)
    try:
        arrays = load_file(folder / _FILE)
        return Neighbours(
            arrays["distance"].astype(np.float64),
            arrays["index"].astype(np.int64),
            arrays["mirrored"].astype(np.bool_),
        )
    except Exception as error:
        raise Corrupt(f"{folder.name} is damaged: {error!r}.") from error
