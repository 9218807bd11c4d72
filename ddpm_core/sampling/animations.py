"""The forward process to look at: images on their way to noise, one row for each schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from ddpm_core import rng
from ddpm_core.config import Config
from ddpm_core.data.dataset import open_dataset
from ddpm_core.diffusion.process import SCHEDULES, Schedule, make_schedule, q_sample
from ddpm_core.errors import UserError
from ddpm_core.rng import Purpose
from ddpm_core.sampling.images import (
    Pixels,
    enlarge,
    png,
    save_animation,
    to_model,
    to_pil,
    to_pixels,
)
from ddpm_core.sampling.sheet import GAP, sheet
from ddpm_core.storage.staging import staged_file
from ddpm_core.storage.workspace import Workspace

FRAMES = 40
HELD = 6  # more frames of the whole image, before anything happens to it
MOMENTS = 9
TILE = 128  # pixels a side to which small images are enlarged
LARGEST = 192  # and to which large ones are reduced
WIDTH = 900


def destroy_prepared(config: Config, workspace: Workspace, count: int, path: Path) -> str:
    """`destroy` for `count` prepared images and every schedule of so many timesteps that there is.

    Returns a sentence that says where.
    """
    data = open_dataset(workspace)
    spread = np.linspace(0, len(data) - 1, min(count, len(data))).round().astype(np.int64)
    timesteps = config.diffusion.timesteps
    schedules = [name for name in SCHEDULES if can_be(name, timesteps)]
    animation, strip = destroy(data.take(spread), schedules, timesteps, path, config.seed)
    return f"Wrote {animation} and {strip}."


def can_be(schedule: str, timesteps: int) -> bool:
    """Whether there is such a schedule of so few timesteps."""
    try:
        make_schedule(schedule, timesteps)
    except ValueError:
        return False
    return True


def destroy(
    images: Pixels, schedules: Sequence[str], timesteps: int, path: Path, seed: int = 0
) -> tuple[Path, Path]:
    """Draw images uint8 (N, H, W, C) being destroyed by each schedule in `timesteps` steps.

    Writes an animation to `path` (.gif) and, beside it, a strip of moments of the first image
    (.png); returns both. Each picture is one of q(x_t | x0), with the same noise for all steps and
    schedules, so that nothing but the schedule differs between rows. As many images are shown as
    fit. Raises UserError for a schedule, a number of steps or a file name that can't be, and where
    the two can't be written; what was there before then stays.
    """
    if path.suffix.lower() != ".gif":
        raise UserError(f"The animation is a GIF, but {path.name!r} given; end its name in .gif.")
    if len(images) == 0:
        raise UserError("There is no image to destroy.")
    try:
        processes = [make_schedule(name, timesteps) for name in schedules]
    except ValueError as error:
        raise UserError(str(error)) from error
    images = _of_a_size_to_show(images)
    strip = path.with_suffix(".png")
    with _both(path, strip) as (animation, still):
        whole, *rest = [_frame(images, processes, t, seed) for t in _moments(timesteps, FRAMES)]
        save_animation([whole] * HELD + [whole, *rest], animation, milliseconds=110)
        still.write_bytes(png(_strip(images[:1], processes, _moments(timesteps, MOMENTS), seed)))
    return path, strip


@contextmanager
def _both(path: Path, strip: Path) -> Iterator[tuple[Path, Path]]:
    """Where to write the two, which have their names once both are whole. Raises UserError."""
    try:
        for one in (path, strip):
            if one.is_dir():
                raise UserError(f"{one} is a folder: give the animation another name.")
        if strip.exists() and not path.exists():  # an earlier one would have left both
            raise UserError(
                f"{strip} is there already, and the strip beside {path.name} would take its place: "
                "give the animation another name."
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        with staged_file(path) as animation, staged_file(strip) as still:
            yield animation, still
            animation.replace(path)
            still.replace(strip)
    except OSError as error:
        raise UserError(
            f"Cannot write {path} and {strip.name}: {error.strerror or error}."
        ) from error


def noisy(images: Pixels, schedule: Schedule, t: int, seed: int) -> Pixels:
    """Images uint8 (N, H, W, C) after timestep t, or as they are where t is -1."""
    if t < 0:
        return images
    x0 = to_model(torch.from_numpy(np.ascontiguousarray(images)))
    noise = rng.normal(rng.key(Purpose.NOISE, seed), torch.arange(len(images)), x0.shape[1:])
    pixels: Pixels = to_pixels(q_sample(x0, noise, schedule.alphas_bar[t])).numpy()
    return pixels


def _moments(timesteps: int, count: int) -> list[int]:
    """Evenly spaced timesteps from -1, the image itself, to the last; no more than there are."""
    spaced = np.linspace(-1, timesteps - 1, min(count, timesteps + 1))
    return [round(t) for t in spaced.tolist()]


def _of_a_size_to_show(images: Pixels) -> Pixels:
    """As many of the images as fit beside each other, none of them too large."""
    if max(images.shape[1:3]) > LARGEST:
        images = np.stack([_reduced(image) for image in images[: WIDTH // LARGEST]])
    shown = enlarge(images[0], TILE).shape[1] + GAP
    return images[: max(1, WIDTH // shown)]


def _reduced(image: Pixels) -> Pixels:
    picture = to_pil(image)
    picture.thumbnail((LARGEST, LARGEST), Image.Resampling.LANCZOS)
    return np.asarray(picture).reshape(picture.height, picture.width, image.shape[-1])


def _frame(images: Pixels, schedules: Sequence[Schedule], t: int, seed: int) -> Pixels:
    """One picture of the animation: a row of images a schedule, and how far the process is."""
    timesteps = schedules[0].timesteps
    return sheet(
        rows=[_enlarged(noisy(images, schedule, t, seed)) for schedule in schedules],
        names=[schedule.name for schedule in schedules],
        notes=[f"image {_share(schedule, t)}" for schedule in schedules],
        heading=f"step {t + 1} of {timesteps}",
        done=(t + 1) / timesteps,
    )


def _strip(images: Pixels, schedules: Sequence[Schedule], moments: list[int], seed: int) -> Pixels:
    """One image at some moments, a row a schedule; under each how much of it is left."""
    return sheet(
        rows=[
            _enlarged(np.concatenate([noisy(images, schedule, t, seed) for t in moments]))
            for schedule in schedules
        ],
        names=[schedule.name for schedule in schedules],
        captions=[[_share(schedule, t) for t in moments] for schedule in schedules],
        columns=[f"step {t + 1}" for t in moments],
        heading="What is left of an image, in percent of the variance",
    )


def _share(schedule: Schedule, t: int) -> str:
    """alpha_bar, the image's share of the variance."""
    return f"{100 * float(schedule.alphas_bar[t]) if t >= 0 else 100:.0f} %"


def _enlarged(images: Pixels) -> Pixels:
    return np.stack([enlarge(image, TILE) for image in images])
