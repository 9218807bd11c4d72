"""`ddpm init` writes a params file that fits a source, and explains what it cannot use."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.images import flat, noise, write, write_classes
from typer.testing import CliRunner, Result

from ddpm_core.cli import app
from ddpm_core.config import Config
from ddpm_core.config import load as params
from ddpm_core.setup import machine
from ddpm_core.setup.init import SHOWN


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Measure few steps of few images; a step still trains the real network."""
    monkeypatch.setattr(machine, "SECONDS", 0.0)
    monkeypatch.setattr(machine, "STEPS", 1)
    monkeypatch.setattr(machine, "LONGEST", 0.1)
    monkeypatch.chdir(tmp_path)


def init(*arguments: str, status: int = 0) -> Result:
    result = CliRunner().invoke(app, ["init", *arguments])
    assert result.exit_code == status, result.output
    return result


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Images of two classes that are too small for any size above 16."""
    return write_classes(tmp_path / "photos", ["cat", "dog"], each=40)


def test_written_params_are_valid_and_explained(photos: Path) -> None:
    result = init("photos/", "--time", "1h")
    config = params.load(Path("params.yaml"))
    assert (config.prepare.source, config.prepare.image_size) == ("photos/", 16)
    assert (config.model.conditioning, config.train.flip) == ("class", True)
    assert config.workspace == "runs/photos" and config.registration.name == "ddpm-photos"
    text = Path("params.yaml").read_text(encoding="utf-8")
    assert "chosen by `ddpm init` --time 1 h on this machine" in text
    for line in text.splitlines():
        assert not line or line.startswith("#") or line.partition("  # ")[2].strip(), line
    sections = [line.partition(":")[0] for line in text.splitlines() if line[:1].isalpha()]
    assert sections == [name for name in Config().dump() if name in sections]
    for name in SHOWN:
        assert name in result.output
    assert "Wrote params.yaml. Next: ddpm run\n" in result.output


@pytest.mark.slow
def test_stdout_has_the_params_alone(photos: Path) -> None:
    result = init("photos", "--time", "1h", "-o", "-", "-S", "train.steps=77")
    config = params.load_text(result.stdout, "stdout")
    assert config.train.steps == 77
    assert "train.steps" in result.stderr and not list(Path().glob("*.yaml"))


@pytest.mark.slow
def test_settings_after_S_are_kept(photos: Path) -> None:
    settings = ["prepare.image_size=8", "model.conditioning=none", "train.flip=false"]
    init("photos", "-o", "small.yaml", *(part for one in settings for part in ("-S", one)))
    config = params.load(Path("small.yaml"))
    assert (config.prepare.image_size, config.model.conditioning) == (8, "none")
    assert not config.train.flip
    assert Path("small.yaml").read_text(encoding="utf-8").count("# set by -S") == 3


def test_invalid_settings_are_reported_before_the_images(photos: Path) -> None:
    output = init("photos", "-S", "train.stepz=3", status=1).output
    assert "train.stepz" in output and "check:" not in output


def test_existing_file_is_kept_and_a_missing_folder_reported(photos: Path) -> None:
    Path("params.yaml").write_text("seed: 1\n", encoding="utf-8")
    assert "params.yaml already exists" in init("photos", status=1).output
    assert Path("params.yaml").read_text(encoding="utf-8") == "seed: 1\n"
    assert (
        "The folder new of new/params.yaml does not exist"
        in init("photos", "-o", "new/params.yaml", status=1).output
    )


@pytest.mark.slow
def test_all_captions_give_text_conditioning(tmp_path: Path) -> None:
    root = write_classes(tmp_path / "raw", ["cat"], each=8)
    for number in range(8):
        write(root / f"cat/{number:03d}.txt", f"cat number {number}")
    init("raw", "--time", "1h")
    assert params.load(Path("params.yaml")).model.conditioning == "text"


# What cannot be used


def test_empty_source_is_explained(tmp_path: Path) -> None:
    write(tmp_path / "raw/notes.md", "x")
    output = init("raw", status=1).output
    assert "raw contains no images. It contains other files: 1 .md." in output
    assert not Path("params.yaml").exists()


def test_images_beside_class_folders_are_explained(photos: Path) -> None:
    for number in range(5):
        write(photos / f"{number}.png", noise(900 + number))
    output = " ".join(init("photos", status=1).output.split())
    assert "ddpm prepare would fail for photos: 5.9% of the images are unusable" in output
    assert "usable: 80 images (40 cat, 40 dog)" in output
    reason = "5 images (0.png, 1.png, 2.png ...): has no class: it has no label"
    assert reason in output


def test_unreadable_files_are_explained(photos: Path) -> None:
    write(photos / "cat/empty.png", b"")
    write(photos / "cat/broken.jpg", b"broken")
    output = init("photos", status=1).output
    assert "unusable: 1 image (cat/empty.png): empty: 0 bytes" in output
    assert "unusable: 1 image (cat/broken.jpg): not an image in a supported format" in output


@pytest.mark.slow
def test_mixed_formats_are_one_source(photos: Path) -> None:
    for number in range(20):
        write(photos / f"cat/more{number}.jpg", flat((number, 0, 0)), kind="JPEG")
    init("photos", "--time", "1h")
    assert "# 100 images: 80 PNG RGB, 20 JPEG RGB" in Path("params.yaml").read_text("utf-8")


@pytest.mark.slow
def test_too_short_a_time_is_refused(photos: Path) -> None:
    output = init("photos", "--time", "5s", status=1).output
    assert "--time: got 5 s" in output and "Give at least" in output
    assert "must be a time such as" in init("photos", "--time", "long", status=1).output


@pytest.mark.slow
def test_run_with_the_written_params_is_complete(photos: Path) -> None:
    init("photos", "--time", "1h", "-S", "train.steps=6", "-S", "sample.count=20")
    Path("params.yaml").write_text(
        Path("params.yaml").read_text("utf-8").replace("uri: sqlite:///mlflow.db", 'uri: ""')
    )
    result = CliRunner().invoke(app, ["run", "-S", "sample.steps=2"])
    assert result.exit_code == 0, result.output
    assert (Path("runs/photos/evaluation/report.html")).exists()
