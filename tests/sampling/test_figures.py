"""Figures of what a network does show the images that `ddpm sample` draws."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.digits_workspace import digits, put_data
from support.models import CLASSES, write_checkpoint
from support.results import results, row

from ddpm_core.config import load as params
from ddpm_core.errors import UserError
from ddpm_core.evaluation.report import render_report
from ddpm_core.runtime.device import choose_device
from ddpm_core.sampling import figures
from ddpm_core.sampling.figures import KINDS, Subject, draw_figure, draw_for_report
from ddpm_core.sampling.images import Pixels
from ddpm_core.sampling.loading import load_sampler
from ddpm_core.sampling.plan import look_at_one
from ddpm_core.sampling.sheet import GAP, LABELS, LINE, MARGIN
from ddpm_core.storage.workspace import RESULTS, Workspace, snapshot_key

PITCH = figures.TILE + GAP
FACTOR = figures.TILE // 8


def subject(folder: Path, conditioning: str = "class", *overrides: str) -> Subject:
    """Return a network of 8x8 images in a workspace with data."""
    workspace = Workspace.open(str(folder / "workspace"))
    given = ["sample.steps=3", "sample.precision=fp32", "device=cpu", *overrides]
    config = params.load(None, given, workspace.uri, True)
    checkpoint = write_checkpoint(workspace.path(snapshot_key(4)), conditioning)
    return Subject(config, workspace, checkpoint)


def samples(of: Subject, count: int, **changes: object) -> Pixels:
    settings = of.config.sample.model_copy(update=changes)
    return load_sampler(of.checkpoint, settings, choose_device("cpu")).images(range(count))


def tiles(sheet: Pixels, rows: int, columns: int, lines: int) -> Pixels:
    """Return the images of a sheet, (rows, columns, 8, 8), with `lines` of text above them."""
    top, left = MARGIN + lines * LINE, LABELS + MARGIN
    found = [
        [
            sheet[top + i * PITCH :, left + j * PITCH :][: figures.TILE, : figures.TILE]
            for j in range(columns)
        ]
        for i in range(rows)
    ]
    return np.array(found)[:, :, ::FACTOR, ::FACTOR]


def opened(content: bytes) -> Image.Image:
    return Image.open(io.BytesIO(content))


@pytest.mark.parametrize("sampler", ["dpmpp", "heun", "ddpm"])
def test_denoising_ends_with_the_samples(tmp_path: Path, sampler: str) -> None:
    of = subject(tmp_path, "class", f"sample.sampler={sampler}")
    animation = opened(figures.denoising(of))
    assert animation.n_frames == of.config.sample.evaluations + 1  # type: ignore[attr-defined]
    first = np.asarray(animation.convert("L"))
    animation.seek(animation.n_frames - 1)  # type: ignore[attr-defined]
    last = tiles(np.asarray(animation.convert("L")), 2, figures.DENOISED, 2)
    expected = samples(of, figures.DENOISED)[..., 0]
    assert np.array_equal(last, np.stack([expected, expected]))
    assert not np.array_equal(tiles(first, 2, figures.DENOISED, 2), last)


def test_guidance_grid_has_a_row_per_class_of_equal_noise(tmp_path: Path) -> None:
    of = subject(tmp_path)
    grid = tiles(np.asarray(opened(figures.guidance(of))), 3, len(figures.SCALES), 2)
    for column, scale in enumerate(figures.SCALES):
        drawn = samples(of, 3, guidance=scale, classes=tuple(CLASSES))[..., 0]
        assert np.array_equal(grid[:, column], drawn)
    assert len({image.tobytes() for image in grid.reshape(-1, 64)}) == 3 * len(figures.SCALES)


def test_guidance_grid_of_prompts_has_the_frequent_captions(tmp_path: Path) -> None:
    of = subject(tmp_path, "text")
    grid = tiles(np.asarray(opened(figures.guidance(of))), 2, len(figures.SCALES), 2)
    drawn = samples(of, 2, prompts=("a circle", "a square"))[..., 0]
    assert np.array_equal(grid[:, 1], drawn)


@pytest.mark.parametrize("sampler", ["dpmpp", "ddpm"])
def test_interpolation_begins_and_ends_with_samples(tmp_path: Path, sampler: str) -> None:
    of = subject(tmp_path, "none", f"sample.sampler={sampler}")
    drawn = np.asarray(opened(figures.interpolation(of)))
    grid = tiles(drawn, figures.PAIRS, figures.BETWEEN, 1)
    expected = samples(of, 2 * figures.PAIRS)[..., 0].astype(int)
    assert np.abs(grid[:, 0] - expected[::2]).max() <= 1
    assert np.abs(grid[:, -1] - expected[1::2]).max() <= 1
    steps = np.abs(np.diff(grid.astype(int), axis=1)).mean((0, 2, 3))
    assert steps.max() < np.abs(grid[:, 0].astype(int) - grid[:, -1]).mean()


def test_report_shows_the_figures_of_its_best_weights(tmp_path: Path) -> None:
    of = subject(tmp_path)
    with pytest.raises(UserError, match="has no scores, so there is no report"):
        draw_for_report(of.config, of.workspace)
    put_data(of.workspace, *digits(8))
    weights = of.checkpoint.weights_hash(of.config.sample.ema)
    of.workspace.write_json(RESULTS, results([row(4, 9.0, weights=weights)]).plain())
    assert "with step 4" in draw_for_report(of.config, of.workspace)
    for found, shown in ((weights, len(KINDS)), ("other", 0)):
        of.workspace.write_json(RESULTS, results([row(4, 9.0, weights=found)]).plain())
        page = render_report(of.workspace).read_text(encoding="utf-8")
        assert page.count('<div class="wide">') == shown
        assert (shown > 0) == ("data:image/gif" in page)


def test_networks_without_condition_have_no_guidance_grid(tmp_path: Path) -> None:
    of = subject(tmp_path, "none")
    with pytest.raises(UserError, match=r"must be 1 \(no guidance\) with model.conditioning none"):
        draw_figure(of.config, of.workspace, "guidance", None)
    put_data(of.workspace, *digits(8))
    weights = of.checkpoint.weights_hash(of.config.sample.ema)
    of.workspace.write_json(RESULTS, results([row(4, 9.0, weights=weights)]).plain())
    assert "guidance" not in draw_for_report(of.config, of.workspace)


def test_one_figure_goes_to_a_file(tmp_path: Path) -> None:
    of = subject(tmp_path)
    file = tmp_path / "new/way.png"
    assert f"Wrote {file}" in draw_figure(of.config, of.workspace, "interpolation", file)
    assert opened(file.read_bytes()).format == "PNG"
    with pytest.raises(UserError, match=r"'way.png': the name of this figure must end in .gif"):
        draw_figure(of.config, of.workspace, "denoising", file)
    with pytest.raises(UserError, match="KIND: got 'noise'; must be one of denoising, guidance"):
        draw_figure(of.config, of.workspace, "noise", None)


def test_the_best_checkpoint_draws(tmp_path: Path) -> None:
    of = subject(tmp_path, "none", "sample.checkpoints=[4, 8]")
    write_checkpoint(of.workspace.path(snapshot_key(8)), seed=3, step=8)
    assert look_at_one(of.config, of.workspace).step == 8
    of.workspace.write_json(RESULTS, results([row(4, 5.0), row(8, 9.0)]).plain())
    assert look_at_one(of.config, of.workspace).step == 4
