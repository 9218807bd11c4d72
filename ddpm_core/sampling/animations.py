"""Animate the forward process: images on their way to noise, one row for each schedule."""

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
from ddpm_core.sampling.images import Pixels, enlarge, png, to_model, to_pil, to_pixels
from ddpm_core.sampling.sheet import GAP, chart, save_animation, sheet
from ddpm_core.storage.staging import staged_file
from ddpm_core.storage.workspace import Workspace

FRAMES = 40
HELD = 6  # extra frames of the clean image at the start
MOMENTS = 9  # images in a row of the strip
TILE = 128  # pixels per side that small images are enlarged to
LARGEST = 192  # pixels per side that large images are reduced to
WIDTH = 900  # pixels
SNR_TICKS = {
    4.0: "10,000",
    2.0: "100",
    0.0: "1",
    -2.0: "0.01",
    -4.0: "0.0001",
}  # by their logarithm


def strip_of_prepared(config: Config, workspace: Workspace) -> bytes:
    """Return the strip of the first prepared image and every possible schedule, as a PNG."""
    diffusion = config.diffusion
    names = [name for name in SCHEDULES if supports(name, diffusion.timesteps)]
    processes = [
        make_schedule(name, diffusion.timesteps, diffusion.zero_terminal_snr) for name in names
    ]
    images = _fit(open_dataset(workspace).take(np.zeros(1, np.int64)))
    return png(_strip(images, processes, _moments(diffusion.timesteps, MOMENTS), config.seed))


def destroy_prepared(config: Config, workspace: Workspace, count: int, path: Path) -> str:
    """Run `destroy` on `count` prepared images and every schedule that has enough timesteps.

    Returns a message that names the files. Raises UserError as `destroy` does.
    """
    data = open_dataset(workspace)
    spread = np.linspace(0, len(data) - 1, min(count, len(data))).round().astype(np.int64)
    timesteps = config.diffusion.timesteps
    schedules = [name for name in SCHEDULES if supports(name, timesteps)]
    zero = config.diffusion.zero_terminal_snr
    animation, strip = destroy(data.take(spread), schedules, timesteps, path, config.seed, zero)
    return f"Wrote {animation} and {strip}."


def supports(schedule: str, timesteps: int) -> bool:
    """Return whether a schedule is defined for so few timesteps."""
    try:
        make_schedule(schedule, timesteps)
    except ValueError:
        return False
    return True


def destroy(
    images: Pixels,
    schedules: Sequence[str],
    timesteps: int,
    path: Path,
    seed: int = 0,
    zero_terminal_snr: bool = False,
) -> tuple[Path, Path]:
    """Animate how each schedule turns images uint8 (N, H, W, C) into noise in `timesteps` steps.

    Writes an animation to `path` (.gif) and, beside it, a strip of moments of the first image
    (.png). Each frame shows draws from q(x_t | x0). The noise is the same at every step and for
    every schedule, so that rows differ by their schedule alone. Images that do not fit into the
    width are left out.

    Returns:
        The paths of the animation and the strip.

    Raises:
        UserError: A schedule, the number of steps or the file name is invalid, or a file cannot be
            written. Existing files then stay as they are.
    """
    if path.suffix.lower() != ".gif":
        raise UserError(f"Cannot write {path.name!r}: the animation's name must end in .gif.")
    if len(images) == 0:
        raise UserError("There are no images to animate. Prepare at least one image.")
    try:
        processes = [make_schedule(name, timesteps, zero_terminal_snr) for name in schedules]
    except ValueError as error:
        raise UserError(str(error)) from error
    images = _fit(images)
    strip = path.with_suffix(".png")
    with _staged(path, strip) as (animation, still):
        clean, *rest = [_frame(images, processes, t, seed) for t in _moments(timesteps, FRAMES)]
        save_animation([clean] * HELD + [clean, *rest], animation, milliseconds=110)
        still.write_bytes(png(_strip(images[:1], processes, _moments(timesteps, MOMENTS), seed)))
    return path, strip


@contextmanager
def _staged(path: Path, strip: Path) -> Iterator[tuple[Path, Path]]:
    """Yield two temporary files; rename them to `path` and `strip` at the end.

    Raises UserError if one of them cannot be written or would replace another file.
    """
    try:
        for file in (path, strip):
            if file.is_dir():
                raise UserError(f"Cannot write {file}: it is a folder. Use another name.")
        # An earlier animation would have left both files, so a lone strip is not ours.
        if strip.exists() and not path.exists():
            raise UserError(
                f"Cannot write {path.name}: its strip would replace {strip}. Use another name."
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
    """Return images uint8 (N, H, W, C) after timestep t, or unchanged if t is -1."""
    if t < 0:
        return images
    x0 = to_model(torch.from_numpy(np.ascontiguousarray(images)))
    noise = rng.normal(rng.key(Purpose.NOISE, seed), torch.arange(len(images)), x0.shape[1:])
    pixels: Pixels = to_pixels(q_sample(x0, noise, schedule.alphas_bar[t])).numpy()
    return pixels


def _moments(timesteps: int, count: int) -> list[int]:
    """Return up to `count` evenly spaced timesteps, from -1 (the clean image) to the last."""
    spaced = np.linspace(-1, timesteps - 1, min(count, timesteps + 1))
    return [round(t) for t in spaced.tolist()]


def _fit(images: Pixels) -> Pixels:
    """Return as many images as fit beside each other, reduced if they are large."""
    if max(images.shape[1:3]) > LARGEST:
        images = np.stack([_reduced(image) for image in images[: WIDTH // LARGEST]])
    shown = enlarge(images[0], TILE).shape[1] + GAP
    return images[: max(1, WIDTH // shown)]


def _reduced(image: Pixels) -> Pixels:
    small = to_pil(image)
    small.thumbnail((LARGEST, LARGEST), Image.Resampling.LANCZOS)
    return np.asarray(small).reshape(small.height, small.width, image.shape[-1])


def _frame(images: Pixels, schedules: Sequence[Schedule], t: int, seed: int) -> Pixels:
    """Return a frame of the animation: a row of images per schedule, and a progress bar."""
    timesteps = schedules[0].timesteps
    return sheet(
        rows=[_enlarged(noisy(images, schedule, t, seed)) for schedule in schedules],
        names=[schedule.name for schedule in schedules],
        notes=[f"image {_share(schedule, t)}" for schedule in schedules],
        heading=f"step {t + 1} of {timesteps}",
        progress=(t + 1) / timesteps,
    )


def _strip(images: Pixels, schedules: Sequence[Schedule], moments: list[int], seed: int) -> Pixels:
    """Return one image at some moments, a row per schedule, each with its share of the variance.

    Below are the curves of the signal-to-noise ratios.
    """
    rows = [
        _enlarged(np.concatenate([noisy(images, schedule, t, seed) for t in moments]))
        for schedule in schedules
    ]
    strip = sheet(
        rows=rows,
        names=[schedule.name for schedule in schedules],
        captions=[[_share(schedule, t) for t in moments] for schedule in schedules],
        columns=[f"step {t + 1}" for t in moments],
        heading="What is left of an image, in percent of the variance",
    )
    curves = chart(
        "Signal-to-noise ratio",
        {schedule.name: schedule.snr.clamp(min=1e-9).log10().tolist() for schedule in schedules},
        SNR_TICKS,
        columns=len(moments),
        width=rows[0].shape[2],
        channels=strip.shape[2],
    )
    return np.concatenate([strip, curves])


def _share(schedule: Schedule, t: int) -> str:
    """Return alpha_bar, the image's share of the variance, as text."""
    return f"{100 * float(schedule.alphas_bar[t]) if t >= 0 else 100:.0f} %"


def _enlarged(images: Pixels) -> Pixels:
    return np.stack([enlarge(image, TILE) for image in images])
