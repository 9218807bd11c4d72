"""A run with different settings moves away completely, and comes back; on disk and in S3.

The tests interrupt moves before each write. Whichever run starts next, and whichever after that,
gets all of its snapshots and its log back.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from faults.attempt import together
from support.program import TINY, ddpm, new_run, prepare_run, settings
from support.runs import bits, final, rows
from support.s3_server import Bucket

from ddpm_core.storage.bucket import Bucket as Requests
from ddpm_core.storage.local import LocalStorage
from ddpm_core.storage.workspace import LOG, RUN, SNAPSHOTS, Workspace, snapshot_key
from ddpm_core.training.resume import Policy, settle

OTHER = settings("train.optimizer.lr=0.002")
A, B = ({"data": "d", "train.optimizer.lr": rate} for rate in (1.0, 2.0))
STEPS = {1.0: (2, 4), 2.0: (4,)}  # snapshots of a run, by its learning rate


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_run(tmp_path_factory.mktemp("prepared"), TINY)


def begun(prepared: Path, name: str) -> Path:
    folder = new_run(prepared, name, TINY)
    ddpm(folder, "train", *settings("train.steps=10"))
    return folder


def listed(folder: Path) -> list[str]:
    """Return all files of a run except the lease."""
    paths = (folder / "workspace").rglob("*")
    return sorted(str(path.relative_to(folder)) for path in paths if "lease" not in path.name)


@pytest.mark.slow
def test_run_whose_first_step_fails_moves_nothing(prepared: Path) -> None:
    folder = begun(prepared, "unable")
    before = listed(folder)
    said = ddpm(folder, "train", *settings("train.batch_size=1000000000000"), status=1)
    assert "train.batch_size" in said
    assert listed(folder) == before
    assert "up to date" in ddpm(folder, "train", *settings("train.steps=10"))


@pytest.mark.slow
def test_superseded_run_resumes_when_its_settings_return(prepared: Path) -> None:
    undisturbed = new_run(prepared, "undisturbed", TINY)
    ddpm(undisturbed, "train")
    folder = begun(prepared, "back")
    said = ddpm(folder, "train", *OTHER)
    assert "Moved it to superseded/001" in said and "train.optimizer.lr: 0.001 -> 0.002" in said
    other = bits(final(folder, 12))
    assert [row["step"] for row in rows(folder)] == list(range(2, 13, 2))
    said = ddpm(folder, "train")
    assert "took back the run with these settings from superseded/001" in said
    assert "resuming from step 10 of 12" in said
    assert bits(final(folder, 12)) == bits(final(undisturbed, 12))
    curves = [[(row["step"], row["loss"]) for row in rows(run)] for run in (folder, undisturbed)]
    assert curves[0] == curves[1]
    assert "up to date, at step 12 of 12" in ddpm(folder, "train", *OTHER)
    assert bits(final(folder, 12)) == other


@pytest.mark.slow
def test_two_workers_move_a_run_away_and_take_it_back(prepared: Path) -> None:
    folder = begun(prepared, "together")
    said = together(folder, 2, "train", *OTHER, *settings("train.grid=0", "train.steps=4"))
    assert said.count("Moved it to superseded/001") == 1
    assert [row["world_size"] for row in rows(folder)] == [2, 2]
    assert "resuming from step 10 of 12" in together(folder, 2, "train", *settings("train.grid=0"))
    assert [row["step"] for row in rows(folder)] == list(range(2, 13, 2))


@pytest.mark.slow
def test_discarded_snapshots_are_not_taken_back(prepared: Path) -> None:
    folder = begun(prepared, "shorter")
    said = ddpm(folder, "train", *settings("train.steps=9"))
    assert "superseded/001: [10]" in said
    assert "resuming from step 9 of 11" in ddpm(folder, "train", *settings("train.steps=11"))


class Killed(BaseException):
    """The process ends here."""


class Writes:
    """Interrupts the process before one of its next writes to the workspace."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: float = float("inf")
        for kind, names in (
            (LocalStorage, ("write", "move", "remove")),
            (Requests, ("copy", "put")),
        ):
            for name in names:
                monkeypatch.setattr(kind, name, self._counted(getattr(kind, name)))
        remove = self._counted(Requests.remove)
        monkeypatch.setattr(
            Requests, "remove", lambda self, names: [remove(self, [name]) for name in list(names)]
        )

    def _counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                raise Killed
            return method(*given)

        return counted


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Writes:
    return Writes(monkeypatch)


@pytest.fixture(params=["disk", "s3"])
def places(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """URIs of new workspaces."""
    if request.param == "disk":
        return (str(tmp_path / str(number)) for number in count())
    bucket: Bucket = request.getfixturevalue("bucket")
    bucket.enter(monkeypatch, tmp_path)
    return (bucket.uri(f"{tmp_path.name}/{number}") for number in count())


def put(workspace: Workspace, identity: dict[str, Any]) -> None:
    """Create a run with these settings."""
    rate = identity["train.optimizer.lr"]
    for step in STEPS[rate]:
        with workspace.storage.new_folder(snapshot_key(step), {"step": step}) as folder:
            (folder / "config.json").write_text(json.dumps({"identity": identity}))
            (folder / "model.safetensors").write_text(f"{rate} {step}")
    workspace.write_json(RUN, {"identity": identity, "mlflow": {"run_id": f"run of {rate}"}})
    lines = [f'{{"step": {step}, "lr": {rate}}}\n'.encode() for step in (1, 2)]
    if workspace.uri.startswith("s3://"):
        for number, line in enumerate(lines):
            workspace.storage.write(f"{LOG}.parts/{number:08d}-0000", line)
    else:
        workspace.storage.write(LOG, b"".join(lines))


def assert_is(workspace: Workspace, identity: dict[str, Any]) -> None:
    """Assert that the workspace contains all of this run, and nothing of another."""
    rate = identity["train.optimizer.lr"]
    assert tuple(workspace.steps(SNAPSHOTS)) == STEPS[rate]
    for step in STEPS[rate]:
        weights = workspace.path(snapshot_key(step)) / "model.safetensors"
        assert weights.read_text() == f"{rate} {step}"
    log = [json.loads(line) for line in workspace.path(LOG).read_text().splitlines()]
    assert log == [{"step": step, "lr": rate} for step in (1, 2)]
    run = workspace.read_json(RUN)
    assert (run["identity"], run["mlflow"]) == (identity, {"run_id": f"run of {rate}"})


def started(uri: str, identity: dict[str, Any]) -> Workspace:
    """Return the workspace after a new process has started a run with these settings."""
    workspace = Workspace.open(uri)
    workspace.storage.sweep()
    assert settle(workspace, identity, Policy()) is None
    return workspace


@pytest.mark.slow
def test_move_can_be_interrupted_at_any_moment(places: Iterator[str], writes: Writes) -> None:
    for number in count():
        uri = next(places)
        left = number * (17 if uri.startswith("s3://") else 1)  # where each request is a write
        workspace = Workspace.open(uri)
        put(workspace, B)
        workspace.write_json("superseded/001/run.json", workspace.read_json(RUN))
        for key in (*(snapshot_key(step) for step in STEPS[2.0]), LOG):
            workspace.storage.move(key, f"superseded/001/{key}")
        put(workspace, A)
        writes.left = left
        with contextlib.suppress(Killed):
            settle(workspace, B, Policy())
        done, writes.left = writes.left >= 0, float("inf")
        for identity in (A, B) if number % 2 else (B, A):
            assert_is(started(uri, identity), identity)
        if done:
            break
    assert number > 1
