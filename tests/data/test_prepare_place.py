"""prepare writes over nothing that it has not written itself, and packs nothing that it has."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.pictures import config, noise, prepared, write, write_classes
from support.program import ddpm

from ddpm_core.config.results import Tracking
from ddpm_core.data.check import check_data
from ddpm_core.data.dataset import open_dataset
from ddpm_core.data.place import refuse_own_places
from ddpm_core.data.prepare import prepare, stale
from ddpm_core.errors import UserError
from ddpm_core.storage.workspace import Workspace


def files(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file()}


# pictures in the place of the packed data


@pytest.mark.parametrize(
    "source", ["data", "data/cat", "./x/../data/", "link", "samples", "{}/data"]
)
def test_a_source_where_a_run_writes_is_refused_and_whole_afterwards(
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


def test_an_archive_where_a_run_writes_is_refused(tmp_path: Path) -> None:
    archive = write(tmp_path / "workspace/data/photos.zip", b"PK")
    with pytest.raises(UserError, match="where a run writes its own files"):
        prepared(tmp_path, archive)


def test_a_link_in_the_place_of_the_packed_data_protects_what_it_leads_to(tmp_path: Path) -> None:
    source = write_classes(tmp_path / "photos", ["cat"])
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace/data").symlink_to(source)
    with pytest.raises(UserError, match="where a run writes its own files"):
        prepared(tmp_path, source)


def test_files_of_others_in_the_place_of_the_packed_data_are_told_before_work_begins(
    tmp_path: Path,
) -> None:
    write(tmp_path / "workspace/data/thesis.csv", "years of work")
    write(tmp_path / "raw/0.png", b"broken")
    before = files(tmp_path)
    with pytest.raises(UserError, match=r"no prepare has written, such as thesis.csv"):
        prepared(tmp_path, tmp_path / "raw")
    assert files(tmp_path) == before


def test_files_of_others_beside_packed_data_are_not_deleted_with_them(tmp_path: Path) -> None:
    root = write_classes(tmp_path / "raw", ["cat"])
    prepared(tmp_path, root)
    notes = write(tmp_path / "workspace/data/notes.txt", "what I saw")
    prepared(tmp_path, root)  # nothing to do, and nothing in the way
    write(root / "cat/new.png", noise(99))
    with pytest.raises(UserError, match=r"such as notes\.txt"):
        prepared(tmp_path, root)
    notes.unlink()
    write(tmp_path / "workspace/data/Thumbs.db", b"")
    assert len(prepared(tmp_path, root)) == 4


@pytest.mark.parametrize("manifest", [None, b"{", b"{}"])
def test_packed_data_with_a_damaged_manifest_are_made_anew(
    tmp_path: Path, manifest: bytes | None
) -> None:
    root = write_classes(tmp_path / "raw", ["cat"])
    before = prepared(tmp_path, root).fingerprint
    path = tmp_path / "workspace/data/manifest.json"
    path.unlink()
    if manifest is not None:
        path.write_bytes(manifest)
    assert prepared(tmp_path, root).fingerprint == before


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("s3://box/run/data", "where a run writes"),
        ("s3://box/run/data/cat/", "where a run writes"),
        ("s3://box/run/", "the workspace itself"),
    ],
)
def test_the_same_is_refused_in_s3(source: str, told: str) -> None:
    class There:
        uri = "s3://box/run"
        shown = staticmethod(lambda key: f"s3://box/run/{key}")

    with pytest.raises(UserError, match=told):
        refuse_own_places(source, There())  # type: ignore[arg-type]


# nothing given


@pytest.mark.parametrize(
    "arguments", [["-w", ""], ["-w", " "], ["-S", "workspace="], ["-S", "prepare.source=''"]]
)
def test_an_empty_name_is_not_taken_for_the_current_folder(
    tmp_path: Path, arguments: list[str]
) -> None:
    here = write_classes(tmp_path / "here", ["cat"])
    said = ddpm(here, "prepare", *arguments, status=1)
    assert "got '" in said and "must be" in said and "Traceback" not in said
    assert [item.name for item in here.iterdir()] == ["cat"]


def test_an_empty_source_is_not_checked_as_the_current_folder() -> None:
    with pytest.raises(UserError, match="'' given"):
        check_data("")


# a workspace among the pictures


@pytest.mark.parametrize("workspace", ["run", "deep/down/run", "link"])
def test_a_workspace_inside_the_source_is_no_part_of_it(
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


def test_what_mlflow_keeps_beside_the_pictures_is_no_part_of_them(
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


def test_the_workspace_itself_is_no_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_classes(tmp_path, ["cat"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="the workspace itself"):
        prepare(config("."), Workspace.open("."))
    assert [item.name for item in tmp_path.iterdir()] == ["cat"]
