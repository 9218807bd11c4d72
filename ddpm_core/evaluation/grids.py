"""PNG grids of images: the samples of each checkpoint, and the nearest pairs."""

from __future__ import annotations

import numpy as np
from PIL import Image

from ddpm_core.data.dataset import PackedDataset
from ddpm_core.evaluation.features import shuffled
from ddpm_core.evaluation.memorisation import Neighbours, closest
from ddpm_core.sampling.images import Pixels, grid, png, to_pil
from ddpm_core.storage.workspace import PICTURES, Workspace

SIDE = 6  # images per row and per column
LARGEST = 96  # pixels per side of an image


def write_samples(workspace: Workspace, step: int, images: Pixels) -> None:
    """Write a grid of the first 36 samples of a step."""
    _write(workspace, f"grid-{step:08d}", grid(shrink(images[: SIDE * SIDE]), SIDE))


def read_samples(workspace: Workspace, step: int) -> bytes | None:
    """Return the PNG that `write_samples` wrote for a step, or None."""
    try:
        return workspace.storage.read(f"{PICTURES}/grid-{step:08d}.png")
    except (FileNotFoundError, NotADirectoryError):
        return None


def write_real(workspace: Workspace, train: PackedDataset) -> None:
    """Write a grid of 36 training images, to compare the samples with."""
    images = train.take(shuffled(len(train), SIDE * SIDE))
    _write(workspace, "real", grid(shrink(images), SIDE))


def write_neighbours(
    workspace: Workspace, name: str, images: Pixels, found: Neighbours, train: PackedDataset
) -> None:
    """Write the 16 closest pairs, four per row: an image, then its nearest training image.

    The training image is mirrored if its mirror image is the nearer one.
    """
    which = closest(found)
    if len(which):
        real = train.take(found.index[which])
        mirrored = found.mirrored[which]
        real[mirrored] = real[mirrored][:, :, ::-1]
        pairs = np.concatenate([shrink(images[which]), shrink(real)], axis=2)
        _write(workspace, f"neighbours-{name}", grid(pairs, 4, max(1, pairs.shape[1] // 8)))


def shrink(images: Pixels) -> Pixels:
    """Average images (n, H, W, C) down to 96 per side if they are larger."""
    height, width = images.shape[1:3]
    if max(height, width) <= LARGEST:
        return np.asarray(images)
    factor = LARGEST / max(height, width)
    size = (max(1, round(width * factor)), max(1, round(height * factor)))
    shrunk = [to_pil(image).resize(size, Image.Resampling.BOX) for image in images]
    return np.stack([np.asarray(image) for image in shrunk]).reshape(
        len(images), size[1], size[0], images.shape[3]
    )


def _write(workspace: Workspace, name: str, image: Pixels) -> None:
    workspace.storage.write(f"{PICTURES}/{name}.png", png(image))
