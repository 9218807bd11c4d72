"""All runs on a data set use one in-domain extractor, shared through MLflow."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.digits_workspace import (
    digits,
    make_config,
)
from support.extractors import CPU, few, splits, workspace_at
from support.mlflow_server import put_store, shared_server

from ddpm_core.data.dataset import open_dataset
from ddpm_core.evaluation.freshness import EXTRACTOR
from ddpm_core.evaluation.in_domain import (
    save_extractor,
    train_extractor,
)
from ddpm_core.evaluation.shared import SHARED, open_in_domain
from ddpm_core.storage.workspace import Workspace
from ddpm_core.tracking.client import connect


@pytest.fixture
def store() -> str:
    return shared_server().running().uri


def small_workspace(root: Path, invert: bool = False) -> Workspace:
    """300 digits of 8x8, on which a full training takes two seconds."""
    images, labels = digits(8)
    images = 255 - images if invert else images
    return workspace_at(root, images=images[:300], labels=labels[:300], held_out=60)


def put_extractor(workspace: Workspace, seed: int = 0) -> None:
    with workspace.storage.new_folder(EXTRACTOR) as folder:
        save_extractor(train_extractor(*splits(workspace), seed=seed, steps=2), folder)


def test_second_run_on_a_data_set_uses_the_first_extractor(
    tmp_path: Path, store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path, tracking={"uri": store, "experiment": "second run"})
    first, second = small_workspace(tmp_path / "first"), small_workspace(tmp_path / "second")
    put_extractor(first)
    mine = open_in_domain(config, first, *splits(first), CPU)
    capsys.readouterr()
    theirs = open_in_domain(config, second, *splits(second), CPU)
    assert "using the extractor for these data from MLflow" in capsys.readouterr().err
    assert theirs.fingerprint == mine.fingerprint
    assert torch.equal(theirs(few())[0], mine(few())[0])
    other = small_workspace(tmp_path / "other", invert=True)
    put_extractor(other)
    assert open_in_domain(config, other, *splits(other), CPU).fingerprint != mine.fingerprint


def test_extractor_is_published_once_mlflow_is_available(
    tmp_path: Path, store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    unavailable = make_config(tmp_path, tracking={"uri": "http://127.0.0.1:1"})
    available = make_config(tmp_path, tracking={"uri": store, "experiment": "unavailable"})
    workspace = small_workspace(tmp_path / "run")
    put_extractor(workspace)
    mine = open_in_domain(unavailable, workspace, *splits(workspace), CPU)
    assert "the connection was refused" in capsys.readouterr().err
    assert workspace.read_json(SHARED) == {}
    open_in_domain(available, workspace, *splits(workspace), CPU)
    assert workspace.read_json(SHARED)["uri"] == store
    second = small_workspace(tmp_path / "second")
    assert open_in_domain(available, second, *splits(second), CPU).fingerprint == mine.fingerprint


def test_mlflows_extractor_replaces_a_local_one(tmp_path: Path, store: str) -> None:
    config = make_config(tmp_path, tracking={"uri": store, "experiment": "meanwhile"})
    published, meanwhile = small_workspace(tmp_path / "one"), small_workspace(tmp_path / "two")
    put_extractor(published)
    put_extractor(meanwhile, seed=1)
    first = open_in_domain(config, published, *splits(published), CPU)
    own = open_in_domain(make_config(tmp_path), meanwhile, *splits(meanwhile), CPU)
    assert own.fingerprint != first.fingerprint
    now = open_in_domain(config, meanwhile, *splits(meanwhile), CPU)
    assert now.fingerprint == first.fingerprint


def test_extractors_have_their_own_experiment(tmp_path: Path) -> None:
    """Extractors that an earlier version published among training runs are still used."""
    place = put_store(tmp_path / "mlflow.db")
    config = make_config(tmp_path, tracking={"uri": place, "experiment": "digits"})
    first, second = small_workspace(tmp_path / "first"), small_workspace(tmp_path / "second")
    put_extractor(first)
    mine = open_in_domain(config, first, *splits(first), CPU)
    client = connect(place)
    experiment = client.get_experiment_by_name("digits-extractors").experiment_id
    assert len(client.search_runs([experiment])) == 1
    assert client.get_experiment_by_name("digits") is None

    before = make_config(tmp_path, tracking={"uri": place, "experiment": "digits-extractors"})
    assert open_in_domain(before, second, *splits(second), CPU).fingerprint == mine.fingerprint


@pytest.mark.parametrize("moment", ["create_run", "log_artifact", "set_terminated"])
def test_concurrent_publishers_agree_on_one_extractor(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    from mlflow import MlflowClient

    config = make_config(tmp_path, tracking={"uri": store, "experiment": f"at once: {moment}"})
    slow, quick, late = [small_workspace(tmp_path / name) for name in ("slow", "quick", "late")]
    put_extractor(slow)
    put_extractor(quick, seed=1)
    act, found = getattr(MlflowClient, moment), []

    def after_the_other(*arguments: Any, **named: Any) -> Any:
        monkeypatch.setattr(MlflowClient, moment, act)
        found.append(open_in_domain(config, quick, *splits(quick), CPU))
        return act(*arguments, **named)

    monkeypatch.setattr(MlflowClient, moment, after_the_other)
    found += [open_in_domain(config, run, *splits(run), CPU) for run in (slow, late, quick)]
    assert len({extractor.fingerprint for extractor in found}) == 1 and len(found) == 4


def test_extractor_run_without_files_is_skipped(tmp_path: Path) -> None:
    place = put_store(tmp_path / "mlflow.db")
    config = make_config(tmp_path, tracking={"uri": place, "experiment": "lost files"})
    lost, first, second = [small_workspace(tmp_path / name) for name in ("lost", "1st", "2nd")]
    put_extractor(lost)
    put_extractor(first, seed=1)
    open_in_domain(config, lost, *splits(lost), CPU)
    shutil.rmtree(tmp_path / "mlartifacts")
    mine = open_in_domain(config, first, *splits(first), CPU)
    assert open_in_domain(config, second, *splits(second), CPU).fingerprint == mine.fingerprint


@pytest.mark.slow
def test_extractor_of_other_data_is_not_used(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    workspace = small_workspace(tmp_path / "run")
    put_extractor(workspace)
    before = open_in_domain(config, workspace, *splits(workspace), CPU)
    small_workspace(tmp_path / "run", invert=True)
    after = open_in_domain(config, workspace, *splits(workspace), CPU)
    assert after.facts["data_fingerprint"] == open_dataset(workspace).fingerprint
    assert after.fingerprint != before.fingerprint
