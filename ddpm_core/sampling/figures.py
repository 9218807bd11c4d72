"""Figures of what a network does: denoising, guidance, and the way between two images.

A figure is drawn from one checkpoint with the settings of `sample`, to a file of the user or into
the evaluation report.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from ddpm_core.checkpoint import Checkpoint, fetch_weights
from ddpm_core.config import Config
from ddpm_core.console import progress
from ddpm_core.errors import Problem, UserError
from ddpm_core.runtime import memory
from ddpm_core.runtime.device import choose_device
from ddpm_core.sampling import animations
from ddpm_core.sampling.images import Pixels, enlarge, png, to_pil, to_pixels
from ddpm_core.sampling.loading import load_sampler
from ddpm_core.sampling.noise import Origin
from ddpm_core.sampling.plan import look_at_one
from ddpm_core.sampling.sampler import ImageSampler
from ddpm_core.sampling.sheet import save_animation, sheet
from ddpm_core.scores import read_results
from ddpm_core.storage.staging import staged_file
from ddpm_core.storage.workspace import PICTURES, Workspace, figure_name

TILE = 96  # pixels per side that images are enlarged or reduced to
FRAMES = 40  # of the denoising, at most
DENOISED = 6  # images that are denoised
ROWS = 10  # classes or prompts of the guidance grid, at most
SCALES = (0.0, 1.0, 2.0, 4.0, 8.0)  # of the guidance
BETWEEN = 9  # images from one to another
PAIRS = 5
LABEL = 13  # characters beside a row


@dataclass(frozen=True)
class Subject:
    """A checkpoint with its weights on this machine, and the settings to draw with it."""

    config: Config
    workspace: Workspace
    checkpoint: Checkpoint

    def sampler(self, **changes: object) -> ImageSampler:
        """Return a sampler with changed settings of `sample`."""
        settings = self.config.sample.model_copy(update=changes)
        return load_sampler(self.checkpoint, settings, choose_device(self.config.device))


def denoising(subject: Subject) -> bytes:
    """Animate the samples 0 to 5 from noise to images, as a GIF.

    The first row shows x_t at each evaluation of the network, the second its estimate of x0.
    """
    sampler, seen = subject.sampler(), list[tuple[int, Pixels, Pixels]]()
    numbers = range(DENOISED)

    def see(t: int, x: Tensor, x0: Tensor) -> None:
        seen.append((t, to_pixels(x).cpu().numpy(), to_pixels(x0).cpu().numpy()))

    drawn = sampler.draw(sampler.noise(numbers), sampler.conditions(numbers), seen=see)
    final = drawn.cpu().numpy()
    chosen = np.linspace(0, len(seen) - 1, min(FRAMES, len(seen))).round().astype(int)
    moments = [(f"timestep {seen[i][0] + 1}", i / len(seen), *seen[i][1:]) for i in chosen]
    frames = [
        sheet([_tiles(x), _tiles(x0)], ["noisy", "estimate"], heading=heading, progress=share)
        for heading, share, x, x0 in [*moments, ("finished", 1.0, final, final)]
    ]
    stream = io.BytesIO()
    save_animation(frames, stream, milliseconds=150)
    return stream.getvalue()


def guidance(subject: Subject) -> bytes:
    """Draw a row for each class or prompt and a column for each scale of the guidance, as a PNG.

    Images of a row have the same noise. Raises UserError if the network has no condition, or was
    never trained without it.
    """
    settings, data = subject.config.sample, subject.checkpoint.training_data
    if problems := _guidance_problems(subject):
        raise UserError("There is no grid of guidance for this network:", problems)
    if subject.checkpoint.network.conditioning == "class":
        field, names = "classes", settings.classes or data.classes
    else:
        frequent = sorted(data.captions, key=lambda caption: -caption[1])
        field, names = "prompts", settings.prompts or [text for text, _ in frequent]
    names = tuple(names[:ROWS])
    columns = [
        subject.sampler(guidance=scale, **{field: names}).images(range(len(names)))
        for scale in SCALES
    ]
    return png(
        sheet(
            [_tiles(np.stack(row)) for row in zip(*columns, strict=True)],
            [_short(name) for name in names],
            columns=[f"guidance {scale:g}" for scale in SCALES],
            heading="The same noise under growing guidance",
        )
    )


def interpolation(subject: Subject) -> bytes:
    """Draw the way from sample 2 r to sample 2 r + 1 in row r, as a PNG.

    The noise at every step is between those of both (see noise.BatchNoise), so this works for every
    sampler. The condition is that of the first.
    """
    sampler, rows, seed = subject.sampler(), [], subject.config.sample.seed
    shares = np.linspace(0.0, 1.0, BETWEEN)
    for first in range(0, 2 * PAIRS, 2):
        origins = [Origin(seed, first, (seed, first + 1), float(share)) for share in shares]
        rows.append(_tiles(sampler.batch(origins, sampler.conditions([first] * BETWEEN))))
    names = [f"{first} to {first + 1}" for first in range(0, 2 * PAIRS, 2)]
    return png(sheet(rows, names, heading="From the noise of one sample to that of another"))


def destruction(subject: Subject) -> bytes:
    """Return the strip and the curves of `ddpm destroy`, as a PNG."""
    return animations.strip_of_prepared(subject.config, subject.workspace)


@dataclass(frozen=True)
class Kind:
    """A kind of figure: how its file's name ends, its title and text in the report, its drawing."""

    end: str
    title: str
    text: str
    draw: Callable[[Subject], bytes]


KINDS = {  # in the order of the report
    "denoising": Kind(
        ".gif",
        "From noise to images",
        "Above: the noisy images. Below: what the network estimates them to become.",
        denoising,
    ),
    "guidance": Kind(
        ".png",
        "Conditions and guidance",
        "A row for each class or prompt, from the same noise. "
        "Guidance 0 ignores the condition; at 1 the condition applies without guidance.",
        guidance,
    ),
    "interpolation": Kind(
        ".png",
        "Between two samples",
        "A model that memorizes jumps from one image to "
        "another on the way; others change smoothly.",
        interpolation,
    ),
    "destruction": Kind(
        ".png",
        "From an image to noise",
        "What training sees: both schedules, and their signal-to-noise ratio at each step.",
        destruction,
    ),
}


def draw_figure(config: Config, workspace: Workspace, kind: str, output: Path | None) -> str:
    """Write a figure to a file, by default KIND.gif or .png; return a message that names it.

    Raises:
        UserError: The kind or the end of the file's name is wrong, the file cannot be written, or
            there is no such figure of the network.
    """
    if kind not in KINDS:
        raise UserError(f"KIND: got {kind!r}; must be one of {', '.join(KINDS)}.")
    end = KINDS[kind].end
    path = output or Path(f"{kind}{end}")
    if path.suffix.lower() != end:
        raise UserError(f"Cannot write {path.name!r}: the name of this figure must end in {end}.")
    subject = _subject(config, workspace)
    with memory.translate_errors():
        content = KINDS[kind].draw(subject)
    path.parent.mkdir(parents=True, exist_ok=True)
    with staged_file(path) as staging:
        staging.write_bytes(content)
        staging.replace(path)
    return f"Wrote {path}, drawn with step {subject.checkpoint.step}."


def draw_for_report(config: Config, workspace: Workspace) -> str:
    """Write all figures of a network beside the scores; return a message that lists them."""
    if read_results(workspace) is None:
        raise UserError(
            f"{workspace.uri} has no scores, so there is no report for the figures. For one "
            "figure, name its KIND.",
            run=("evaluate",),
        )
    subject = _subject(config, workspace)
    weights = subject.checkpoint.weights_hash(config.sample.ema)
    drawn = [kind for kind in KINDS if kind != "guidance" or not _guidance_problems(subject)]
    with progress("draw", len(drawn), "figures") as advance, memory.translate_errors():
        for kind in drawn:
            name = f"{figure_name(kind, weights)}{KINDS[kind].end}"
            workspace.storage.write(f"{PICTURES}/{name}", KINDS[kind].draw(subject))
            advance(1)
    return f"Drew {', '.join(drawn)} with step {subject.checkpoint.step}."


def _guidance_problems(subject: Subject) -> list[Problem]:
    """Return why a network cannot be guided by its condition."""
    trained, settings = subject.checkpoint.params, subject.config.sample
    guided = settings.model_copy(update={"guidance": SCALES[-1], "guide": None})
    conditioning = subject.checkpoint.network.conditioning
    return guided.problems(conditioning, trained.diffusion.timesteps, trained.train.label_drop)


def _subject(config: Config, workspace: Workspace) -> Subject:
    checkpoint = look_at_one(config, workspace)
    return Subject(config, workspace, fetch_weights(workspace, checkpoint, config.sample.ema))


def _tiles(images: Pixels) -> Pixels:
    """Return images (n, H, W, C) enlarged by a whole number, or reduced, to about TILE a side."""
    if max(images.shape[1:3]) <= TILE:
        return np.stack([enlarge(image, TILE) for image in images])
    reduced = [to_pil(image).resize((TILE, TILE), Image.Resampling.LANCZOS) for image in images]
    return np.stack([np.asarray(image) for image in reduced]).reshape(len(images), TILE, TILE, -1)


def _short(name: str) -> str:
    return name if len(name) <= LABEL else name[: LABEL - 1] + "…"
