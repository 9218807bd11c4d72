"""The pictures of an evaluation: a grid of each checkpoint's samples, and its closest pairs."""

from __future__ import annotations

import numpy as np
from PIL import Image

from ddpm_core.data.dataset import PackedDataset
from ddpm_core.evaluation.memorisation import Neighbours, closest
from ddpm_core.evaluation.statistics import shuffled
from ddpm_core.sampling.images import Pixels, grid, png, to_pil
from ddpm_core.storage.workspace import EVALUATION, Workspace

FOLDER = f"{EVALUATION}/pictures"
SIDE = 6  # images a row and rows
LARGEST = 96  # pixels a side in these pictures


def write_grid(workspace: Workspace, step: int, images: Pixels) -> None:
    """The first 36 samples of a step."""
    _write(workspace, f"grid-{step:08d}", grid(small(images[: SIDE * SIDE]), SIDE))


def write_real(workspace: Workspace, train: PackedDataset) -> None:
    """36 training images, to compare the samples with."""
    images = train.take(shuffled(len(train), SIDE * SIDE))
    _write(workspace, "real", grid(small(images), SIDE))


def write_neighbours(
    workspace: Workspace, name: str, images: Pixels, found: Neighbours, train: PackedDataset
) -> None:
    """The 16 closest pairs, four in a row: left the image, right its training image as compared."""
    which = closest(found)
    if len(which):
        real = train.take(found.index[which])
        turned = found.mirrored[which]
        real[turned] = real[turned][:, :, ::-1]
        pairs = np.concatenate([small(images[which]), small(real)], axis=2)
        _write(workspace, f"neighbours-{name}", grid(pairs, 4, max(1, pairs.shape[1] // 8)))


def small(images: Pixels) -> Pixels:
    """Images (n, H, W, C) averaged down to 96 a side, if they are larger."""
    height, width = images.shape[1:3]
    if max(height, width) <= LARGEST:
        return np.asarray(images)
    factor = LARGEST / max(height, width)
    size = (max(1, round(width * factor)), max(1, round(height * factor)))
    shrunk = [to_pil(image).resize(size, Image.Resampling.BOX) for image in images]
    return np.stack([np.asarray(image) for image in shrunk]).reshape(
        len(images), size[1], size[0], images.shape[3]
    )


def _write(workspace: Workspace, name: str, picture: Pixels) -> None:
    workspace.storage.write(f"{FOLDER}/{name}.png", png(picture))
