"""A run with different settings moves to superseded/ before training starts from step 0."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.program import TINY, ddpm, new_run, prepare_run, settings
from support.runs import rows

OTHER = settings("train.optimizer.lr=0.002")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_run(tmp_path_factory.mktemp("prepared"), TINY)


def begun(prepared: Path, name: str, steps: int) -> Path:
    """Train some steps, with a snapshot after every fourth and after the last."""
    folder = new_run(prepared, name, TINY)
    ddpm(folder, "train", *settings(f"train.steps={steps}"))
    return folder


def steps_of(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("snapshots/*"))


def test_new_settings_start_from_step_0_and_keep_the_old_run(prepared: Path) -> None:
    folder = begun(prepared, "other", 10)
    workspace = folder / "workspace"
    said = ddpm(folder, "train", *OTHER, *settings("train.steps=5"))
    assert "train.optimizer.lr: 0.001 -> 0.002" in said
    assert steps_of(workspace / "superseded/001") == [6, 8, 10]
    assert (workspace / "superseded/001/log.jsonl").is_file()
    assert steps_of(workspace) == [4, 5]


@pytest.mark.parametrize("given", [("--resume", "strict"), ("--from-step", "8")])
def test_strict_resume_and_from_step_move_nothing(prepared: Path, given: tuple[str, str]) -> None:
    folder = begun(prepared, f"refused{given[0]}", 10)
    said = ddpm(folder, "train", *given, *OTHER, status=1)
    assert "train.optimizer.lr: 0.001 -> 0.002" in said
    assert given[0] in said
    assert steps_of(folder / "workspace") == [6, 8, 10]
    assert (folder / "workspace/log.jsonl").is_file()
    assert not (folder / "workspace/superseded").exists()


def test_invalid_train_init_moves_nothing(prepared: Path) -> None:
    folder = begun(prepared, "unmade", 10)
    said = ddpm(folder, "train", *settings("train.init=absent"), status=1)
    assert "'absent', which is not a folder" in said
    assert steps_of(folder / "workspace") == [6, 8, 10]
    assert "up to date" in ddpm(folder, "train", *settings("train.steps=10"))


def test_train_init_in_the_own_workspace_is_refused(prepared: Path) -> None:
    folder = begun(prepared, "own", 10)
    given = settings("train.init=workspace/snapshots/step-00000010")
    said = ddpm(folder, "train", *OTHER, *given, status=1)
    assert "Copy it elsewhere" in said
    assert steps_of(folder / "workspace") == [6, 8, 10]
    assert not (folder / "workspace/superseded").exists()


def test_damaged_newest_snapshot_is_reported_and_replaced(prepared: Path) -> None:
    folder = begun(prepared, "stale", 10)
    for damage in (lambda file: file.write_bytes(b"cut"), lambda file: file.unlink()):
        damage(folder / "workspace/snapshots/step-00000010/model.safetensors")
        assert "step-00000010" in ddpm(folder, "status", *settings("train.steps=10"))
        ddpm(folder, "train", *settings("train.steps=10"))
        said = ddpm(folder, "wait", "train", *settings("train.steps=10"))
        assert "up to date" in said


def test_log_of_a_run_without_snapshots_is_moved_away(prepared: Path) -> None:
    # The error advises a lower learning rate, which is a different setting.
    folder = new_run(prepared, "burst", TINY)
    wild = settings("train.optimizer.lr=1e30", "train.optimizer.clip=0", "train.log_every=1")
    told = ddpm(folder, "train", *wild, status=1)
    assert "is not finite, after logged losses of " in told
    assert f"{rows(folder)[-1]['loss']:.3g}" in told
    said = ddpm(folder, "train", *settings("train.log_every=1"))
    assert "train.optimizer.lr: 1e+30 -> 0.001" in said
    assert [row["step"] for row in rows(folder)] == list(range(1, 13))
    assert max(row["lr"] for row in rows(folder)) <= 0.001


def test_damaged_snapshot_beyond_the_last_step_is_moved_once(prepared: Path) -> None:
    folder = begun(prepared, "late", 10)
    (folder / "workspace/snapshots/step-00000010/model.safetensors").write_bytes(b"damaged")
    said = ddpm(folder, "train", *settings("train.steps=9"))
    assert "moved to superseded/001: [10]" in said
    assert steps_of(folder / "workspace") == [6, 8, 9]


def test_milestones_stay_after_milestone_every_grows(prepared: Path) -> None:
    folder = begun(prepared, "fewer", 19)
    assert steps_of(folder / "workspace") == [6, 12, 18, 19]
    ddpm(folder, "train", *settings("train.steps=30", "train.milestone_every=30", "train.keep=1"))
    assert steps_of(folder / "workspace") == [6, 12, 18, 30]


def test_shorter_run_that_ends_at_a_milestone_is_up_to_date(prepared: Path) -> None:
    folder = begun(prepared, "shorter", 20)
    weights = folder / "workspace/snapshots/step-00000012/model.safetensors"
    made = weights.stat().st_mtime_ns
    said = ddpm(folder, "train", *settings("train.steps=12"))
    assert "moved to superseded/001: [18, 20]" in said and "up to date, at step 12" in said
    assert "up to date" in ddpm(folder, "wait", "train", *settings("train.steps=12"))
    assert weights.stat().st_mtime_ns == made
    said = ddpm(folder, "train", *settings("train.steps=14"))
    assert (
        "The snapshots of steps [6, 12] have no optimizer state. Training starts from step 0"
        in said
    )
    assert weights.stat().st_mtime_ns > made
