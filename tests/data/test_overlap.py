"""prepare deletes no files of the user, and does not read files of the run as images."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.images import config, noise, prepared, write, write_classes
from support.program import ddpm

from ddpm_core.config.results import Tracking
from ddpm_core.data.check import check_data
from ddpm_core.data.dataset import open_dataset
from ddpm_core.data.overlap import refuse_overlap
from ddpm_core.data.prepare import prepare, stale
from ddpm_core.errors import UserError
from ddpm_core.storage.workspace import Workspace


def files(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file()}


# Images where the packed data are stored


@pytest.mark.parametrize(
    "source", ["data", "data/cat", "./x/../data/", "link", "samples", "{}/data"]
)
def test_source_in_a_run_output_is_refused_and_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    write_classes(tmp_path / "data", ["cat", "dog"])
    write_classes(tmp_path / "samples", ["cat", "dog"])
    (tmp_path / "x").mkdir()
    (tmp_path / "link").symlink_to("data")
    monkeypatch.chdir(tmp_path)
    before = files(tmp_path)
    for workspace in (".", str(tmp_path)):
        with pytest.raises(UserError, match="where a run writes its own files"):
            prepare(config(source.format(tmp_path)), Workspace.open(workspace))
    assert files(tmp_path) == before


def test_archive_in_a_run_output_is_refused(tmp_path: Path) -> None:
    archive = write(tmp_path / "workspace/data/photos.zip", b"PK")
    with pytest.raises(UserError, match="where a run writes its own files"):
        prepared(tmp_path, archive)


def test_source_behind_a_link_at_data_is_refused(tmp_path: Path) -> None:
    source = write_classes(tmp_path / "photos", ["cat"])
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace/data").symlink_to(source)
    with pytest.raises(UserError, match="where a run writes its own files"):
        prepared(tmp_path, source)


def test_user_files_in_data_stop_prepare_before_it_decodes(
    tmp_path: Path,
) -> None:
    write(tmp_path / "workspace/data/thesis.csv", "years of work")
    write(tmp_path / "raw/0.png", b"broken")
    before = files(tmp_path)
    with pytest.raises(UserError, match=r"prepare did not write, such as thesis\.csv"):
        prepared(tmp_path, tmp_path / "raw")
    assert files(tmp_path) == before


def test_user_files_beside_packed_data_are_not_deleted(tmp_path: Path) -> None:
    root = write_classes(tmp_path / "raw", ["cat"])
    prepared(tmp_path, root)
    notes = write(tmp_path / "workspace/data/notes.txt", "what I saw")
    prepared(tmp_path, root)  # up to date, so nothing is replaced
    write(root / "cat/new.png", noise(99))
    with pytest.raises(UserError, match=r"such as notes\.txt"):
        prepared(tmp_path, root)
    notes.unlink()
    write(tmp_path / "workspace/data/Thumbs.db", b"")
    assert len(prepared(tmp_path, root)) == 4


@pytest.mark.parametrize("manifest", [None, b"{", b"{}"])
def test_data_with_a_damaged_manifest_are_rebuilt(tmp_path: Path, manifest: bytes | None) -> None:
    root = write_classes(tmp_path / "raw", ["cat"])
    before = prepared(tmp_path, root).fingerprint
    path = tmp_path / "workspace/data/manifest.json"
    path.unlink()
    if manifest is not None:
        path.write_bytes(manifest)
    assert prepared(tmp_path, root).fingerprint == before


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("s3://box/run/data", "where a run writes"),
        ("s3://box/run/data/cat/", "where a run writes"),
        ("s3://box/run/", "the workspace itself"),
    ],
)
def test_source_in_a_run_output_in_s3_is_refused(source: str, error: str) -> None:
    class There:
        uri = "s3://box/run"
        shown = staticmethod(lambda key: f"s3://box/run/{key}")

    with pytest.raises(UserError, match=error):
        refuse_overlap(source, There())  # type: ignore[arg-type]


# Empty settings


@pytest.mark.parametrize(
    "arguments", [["-w", ""], ["-w", " "], ["-S", "workspace="], ["-S", "prepare.source=''"]]
)
def test_empty_path_is_not_the_current_folder(tmp_path: Path, arguments: list[str]) -> None:
    here = write_classes(tmp_path / "here", ["cat"])
    printed = ddpm(here, "prepare", *arguments, status=1)
    assert re.search(r"(workspace|prepare\.source): .*directory", printed)
    assert "Traceback" not in printed
    assert [item.name for item in here.iterdir()] == ["cat"]


def test_check_data_refuses_an_empty_source() -> None:
    with pytest.raises(UserError, match="got ''"):
        check_data("")


# A workspace among the images


@pytest.mark.parametrize("workspace", ["run", "deep/down/run", "link"])
def test_workspace_inside_the_source_is_excluded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workspace: str
) -> None:
    root = write_classes(tmp_path / "photos", ["cat", "dog"])
    (root / "deep/down").mkdir(parents=True)
    if workspace == "link":
        (tmp_path / "elsewhere").mkdir()
        (root / "link").symlink_to(tmp_path / "elsewhere")
    monkeypatch.chdir(root)
    opened = Workspace.open(workspace)
    settings = config(".", max_rejected=0.0)
    assert prepare(settings, opened)["classes"] == ["cat", "dog"]
    assert len(open_dataset(opened)) == 6
    write(Path(workspace, "samples/step-00000001/grid.png"), noise(99))
    assert stale(settings, opened) is None
    write(root / "cat/new.png", noise(98))
    assert stale(settings, opened) == "the source has changed since it was prepared"
    assert prepare(settings, opened)["count"] == 7


def test_mlflow_files_beside_the_images_are_excluded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_classes(tmp_path, ["cat", "dog", "mlruns"])
    monkeypatch.chdir(tmp_path)
    opened, settings = Workspace.open("run"), config(".", max_rejected=0.0)
    assert prepare(settings, opened)["classes"] == ["cat", "dog", "mlruns"]
    for name in ("mlflow.db", "mlflow.db-journal"):
        write(tmp_path / name, b"SQLite format 3")
    write(tmp_path / "mlartifacts/1/grid.png", noise(99))
    assert stale(settings, opened) is None
    write(tmp_path / "cat/new.png", noise(98))
    assert prepare(settings, opened)["classes"] == ["cat", "dog", "mlruns"]
    elsewhere = Tracking(uri=f"sqlite:///{tmp_path}/elsewhere/mlflow.db")
    settings = settings.model_copy(update={"tracking": elsewhere})
    assert prepare(settings, opened)["classes"] == ["cat", "dog", "mlartifacts", "mlruns"]


def test_workspace_as_source_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_classes(tmp_path, ["cat"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="the workspace itself"):
        prepare(config("."), Workspace.open("."))
    assert [item.name for item in tmp_path.iterdir()] == ["cat"]
