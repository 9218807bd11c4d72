"""The animation of the forward process."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ddpm_core.config.load import validate
from ddpm_core.data.prepare import prepare
from ddpm_core.diffusion.process import SCHEDULES, make_schedule
from ddpm_core.errors import UserError
from ddpm_core.sampling.animations import (
    FRAMES,
    HELD,
    MOMENTS,
    TILE,
    destroy,
    destroy_prepared,
    noisy,
)
from ddpm_core.sampling.images import Pixels
from ddpm_core.sampling.sheet import GAP
from ddpm_core.storage.workspace import Workspace


def ramps(count: int = 2, size: int = 8, channels: int = 1) -> Pixels:
    ramp = np.linspace(0, 255, size * size).reshape(1, size, size, 1)
    return np.tile(ramp, (count, 1, 1, channels)).astype(np.uint8)


def frames(path: Path) -> list[Pixels]:
    with Image.open(path) as animation:
        shown = []
        for index in range(animation.n_frames):  # type: ignore[attr-defined]
            animation.seek(index)
            shown.append(np.asarray(animation.convert("L")))
    return shown


# Content


@pytest.mark.parametrize("channels", [1, 3])
def test_animation_goes_from_image_to_noise_beside_a_strip(tmp_path: Path, channels: int) -> None:
    path, strip = destroy(
        ramps(channels=channels), ["linear", "cosine"], 100, tmp_path / "new" / "x.gif"
    )
    shown = frames(path)
    assert FRAMES <= len(shown) <= FRAMES + HELD
    changed = [float(np.abs(frame.astype(float) - shown[0]).mean()) for frame in shown]
    assert changed[-1] > changed[FRAMES // 4] > 0
    with Image.open(strip) as opened:
        assert opened.format == "PNG" and opened.width > MOMENTS * 128


def test_every_schedule_has_a_row_and_every_image_a_column(tmp_path: Path) -> None:
    sizes = {}
    for count in (1, 3):
        for schedules in (["cosine"], ["linear", "cosine"]):
            path, _ = destroy(ramps(count), schedules, 21, tmp_path / "x.gif")
            sizes[count, len(schedules)] = frames(path)[0].shape
    assert sizes[1, 2][0] - sizes[1, 1][0] == sizes[3, 2][0] - sizes[3, 1][0] == 136
    assert sizes[3, 1][1] - sizes[1, 1][1] == 2 * 136


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_noisy_goes_from_the_image_to_pure_noise(schedule: str) -> None:
    made = make_schedule(schedule, 100)
    images = ramps(size=32)
    assert np.array_equal(noisy(images, made, -1, 0), images)
    dark = noisy(np.zeros_like(images), made, 99, 0).astype(float)
    assert np.abs(noisy(images, made, 99, 0) - dark).max() <= 3
    assert dark[0].mean() == pytest.approx(127.5, abs=10)
    assert not np.array_equal(dark[0], dark[1])


def test_zero_terminal_snr_ends_in_noise_alone(tmp_path: Path) -> None:
    """The last frame is the same for every image, except for the rounding of colors."""
    ends = {}
    for zero in (False, True):
        for value in (0, 255):
            images = np.full((1, 16, 16, 1), value, np.uint8)
            file = tmp_path / f"{zero}-{value}.gif"
            destroy(images, ["linear"], 50, file, zero_terminal_snr=zero)
            ends[zero, value] = frames(file)[-1].astype(float)
    assert np.array_equal(ends[True, 0], ends[True, 255])
    assert not np.array_equal(ends[False, 0], ends[False, 255])


def test_rows_differ_by_their_schedule_alone() -> None:
    """At equal alpha_bar, two schedules give equal images."""
    a, b = make_schedule("cosine", 100), make_schedule("cosine", 200)
    early, late = 40, int((b.alphas_bar - a.alphas_bar[40]).abs().argmin())
    one, other = noisy(ramps(), a, early, 7), noisy(ramps(), b, late, 7)
    assert np.abs(one.astype(float) - other).max() <= 4


def test_the_file_depends_on_the_seed_alone(tmp_path: Path) -> None:
    first, again, other = (
        destroy(ramps(), ["cosine"], 30, tmp_path / f"{name}.gif", seed)[0].read_bytes()
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert first == again
    assert first != other


def test_large_images_are_reduced_and_surplus_ones_left_out(tmp_path: Path) -> None:
    wide = np.zeros((9, 300, 500, 3), np.uint8)
    path, _ = destroy(wide, ["cosine"], 3, tmp_path / "wide.gif")
    height, width = frames(path)[0].shape
    assert height < 250 and width < 1100
    many = destroy(ramps(40), ["cosine"], 3, tmp_path / "many.gif")[0]
    assert frames(many)[0].shape[1] < 1100


def test_short_process_has_one_frame_per_step(tmp_path: Path) -> None:
    path, _ = destroy(ramps(), ["cosine"], 2, tmp_path / "short.gif")
    assert 3 <= len(frames(path)) <= 3 + HELD


# Errors


@pytest.mark.parametrize(
    ("name", "schedules", "timesteps", "count", "message"),
    [
        ("x.png", ["cosine"], 100, 1, "'x.png': the animation's name must end in .gif"),
        (
            "x.gif",
            ["cosine", "sine"],
            100,
            1,
            "schedule: got 'sine'; must be one of linear, cosine",
        ),
        ("x.gif", ["linear"], 20, 1, "timesteps: got 20; schedule linear requires at least 21"),
        ("x.gif", ["cosine"], 100, 0, "There are no images to animate"),
    ],
)
def test_invalid_arguments_are_reported(
    tmp_path: Path, name: str, schedules: list[str], timesteps: int, count: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        destroy(ramps(count), schedules, timesteps, tmp_path / name)


def test_write_errors_are_reported_and_existing_files_stay(tmp_path: Path) -> None:
    (tmp_path / "dir.gif").mkdir()
    (tmp_path / "still.png").mkdir()
    (tmp_path / "file").write_text("a file")
    (tmp_path / "mine.png").write_text("my own")
    before = sorted(tmp_path.rglob("*"))
    for name, message in {
        "dir.gif": "dir.gif: it is a folder",
        "still.gif": "still.png: it is a folder",
        "file/x.gif": r"Cannot write .*x\.gif and x\.png: ",
        "x" * 300 + ".gif": "File name too long",
        "mine.gif": r"its strip would replace .*mine\.png",
    }.items():
        with pytest.raises(UserError, match=message):
            destroy(ramps(), ["cosine"], 3, tmp_path / name)
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "mine.png").read_text() == "my own"


@pytest.mark.parametrize("room", [0, 2000])
def test_full_disk_keeps_the_earlier_animation(tmp_path: Path, room: int) -> None:
    path, strip = destroy(ramps(), ["cosine"], 3, tmp_path / "x.gif")
    before = {item: item.read_bytes() for item in (path, strip)}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(UserError, match=r"Cannot write .*: File too large"):
            destroy(ramps(), ["linear"], 100, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {item: item.read_bytes() for item in tmp_path.iterdir()} == before


# From prepared data


def test_destroy_prepared_shows_every_possible_schedule(
    tmp_path: Path,
) -> None:
    (tmp_path / "raw").mkdir()
    for i in range(8):
        Image.fromarray(ramps()[0, :, :, 0] // (i + 1)).save(tmp_path / f"raw/{i}.png")
    workspace = Workspace.open(str(tmp_path / "workspace"))
    source = {"source": str(tmp_path / "raw"), "image_size": 8, "holdout": 0.0, "workers": 1}
    prepare(validate({"prepare": source, "train": {"batch_size": 4}}), workspace)
    heights = []
    for timesteps in (20, 50):
        config = validate({"diffusion": {"timesteps": timesteps}})
        message = destroy_prepared(config, workspace, 3, tmp_path / "x.gif")
        assert "x.gif" in message and "x.png" in message
        heights.append(frames(tmp_path / "x.gif")[0].shape[0])
    # With 20 steps only cosine is defined; with more, every schedule has a row.
    assert heights[1] - heights[0] == (len(SCHEDULES) - 1) * (TILE + GAP)
    process = {"timesteps": 50, "zero_terminal_snr": True}
    destroy_prepared(validate({"diffusion": process}), workspace, 3, tmp_path / "zero.gif")
    assert not np.array_equal(frames(tmp_path / "zero.gif")[-1], frames(tmp_path / "x.gif")[-1])
