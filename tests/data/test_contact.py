"""The contact sheet has a limited size, and legible titles in any script."""

from __future__ import annotations

import importlib.util
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFont
from support.images import prepared, write

from ddpm_core.data import contact
from ddpm_core.data.contact import (
    COLUMNS,
    MAX_TILE,
    default_font,
    draw_sheet,
    drawable,
    escape_missing,
    find_fonts,
    shrink,
)


def test_largest_sheet_opens_in_an_image_viewer() -> None:
    tiles = shrink(np.zeros((COLUMNS, 1024, 1024, 3), np.uint8))
    assert tiles.shape == (COLUMNS, MAX_TILE, MAX_TILE, 3)
    drawn = draw_sheet([("x", tiles)] * contact.MAX_CLASSES, "and 9 more classes")
    assert drawn.width < 1600 and drawn.height < 9200
    assert np.asarray(drawn)[-18:].min() < 100  # the footer


def test_tile_looks_like_its_image() -> None:
    image = np.zeros((1, 512, 512, 1), np.uint8)
    image[:, :, 256:] = 200
    tile = shrink(image)
    assert tile.shape == (1, MAX_TILE, MAX_TILE, 1)
    assert tile[0, :, :60].max() < 5 and abs(int(tile[0, :, 70:].mean()) - 200) < 5
    small = np.zeros((2, 8, 8, 3), np.uint8)
    assert shrink(small) is small


def test_contact_sheet_needs_memory_for_one_class(tmp_path: Path) -> None:
    for number in range(72):
        color = (number, 9, 9)
        write(tmp_path / f"raw/class-{number // 6}/{number}.png", Image.new("RGB", (8, 8), color))
    prepared(tmp_path, tmp_path / "raw", image_size=8)
    tracemalloc.start()
    prepared(tmp_path, tmp_path / "raw", image_size=512)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 40 * 512 * 512 * 3  # all 72 are shown; a block has 10
    with Image.open(tmp_path / "workspace/data/contact.png") as drawn:
        assert drawn.height == 12 * (MAX_TILE + 24)


def test_hidden_classes_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    titles: list[Any] = []
    monkeypatch.setattr(contact, "MAX_CLASSES", 2)
    monkeypatch.setattr(contact, "drawable", lambda t, fonts: titles.append(t) or (t, fonts[0]))
    for number in range(5):
        write(tmp_path / f"raw/{number}/0.png", Image.new("RGB", (8, 8), (number, 0, 0)))
    prepared(tmp_path, tmp_path / "raw")
    assert titles == ["0 (1)", "1 (1)", "and 3 more classes"]


@pytest.mark.parametrize("installed", [True, False])
def test_letters_that_the_font_lacks_are_escaped(
    monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    if not installed:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    elif importlib.util.find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed")
    font = default_font()
    assert escape_missing("cat_1 (3)", font) == "cat_1 (3)"
    assert escape_missing("\u732b (3)", font) == "\\u732b (3)"
    assert escape_missing("cat\nfish (3)", font) == "cat\\nfish (3)"
    accented = "\u00e9\u017e\u03b5\u0436"
    assert escape_missing(accented, font) == (
        accented if installed else "\\xe9\\u017e\\u03b5\\u0436"
    )


def test_bitmap_font_draws_titles() -> None:
    font = ImageFont.load_default_imagefont()
    assert escape_missing("cat \u732b", font) == "cat \\u732b"


def test_system_font_draws_what_the_default_font_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dejavu = default_font()
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed")
    monkeypatch.setattr(contact, "default_font", lambda: ImageFont.load_default(15))
    monkeypatch.setattr(contact, "FONT_FOLDERS", (str(tmp_path / "none"), str(tmp_path)))
    (tmp_path / "a.ttf").write_text("no font")
    title = "\u043a\u043e\u0448\u043a\u0430 (3)"
    fonts = find_fonts(title)
    assert drawable(title, fonts) == (title.encode("unicode_escape").decode(), fonts[0])

    assert isinstance(dejavu, ImageFont.FreeTypeFont)
    shutil.copy(str(dejavu.path), tmp_path / "b.TTF")
    usual, other = find_fonts(title + "\u732b")
    assert drawable(title, [usual, other]) == (title, other)
    assert drawable("cat (3)", [usual, other]) == ("cat (3)", usual)
    assert drawable("\u732b (3)", [usual, other]) == ("\\u732b (3)", usual)
