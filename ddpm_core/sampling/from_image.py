"""`ddpm sample --from`: images that start from a given one, or redraw it under a mask.

They are not samples of the network alone, so they go to a folder of their own and are never scored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageColor

from ddpm_core.checkpoint import Checkpoint, fetch_weights
from ddpm_core.config import Config
from ddpm_core.console import progress, warn
from ddpm_core.data.decode import SquareRule, Undecodable, decode, make_square
from ddpm_core.diffusion.editing import Original
from ddpm_core.errors import Problem, UserError
from ddpm_core.runtime import memory
from ddpm_core.runtime.device import choose_device
from ddpm_core.sampling import plan
from ddpm_core.sampling.images import Pixels, grid_png, png, to_model
from ddpm_core.sampling.loading import load_sampler
from ddpm_core.sampling.run import warn_truncated
from ddpm_core.storage.staging import output_folder
from ddpm_core.storage.workspace import GRID, Workspace
from ddpm_core.text import counted

GIVEN = "given.png"  # the image as the network sees it
STRENGTH = 0.6  # of an image without a mask
SHOWN = 62  # images in the grid beside the given one and the mask
PASSES = 5  # under a mask
REDRAWN = 128  # gray of pixels in the grid that are redrawn; from this gray on, a mask is white

BLACK = (0, 0, 0)  # where a mask is transparent or padded: kept

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Edit:
    """What to draw from an image file.

    Attributes:
        image: The file, in any format that `ddpm prepare` reads.
        mask: A file of the same proportions, white where pixels are redrawn, or None.
        strength: As in `start_from`.
        passes: As in `Original`.
        count: The number of images.
    """

    image: Path
    mask: Path | None = None
    strength: float | None = None
    passes: int = PASSES
    count: int = 8


def draw_from_image(config: Config, workspace: Workspace, wanted: Edit, output: Path) -> str:
    """Draw images with the best checkpoint that is chosen, and return a message for the user.

    The folder `output` gets 000000.png and so on, the given image and a grid of all. Image i has
    the noise and the condition of sample i.

    Raises:
        UserError: A file is no image, `output` is not new or empty, or the checkpoint is missing or
            cannot draw with the settings.
    """
    checkpoint = plan.look_at_one(config, workspace, warn)
    rule = square_rule(checkpoint)
    image, mask = read_original(wanted.image, wanted.mask, rule)
    warn_truncated(config.sample.prompts or ())
    with output_folder(output) as folder:
        drawn = _draw(
            config, fetch_weights(workspace, checkpoint, config.sample.ema), wanted, image, mask
        )
        _write(folder, drawn, image, mask)
    return f"Drew {counted(wanted.count, 'image')} with step {checkpoint.step} into {output}."


def square_rule(checkpoint: Checkpoint) -> SquareRule:
    """Return how images become those of a network: as `ddpm prepare` made its training images."""
    settings, data = checkpoint.params.prepare, checkpoint.training_data
    background = ImageColor.getrgb(settings.background)[:3]
    return SquareRule(data.image_size, settings.resize, background, data.channels)


def read_original(
    image: bytes | Path, mask: bytes | Path | None, rule: SquareRule
) -> tuple[Pixels, Mask | None]:
    """Decode an image, uint8 (S, S, C), and its mask, (S, S), True where pixels are redrawn.

    Raises:
        UserError: with all problems: one of them is no image, they differ in proportions, or the
            mask has no white pixel.
    """
    opened, problems = [], []
    for name, content, background in (("image", image, rule.background), ("mask", mask, BLACK)):
        if content is None:
            continue
        try:
            opened.append(decode(content, background, rule.size))
        except Undecodable as error:
            problems.append(
                Problem(str(content) if isinstance(content, Path) else name, str(error))
            )
    if not problems:
        pixels = _square(opened[0], rule)
        if mask is None:
            return pixels, None
        black = replace(rule, background=BLACK, channels=1)
        redrawn: Mask = _square(opened[1], black)[:, :, 0] >= REDRAWN
        problems = _mask_problems(opened[0], opened[1], redrawn)
        if not problems:
            return pixels, redrawn
    raise UserError("The image cannot be used:", problems)


def start_from(
    image: Pixels, redrawn: Mask | None, strength: float | None, passes: int = PASSES
) -> Original:
    """Return one image of `read_original` to start from.

    The strength is by default STRENGTH, and 1 with a mask.
    """
    if strength is None:
        strength = STRENGTH if redrawn is None else 1.0
    masks = None if redrawn is None else torch.from_numpy(redrawn)[None, None]
    return Original(to_model(torch.from_numpy(image[None])), strength, masks, passes)


def _square(image: Image.Image, rule: SquareRule) -> Pixels:
    square = make_square(image, rule)
    values = np.asarray(square if rule.channels == 3 else square.convert("L"))
    return values.reshape(rule.size, rule.size, rule.channels).copy()  # writable, for PyTorch


def _mask_problems(image: Image.Image, mask: Image.Image, redrawn: Mask) -> list[Problem]:
    (width, height), (other_width, other_height) = image.size, mask.size
    # A reduction while a JPEG is decoded may round a side by one pixel.
    if abs(width * other_height - other_width * height) > max(*image.size, *mask.size):
        expected = f"must have the proportions of the image, {width} x {height} pixels"
        return [Problem("mask", f"got {other_width} x {other_height} pixels", expected)]
    if not redrawn.any():
        expected = "must be white where pixels are redrawn, and black where they are kept"
        return [Problem("mask", "got no white pixel", expected)]
    return []


def _draw(
    config: Config, checkpoint: Checkpoint, wanted: Edit, image: Pixels, mask: Mask | None
) -> Pixels:
    """Return the images, uint8 (count, H, W, C)."""
    settings = config.sample
    sampler = load_sampler(checkpoint, settings, choose_device(config.device))
    size, drawn = min(settings.batch_size, wanted.count), []
    one = start_from(image, mask, wanted.strength, wanted.passes)
    original = one.take(torch.zeros(size, dtype=torch.int64))
    advice = f"sample.batch_size {settings.batch_size}: lower it."
    with progress("sample", wanted.count, "images") as advance, memory.translate_errors(advice):
        for start in range(0, wanted.count, size):
            # The batch always has its full size, because the size can change the rounding.
            drawn.append(sampler.images(range(start, start + size), original=original))
            advance(min(size, wanted.count - start))
    return np.concatenate(drawn)[: wanted.count]


def _write(folder: Path, drawn: Pixels, image: Pixels, mask: Mask | None) -> None:
    """Write the images, the given one, and a grid that begins with it, and with it under a mask."""
    (folder / GIVEN).write_bytes(png(image))
    for number, one in enumerate(drawn):
        (folder / f"{number:06d}.png").write_bytes(png(one))
    first = [image]
    if mask is not None:
        first.append(np.where(mask[:, :, None], np.uint8(REDRAWN), image))
    tiles = np.stack([*first, *drawn[:SHOWN]])
    (folder / GRID).write_bytes(grid_png(tiles))
