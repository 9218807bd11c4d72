"""Too many rejected images are one error, and the complete list is kept in the workspace."""

from __future__ import annotations

import csv
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.images import config, noise, prepared, rejected, write, write_classes

from ddpm_core.data.check import check_data, format_report
from ddpm_core.data.prepare import prepare
from ddpm_core.data.rejected import REJECTED, UnusableSource, rejected_list
from ddpm_core.data.sources.base import Rejection
from ddpm_core.errors import UserError
from ddpm_core.storage.workspace import Workspace

# No training images


def only_test(root: Path) -> Any:
    write_classes(root, ["test/cat", "test/dog"])


def only_batch_of_test(root: Path) -> Any:
    random = np.random.default_rng(0).integers(0, 10, (4, 3073), np.uint8)
    write(root / "test_batch.bin", random.tobytes())


def some_broken(root: Path) -> Any:
    write_classes(root, ["test/cat"])
    write(root / "train/cat/0.png", b"broken")


def all_broken(root: Path) -> Any:
    write(root / "a/0.png", b"broken")
    write(root / "b/1.jpg", b"")


def class_of_test(root: Path) -> Any:
    write_classes(root, ["train/cat", "test/dog"])
    return ["dog"]


@pytest.mark.parametrize(
    ("fill", "reason"),
    [
        (only_test, "all 6 usable images are held out"),
        (only_batch_of_test, "all 4 usable images are held out"),
        (some_broken, "all 3 usable images are held out"),
        (class_of_test, "all 3 usable images are held out"),
        (all_broken, "none of the images can be used"),
    ],
)
def test_no_training_images_is_an_error_and_a_note(tmp_path: Path, fill: Any, reason: str) -> None:
    classes = fill(tmp_path / "raw")
    with pytest.raises(UserError, match=f"No training images in .*: {reason}"):
        prepared(tmp_path, tmp_path / "raw", max_rejected=1.0, classes=classes)
    assert not (tmp_path / "workspace/data").exists()
    if classes is None:
        assert f"prepare would fail: {reason}" in "\n".join(
            format_report(check_data(tmp_path / "raw"))
        )


# The list


def read(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def test_rejected_list_is_kept_until_prepare_succeeds(
    tmp_path: Path,
) -> None:
    root, opened = tmp_path / "raw", Workspace.open(str(tmp_path / "workspace"))
    for number in range(30):
        write(root / f"{number:02d}.png", b"broken")
    write(root / "good.png", noise(1))
    with pytest.raises(UserError, match="30 of 31 images") as caught:
        prepare(config(root), opened)
    path = tmp_path / "workspace" / REJECTED
    assert f"all are listed in {path}:\n" in str(caught.value)
    assert "and 10 more" in str(caught.value)
    assert [row[0] for row in read(path)[1:]] == [f"{number:02d}.png" for number in range(30)]
    prepare(config(root, max_rejected=1.0), opened)
    assert not path.exists() and len(rejected(tmp_path / "workspace")) == 30


def test_users_own_rejected_csv_is_kept(tmp_path: Path) -> None:
    own = write(tmp_path / "workspace/rejected.csv", "name;mark\n")
    write(tmp_path / "raw/0.png", b"broken")
    write(tmp_path / "raw/1.png", noise(1))
    with pytest.raises(UserError) as caught:
        prepared(tmp_path, tmp_path / "raw")
    assert REJECTED not in str(caught.value)
    prepared(tmp_path, tmp_path / "raw", max_rejected=1.0)
    assert own.read_text() == "name;mark\n"


def test_full_disk_does_not_hide_the_error() -> None:
    class Full:
        def exists(self, key: str) -> bool:
            raise OSError(28, "No space left on device")

    error = UnusableSource("Too many", [Rejection("a", "b")])
    with (
        pytest.raises(UnusableSource, match="Too many:\n  a: b"),
        rejected_list(Workspace(Full())),  # type: ignore[arg-type]
    ):
        raise error


def test_control_characters_in_names_are_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_classes(tmp_path / "raw", ["cat", "dog\nwarning: forged"])
    write(root / "cat/x\nddpm prepare: all is well\x1b[2K\u202e.png", b"broken")
    write(root / "dog\nwarning: forged/odd.png", b"broken")
    with pytest.raises(UserError) as caught:
        prepared(tmp_path, root)
    shown = "cat/x\\nddpm prepare: all is well\\x1b[2K\\u202e.png"
    assert f"  {shown}: not an image" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 3
    table = (tmp_path / "workspace" / REJECTED).read_bytes()
    assert b"\x1b" not in table and len(table.splitlines()) == 3
    with pytest.raises(UserError, match=r"has cat, dog\\nwarning: forged\.$"):
        prepared(tmp_path, root, classes=["emu"])
    write(root / "\nforged/0.png", b"broken")
    prepared(tmp_path, root, max_rejected=1.0)
    assert not [line for line in capsys.readouterr().err.splitlines() if "forged" in line[:16]]


def test_error_for_no_images_is_on_one_line(tmp_path: Path) -> None:
    write(tmp_path / "raw/a.x\ny", "text")
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        archive.add(tmp_path / "raw", ".")
    for source in (tmp_path / "raw", tmp_path / "x.tar"):
        with pytest.raises(UserError, match=r"1 \.x\\ny") as caught:
            check_data(source)
        assert "\n" not in str(caught.value)
