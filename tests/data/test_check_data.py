"""check-data reports what a source contains, and its problems."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from PIL import Image
from rich.cells import cell_len
from support.images import encoded, flat, noise, prepared, rejected, write, write_classes

from ddpm_core.config import Prepare
from ddpm_core.data import decode
from ddpm_core.data.check import DataReport, check_data, format_report, inspect
from ddpm_core.errors import UserError


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Cats and dogs of several sizes and kinds, with a copy and two unusable files."""
    root = tmp_path / "raw"
    for number in range(8):
        write(root / f"cat/{number}.jpg", noise(number, size=(90, 70)), kind="JPEG")
    write(root / "cat/wide.png", noise(20, size=(200, 40), mode="L"))
    write(root / "dog/0.png", noise(30, size=(64, 64), mode="RGBA"))
    write(root / "dog/again.png", noise(30, size=(64, 64), mode="RGBA"))
    write(root / "dog/cut.jpg", encoded(noise(40, size=(99, 99)), "JPEG")[:500])
    write(root / "dog/empty.png", b"")
    write(root / "notes.md", "who took them")
    return root


def test_report_has_counts_sizes_and_kinds(mixed: Path) -> None:
    report = check_data(mixed)
    assert report.count == 11
    assert report.splits == {"undecided": {"cat": 9, "dog": 2}}
    assert (report.smallest, report.largest) == ((64, 64), (200, 40))
    assert report.sides == {32: 1, 64: 10}
    assert (report.median_side, report.far_from_square) == (70, 1)
    assert report.stored == {"JPEG RGB": 8, "PNG RGBA": 2, "PNG L": 1}


def test_report_has_unusable_files_and_copies(mixed: Path) -> None:
    report = check_data(mixed)
    assert [(item.name, item.reason.partition(":")[0]) for item in report.rejected] == [
        ("dog/cut.jpg", "truncated"),
        ("dog/empty.png", "empty"),
    ]
    assert report.copies == [["dog/0.png", "dog/again.png"]]


def test_line_break_in_a_name_is_escaped(tmp_path: Path) -> None:
    root = write_classes(tmp_path / "raw", ["a\nb"])
    write(root / "a\nb/c\nd.png", b"")
    report = format_report(check_data(root))
    assert not [line for line in report if "\n" in line]
    assert "  a\\nb/c\\nd.png: empty" in " ".join(report)


def test_class_table_is_aligned_for_names_in_any_script() -> None:
    names = {"cat": 3, "\u81ea\u52d5\u8eca\u30fb\u98db\u884c\u6a5f": 4, "": 5}
    text = format_report(DataReport("raw", splits={"train": names}))
    table = [line for line in text if line.endswith(("train", " 3", " 4", " 5"))]
    assert len(table) == 4 and len({cell_len(line) for line in table}) == 1


def test_report_has_imbalance_and_prepare_errors(mixed: Path) -> None:
    report = check_data(mixed)
    assert "Unbalanced classes: 9 images of cat, 2 of dog." in " ".join(report.notes)
    assert "1 .md" in " ".join(report.notes)
    (failure,) = report.failures
    assert "15.4% of the images are unusable, more than prepare.max_rejected=0.01" in failure
    assert f"prepare would fail: {failure}" in format_report(report)


def test_splits_are_counted_separately(tmp_path: Path) -> None:
    write_classes(tmp_path / "raw", ["train/cat", "train/dog", "test/cat"])
    report = check_data(tmp_path / "raw")
    assert report.splits == {"train": {"cat": 3, "dog": 3}, "holdout": {"cat": 3}}


def test_rotated_images_have_their_upright_size(tmp_path: Path) -> None:
    turned = flat((1, 2, 3), size=(30, 20)).getexif()
    turned[0x0112] = 6
    write(tmp_path / "raw/0.jpg", flat((1, 2, 3), size=(30, 20)), kind="JPEG", exif=turned)
    assert check_data(tmp_path / "raw").smallest == (20, 30)


def test_report_is_printed(mixed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = check_data(mixed)
    printed, progress = capsys.readouterr()
    assert "check: 13/13 images" in progress and "11 images" not in progress
    for line in format_report(report):
        assert line in printed
    for expected in (
        "11 images, 2 classes",
        "unusable: 2",
        "dog/cut.jpg: truncated",
        "dog/0.png = dog/again.png",
        "To write settings for these images: ddpm init",
    ):
        assert expected in printed


def test_long_lists_are_printed_in_part(tmp_path: Path) -> None:
    write(tmp_path / "raw/good.png", noise(1))
    for number in range(30):
        write(tmp_path / f"raw/{number:02d}.png", b"broken")
    report = check_data(tmp_path / "raw")
    assert len(report.rejected) == 30
    assert "  and 10 more" in format_report(report)


def test_folder_of_broken_images_gives_a_report(tmp_path: Path) -> None:
    write(tmp_path / "raw/0.png", b"broken")
    report = check_data(tmp_path / "raw")
    assert (report.count, len(report.rejected)) == (0, 1)
    assert report.failures[0].startswith("none of the images can be used")


def test_digits_can_be_checked() -> None:
    report = check_data("digits")
    assert (report.count, report.smallest, report.copies) == (1797, (8, 8), [])


def test_folder_without_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="contains no images"):
        check_data(tmp_path)


def test_check_data_writes_nothing(
    mixed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    before = sorted(os.walk(tmp_path))
    assert isinstance(check_data(mixed), DataReport)
    assert sorted(os.walk(tmp_path)) == before


# The report agrees with prepare


def test_large_jpeg_that_prepare_reduces_is_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "PIXELS", 10_000)
    turned = Image.Exif()
    turned[0x0112] = 6
    for name, size, extra in (("0", (200, 300), {}), ("1", (300, 200), {"exif": turned})):
        write(tmp_path / f"raw/{name}.jpg", noise(1, size=size), kind="JPEG", **extra)
    write(tmp_path / "raw/2.png", noise(2, size=(200, 300)))
    report = check_data(tmp_path / "raw")
    assert (report.count, report.smallest, report.largest) == (2, (200, 300), (200, 300))
    assert [item.name for item in report.rejected] == ["2.png"]
    data = prepared(tmp_path, tmp_path / "raw", image_size=16, max_rejected=1.0)
    assert len(data) == 2 and list(rejected(tmp_path / "workspace")) == ["2.png"]


def test_many_copies_are_a_short_line(tmp_path: Path) -> None:
    for number in range(40):
        write(tmp_path / f"raw/{number:02d}.png", noise(1))
    report = check_data(tmp_path / "raw")
    assert len(report.copies[0]) == 40
    shown = " = ".join(f"{number:02d}.png" for number in range(5))
    assert f"  {shown} and 35 more" in format_report(report)


def test_report_says_whether_all_images_have_captions(tmp_path: Path) -> None:
    root = write_classes(tmp_path / "raw", ["cat", "dog"], each=2)
    write(
        root / "metadata.csv",
        "file_name;prompt\n"
        + "".join(
            f"{name}/00{number}.png;a {name}\n" for name in ("cat", "dog") for number in range(2)
        ),
    )
    assert not check_data(root).captioned
    settings = Prepare(caption_column="prompt")
    assert check_data(root, settings).captioned
    write(root / "cat/new.png", noise(99))
    assert not check_data(root, settings).captioned


def test_sample_has_distinct_squares_of_the_middle(tmp_path: Path) -> None:
    for number in range(10):
        write(tmp_path / f"raw/{number}.png", flat((20 * number, 0, 0), size=(90, 40)))
    write(tmp_path / "raw/90.png", flat((180, 0, 0), size=(90, 40)))
    report = inspect(tmp_path / "raw", sample=20)
    assert report.squares.shape == (10, 32, 32, 3)
    assert report.squares[:, 5, 5, 0].tolist() == [20 * number for number in range(10)]
    assert inspect(tmp_path / "raw", sample=5).squares[:, 0, 0, 0].tolist() == [0, 60, 120, 180]
    assert inspect(tmp_path / "raw").squares.shape == (0, 32, 32, 3)
