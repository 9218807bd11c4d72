"""Event files for TensorBoard, read by TensorBoard's own reader."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.evaluated import Run, in_haste
from support.program import TINY, ddpm, prepare_run, settings
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ddpm_core.config import load as params
from ddpm_core.errors import UserError
from ddpm_core.storage.workspace import Workspace
from ddpm_core.tracking import tensorboard
from ddpm_core.tracking.tensorboard import Events, folder_of, write_rows

EVENTS = settings("tracking.tensorboard=events")


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard shows: step and value of each event, by name."""
    reader = EventAccumulator(str(folder), {"scalars": 0, "images": 0})
    reader.Reload()
    return {
        name: [(event.step, event.value) for event in reader.Scalars(name)]
        for name in reader.Tags()["scalars"]
    }


def image_steps(folder: Path) -> list[int]:
    reader = EventAccumulator(str(folder), {"images": 0})
    reader.Reload()
    return [event.step for event in reader.Images("grid")]


def rows(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "workspace/log.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def assert_follows(folder: Path) -> None:
    """Check that TensorBoard shows each number of log.jsonl once."""
    (training,) = (folder / "events").iterdir()
    assert training.name.startswith("workspace-")
    shown = scalars(training)
    for name in ("loss", "grad_norm", "lr", "epoch"):
        logged = [(row["step"], pytest.approx(row[name], rel=1e-6)) for row in rows(folder)]
        assert shown[f"train/{name}"] == logged
    assert "train/step" not in shown and "train/time" not in shown


@pytest.mark.slow
def test_repeated_steps_of_a_training_are_shown_once(tmp_path: Path) -> None:
    folder = prepare_run(tmp_path, TINY)
    ddpm(folder, "train", *EVENTS)
    assert_follows(folder)
    (training,) = (folder / "events").iterdir()
    assert image_steps(training) == [6, 12]
    # As if the process had been killed before the last snapshot: it resumes from step 8.
    shutil.rmtree(folder / "workspace/snapshots/step-00000012")
    assert "resuming from step 8" in ddpm(folder, "train", *EVENTS)
    assert len(list(training.iterdir())) == 2
    assert_follows(folder)
    assert image_steps(training) == [6, 12]
    ddpm(folder, "train", *EVENTS)  # nothing to do
    assert len(list(training.iterdir())) == 2


@pytest.mark.slow
def test_rows_of_an_ended_training_are_written_later(tmp_path: Path) -> None:
    folder = prepare_run(tmp_path, TINY)
    ddpm(folder, "train")
    ddpm(folder, "train", *EVENTS)
    assert_follows(folder)


@pytest.mark.slow
def test_training_continues_without_its_events(tmp_path: Path) -> None:
    folder = prepare_run(tmp_path, TINY)
    (folder / "events").write_text("a file")
    said = ddpm(folder, "train", *EVENTS)
    assert said.count("Stopped writing events for TensorBoard to") == 1
    assert rows(folder)[-1]["step"] == 12


def test_events_after_a_kill_replace_those_since_the_snapshot(tmp_path: Path) -> None:
    killed = Events(tmp_path)
    for step in range(1, 8):
        killed.row({"step": step, "loss": 1.0})
    killed.flush()  # and never closed
    (file,) = tmp_path.iterdir()
    with file.open("ab") as torn:
        torn.write(b"\x20\0\0\0\0")
    resumed = Events(tmp_path, 5)  # from the snapshot of step 4
    for step in range(1, 11):
        resumed.row({"step": step, "loss": 2.0, "done": True, "note": "text"})
    resumed.close()
    expected = [(step, 1.0 if step < 5 else 2.0) for step in range(1, 11)]
    assert scalars(tmp_path) == {"train/loss": expected}


def test_rows_are_complete_if_the_folder_is_new(tmp_path: Path) -> None:
    events = Events(tmp_path / "new", 5)
    events.row({"step": 1, "loss": 1.0})
    events.close()
    write_rows(tmp_path / "new", [{"step": 2, "loss": 1.0}])  # not new any more
    assert scalars(tmp_path / "new") == {"train/loss": [(1, 1.0)]}


def test_each_way_of_scoring_has_its_own_curve(tmp_path: Path) -> None:
    run = Run(tmp_path, tracking={"uri": "", "tensorboard": str(tmp_path / "events")})
    run.put_data()
    run.put_samples(200, 60)
    with in_haste():
        run.evaluate(metrics=("fid",))
        run.put_samples(400, 20)
        run.evaluate(metrics=("fid",))  # adds a step, and writes the other one again
        run.put_samples(600, 10, seed=2)
        found = run.evaluate(metrics=("fid",))
    (training,) = (tmp_path / "events").iterdir()
    assert training.name == "run-01234567"
    curves = {path.name.rpartition("-")[0]: scalars(path) for path in training.iterdir()}
    name, score = "dpmpp-20-steps-100-images-seed", "fd_in_domain_100"
    first = [(step, pytest.approx(found[step]["score"])) for step in (200, 400)]
    assert curves[f"{name}-1"][score] == first
    assert [step for step, _ in curves[f"{name}-2"][score]] == [600]
    shutil.rmtree(tmp_path / "events")
    run.evaluate(metrics=("fid",))  # nothing is new, but the files are missing
    assert {path.name.rpartition("-")[0] for path in training.iterdir()} == set(curves)


def test_missing_package_turns_events_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tensorboard, "find_spec", lambda name: None)
    given = params.validate({"tracking": {"tensorboard": str(tmp_path / "events")}})
    assert folder_of(given, Workspace.open(str(tmp_path)), "cafe") is None
    assert "pip install 'ddpm-core[tensorboard]'" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["", "s3://bucket/events"])
def test_events_are_written_to_local_folders_only(given: str) -> None:
    with pytest.raises(UserError, match=r"tracking\.tensorboard: got"):
        params.validate({"tracking": {"tensorboard": given}})
