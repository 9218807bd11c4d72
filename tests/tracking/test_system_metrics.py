"""The use of the machine during training, in MLflow: tracking.system_metrics."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import psutil
import pytest
from support.mlflow_server import put_store, wait_until

from ddpm_core.config import Config
from ddpm_core.config import load as params
from ddpm_core.storage.workspace import LOG, RUN, Workspace
from ddpm_core.tracking import system
from ddpm_core.tracking.client import connect
from ddpm_core.tracking.tracker import Tracker

CPU = "system/cpu_utilization_percentage"


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    (tmp_path / "run").mkdir()
    put_store(tmp_path / "mlflow.db")
    return Workspace.open(str(tmp_path / "run"))


def config(workspace: Workspace, on: bool = True) -> Config:
    uri = f"sqlite:///{Path(workspace.uri).parent}/mlflow.db"
    return params.validate({"tracking": {"uri": uri, "system_metrics": on}})


def steps(workspace: Workspace, name: str = CPU) -> list[int]:
    known = workspace.read_json(RUN).get("mlflow", {})
    if "run_id" not in known:
        return []
    history = connect(config(workspace).tracking.uri).get_metric_history(known["run_id"], name)
    return [metric.step for metric in history]


def is_measured() -> bool:
    return any(thread.name == "SystemMetricsMonitor" for thread in threading.enumerate())


def test_resumed_training_continues_its_system_metrics(workspace: Workspace) -> None:
    for count in (2, 4):
        tracker = Tracker.open(config(workspace), workspace, "same", log=workspace.path(LOG))
        wait_until(lambda count=count: len(steps(workspace)) >= count, "metrics arrive")
        tracker.close()
        assert not is_measured()
    found = steps(workspace)
    assert found == list(range(len(found)))
    for name in ("system_memory_usage_percentage", "disk_usage_percentage"):
        assert steps(workspace, f"system/{name}") == found
    run = connect(config(workspace).tracking.uri).get_run(
        workspace.read_json(RUN)["mlflow"]["run_id"]
    )
    assert run.info.status == "FINISHED" and 0 <= run.data.metrics[CPU] <= 100


def test_only_training_with_the_setting_is_measured(workspace: Workspace) -> None:
    for given, log in ((config(workspace, False), workspace.path(LOG)), (config(workspace), None)):
        tracker = Tracker.open(given, workspace, "same", log=log)
        tracker.params({"a": 1})
        wait_until(lambda: "run_id" in workspace.read_json(RUN).get("mlflow", {}), "the run")
        assert not is_measured()
        tracker.close()
    assert not steps(workspace)


def test_missing_package_turns_system_metrics_off(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    Tracker.open(config(workspace), workspace, "same", log=workspace.path(LOG)).close()
    said = capsys.readouterr().err
    assert "tracking.system_metrics is off." in said and "'ddpm-core[tracking]'" in said


def test_machine_without_counters_is_tracked_without_them(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(psutil, "net_io_counters", lambda: None)  # as without a network
    tracker = Tracker.open(config(workspace), workspace, "same", log=workspace.path(LOG))
    tracker.metrics(1, {"fid": 3.0})
    wait_until(lambda: tracker._system is None, "they are turned off")
    tracker.close()
    assert "Turned off tracking.system_metrics (AttributeError" in capsys.readouterr().err
    run = connect(config(workspace).tracking.uri).get_run(
        workspace.read_json(RUN)["mlflow"]["run_id"]
    )
    assert run.data.metrics == {"fid": 3.0}


def test_measuring_that_ended_starts_again(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow's thread ends when the server fails once."""
    monkeypatch.setattr(system, "RESTART", 0.0)
    tracker = Tracker.open(config(workspace), workspace, "same", log=workspace.path(LOG))
    wait_until(lambda: steps(workspace), "metrics arrive")
    assert tracker._system
    tracker._system._monitor._shutdown_event.set()
    wait_until(lambda: not is_measured(), "the thread ends")
    before = len(steps(workspace))
    wait_until(lambda: len(steps(workspace)) > before, "metrics arrive again")
    tracker.close()
    found = steps(workspace)
    assert found == list(range(len(found)))
