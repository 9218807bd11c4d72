"""`ddpm sample --from`: untrusted files, what a mask keeps, and equal images in every batch."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.models import write_checkpoint
from support.program import ddpm, settings

from ddpm_core.config import load as params
from ddpm_core.data.decode import SquareRule
from ddpm_core.errors import UserError
from ddpm_core.sampling.from_image import Edit, draw_from_image, read_original
from ddpm_core.storage.workspace import Workspace, snapshot_key

RULE = SquareRule(8, "crop", (255, 255, 255), 1)
WIDE = np.linspace(0, 255, 10 * 20).reshape(10, 20).astype(np.uint8)
MASK = np.zeros((10, 20), np.uint8)
MASK[:, 10:] = 255


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with checkpoints of steps 4 and 8, an image of 20x10 pixels, and its mask."""
    folder = tmp_path_factory.mktemp("from")
    workspace = Workspace.open(str(folder / "workspace"))
    for step in (4, 8):
        write_checkpoint(workspace.path(snapshot_key(step)), "class", seed=step, step=step)
    Image.fromarray(WIDE).save(folder / "photo.png")
    Image.fromarray(MASK).save(folder / "mask.png")
    return folder


def drawn(run: Path, output: Path, *overrides: str, **wanted: object) -> np.ndarray:
    config = params.load(None, [*overrides, "sample.steps=4"], str(run / "workspace"), True)
    edit = Edit(**{"image": run / "photo.png", "mask": None, "strength": None, **PLAIN, **wanted})
    draw_from_image(config, Workspace.open(str(run / "workspace")), edit, output)
    files = sorted(output.glob("0*.png"))
    return np.stack([np.asarray(Image.open(file)) for file in files])


PLAIN = {"passes": 2, "count": 5}


def encoded(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind)
    return stream.getvalue()


# The images


def test_strength_0_gives_the_image_and_1_forgets_it(run: Path, tmp_path: Path) -> None:
    unchanged = drawn(run, tmp_path / "unchanged", strength=0.0)
    given = np.asarray(Image.open(tmp_path / "unchanged/given.png"))
    assert len(unchanged) == 5 and (unchanged == given).all()
    partly = drawn(run, tmp_path / "partly")
    assert len(np.unique(partly.reshape(5, -1), axis=0)) == 5
    new = drawn(run, tmp_path / "new", strength=1.0)
    other = drawn(run, tmp_path / "other", strength=1.0, image=run / "mask.png")
    assert np.array_equal(new, other) and not np.array_equal(partly, new)


@pytest.mark.slow
def test_full_strength_gives_the_samples_of_the_newest(run: Path, tmp_path: Path) -> None:
    new = drawn(run, tmp_path / "new", strength=1.0)
    given = settings("sample.count=5", "sample.batch_size=5", "sample.steps=4", "sample.png=true")
    ddpm(run, "sample", *given, *settings("sample.checkpoints=latest"))
    files = sorted((run / "workspace/samples/step-00000008/png").iterdir())
    assert np.array_equal(new, np.stack([np.asarray(Image.open(file)) for file in files]))


def test_a_mask_keeps_the_rest_exactly(run: Path, tmp_path: Path) -> None:
    found = drawn(run, tmp_path / "edited", mask=run / "mask.png")
    given = np.asarray(Image.open(tmp_path / "edited/given.png"))
    assert (found[:, :, :4] == given[:, :4]).all()
    assert (found[:, :, 4:] != given[:, 4:]).mean() > 0.5
    grid = np.asarray(Image.open(tmp_path / "edited/grid.png"))
    assert (grid == 128).any()  # the masked image


def test_batches_of_any_size_give_the_same_images(run: Path, tmp_path: Path) -> None:
    one, other = (
        drawn(run, tmp_path / f"{size}", f"sample.batch_size={size}", mask=run / "mask.png")
        for size in (2, 50)
    )
    assert np.abs(one.astype(int) - other).max() <= 1  # the size of a batch changes the rounding


def test_classes_and_samplers_of_the_settings_apply(run: Path, tmp_path: Path) -> None:
    mask = run / "mask.png"
    images = [
        drawn(run, tmp_path / f"{number}", *overrides, mask=mask)
        for number, overrides in enumerate(
            [("sample.classes=[square]",), ("sample.classes=['7']",), ("sample.sampler=ddpm",)]
        )
    ]
    assert not np.array_equal(images[0], images[1]) and not np.array_equal(images[0], images[2])


# Files


def test_an_image_becomes_what_prepare_makes_of_it() -> None:
    pixels, mask = read_original(encoded(WIDE), None, RULE)
    middle = Image.fromarray(WIDE).crop((5, 0, 15, 10)).resize((8, 8), Image.Resampling.LANCZOS)
    assert mask is None and np.abs(pixels[:, :, 0].astype(int) - np.asarray(middle)).max() <= 1
    color = read_original(encoded(WIDE), None, SquareRule(8, "pad", (255, 0, 0), 3))[0]
    assert color.shape == (8, 8, 3) and color[0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("mode", ["gray", "alpha", "jpeg", "small"])
def test_masks_of_every_kind_are_read(mode: str) -> None:
    if mode == "alpha":  # transparent: kept
        made = encoded(np.stack([np.full_like(MASK, 255)] * 3 + [MASK], axis=2))
    elif mode == "small":
        made = encoded(MASK[::5, ::5])
    else:
        made = encoded(MASK, "JPEG" if mode == "jpeg" else "PNG")
    found = read_original(encoded(WIDE), made, RULE)[1]
    assert found is not None and found[:, 4:].all() and not found[:, :4].any()


def test_padding_is_kept() -> None:
    rule = SquareRule(8, "pad", (255, 255, 255), 1)
    found = read_original(encoded(WIDE), encoded(np.full_like(MASK, 255)), rule)[1]
    assert found is not None and found[2:6].all() and not found[0].any() and not found[7].any()


@pytest.mark.parametrize(
    ("image", "mask", "message"),
    [
        (b"", encoded(MASK), "image: empty: 0 bytes"),
        (b"not an image", b"\xff\x0a", "image: not an image.*\n  mask: JPEG XL is not a supported"),
        (encoded(WIDE)[:90], encoded(MASK), "image: (truncated|damaged)"),
        (encoded(WIDE), encoded(MASK.T), "mask: got 10 x 20 pixels; must have the proportions"),
        (encoded(WIDE), encoded(0 * MASK), "mask: got no white pixel; must be white where pixels"),
        (Path("/dev/zero"), None, "/dev/zero: empty"),
        (Path("missing.png"), None, "missing.png: cannot be read: No such file"),
    ],
)
def test_unusable_files_are_named(image: bytes | Path, mask: bytes | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_original(image, mask, RULE)


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        (("--strength", ".5", "--mask", "m.png"), ["--strength: got '0.5'; requires --from"]),
        (("--from", "photo.png", "--shard", "0/2"), ["--shard: got '0/2'; not possible with"]),
        (("--from", "photo.png", "--passes", "3"), ["--passes: got 3; requires --mask"]),
        (("--from", "photo.png", "-o", "workspace"), ["workspace already exists and is not"]),
        (("--from", "x.png", "--mask", "y.png"), ["x.png: cannot be read", "y.png: cannot be"]),
    ],
)
def test_impossible_options_draw_nothing(
    run: Path, options: tuple[str, ...], messages: list[str]
) -> None:
    said = ddpm(run, "sample", *options, status=1)
    assert all(message in said for message in messages)
    assert not (run / "edited").exists()
