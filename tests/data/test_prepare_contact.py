"""The contact sheet stays small whatever the source holds, and its titles can be read."""

from __future__ import annotations

import importlib.util
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFont
from support.pictures import prepared, write

from ddpm_core.data import contact, lettering
from ddpm_core.data.contact import COLUMNS, LARGEST, sheet, shrunk
from ddpm_core.data.lettering import fonts_for, legible, lettered, readable_font


def test_the_largest_sheet_is_one_that_a_viewer_opens() -> None:
    tiles = shrunk(np.zeros((COLUMNS, 1024, 1024, 3), np.uint8))
    assert tiles.shape == (COLUMNS, LARGEST, LARGEST, 3)
    drawn = sheet([("x", tiles)] * contact.MOST_CLASSES, "and 9 more classes")
    assert drawn.width < 1600 and drawn.height < 9200
    assert np.asarray(drawn)[-18:].min() < 100  # what stands below the rows


def test_a_shrunk_tile_looks_as_its_picture() -> None:
    picture = np.zeros((1, 512, 512, 1), np.uint8)
    picture[:, :, 256:] = 200
    tile = shrunk(picture)
    assert tile.shape == (1, LARGEST, LARGEST, 1)
    assert tile[0, :, :60].max() < 5 and abs(int(tile[0, :, 70:].mean()) - 200) < 5
    small = np.zeros((2, 8, 8, 3), np.uint8)
    assert shrunk(small) is small


def test_large_pictures_take_the_memory_of_one_class_and_not_of_all(tmp_path: Path) -> None:
    for number in range(72):
        color = (number, 9, 9)
        write(tmp_path / f"raw/class-{number // 6}/{number}.png", Image.new("RGB", (8, 8), color))
    prepared(tmp_path, tmp_path / "raw", image_size=8)
    tracemalloc.start()
    prepared(tmp_path, tmp_path / "raw", image_size=512)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 40 * 512 * 512 * 3  # all of the 72 are shown; a block to read holds 10
    with Image.open(tmp_path / "workspace/data/contact.png") as drawn:
        assert drawn.height == 12 * (LARGEST + 24)


def test_classes_that_are_not_shown_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    titles: list[Any] = []
    monkeypatch.setattr(contact, "MOST_CLASSES", 2)
    monkeypatch.setattr(contact.choose, "__defaults__", (COLUMNS, 2))
    monkeypatch.setattr(contact, "lettered", lambda t, fonts: titles.append(t) or (t, fonts[0]))
    for number in range(5):
        write(tmp_path / f"raw/{number}/0.png", Image.new("RGB", (8, 8), (number, 0, 0)))
    prepared(tmp_path, tmp_path / "raw")
    assert titles == ["0 (1)", "1 (1)", "and 3 more classes"]


@pytest.mark.parametrize("installed", [True, False])
def test_letters_that_the_font_lacks_are_written_out(
    monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    if not installed:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    elif importlib.util.find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed")
    font = readable_font()
    assert legible("cat_1 (3)", font) == "cat_1 (3)"
    assert legible("\u732b (3)", font) == "\\u732b (3)"
    assert legible("cat\nfish (3)", font) == "cat\\nfish (3)"
    accented = "\u00e9\u017e\u03b5\u0436"
    assert legible(accented, font) == (accented if installed else "\\xe9\\u017e\\u03b5\\u0436")


def test_a_font_of_bitmaps_has_titles_too() -> None:
    font = ImageFont.load_default_imagefont()
    assert legible("cat \u732b", font) == "cat \\u732b"


def test_titles_that_the_usual_font_lacks_are_drawn_by_one_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dejavu = readable_font()
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed")
    monkeypatch.setattr(lettering, "readable_font", lambda: ImageFont.load_default(15))
    monkeypatch.setattr(lettering, "FOLDERS", (str(tmp_path / "none"), str(tmp_path)))
    (tmp_path / "a.ttf").write_text("no font")
    title = "\u043a\u043e\u0448\u043a\u0430 (3)"
    fonts = fonts_for(title)
    assert lettered(title, fonts) == (title.encode("unicode_escape").decode(), fonts[0])

    assert isinstance(dejavu, ImageFont.FreeTypeFont)
    shutil.copy(str(dejavu.path), tmp_path / "b.TTF")
    usual, other = fonts_for(title + "\u732b")
    assert lettered(title, [usual, other]) == (title, other)
    assert lettered("cat (3)", [usual, other]) == ("cat (3)", usual)
    assert lettered("\u732b (3)", [usual, other]) == ("\\u732b (3)", usual)
