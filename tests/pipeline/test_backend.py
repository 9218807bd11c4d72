"""The compiled pipeline in a backend that is no kinder than Kubeflow Pipelines 2.17.0."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from components_run import ROOT  # `components` is found by its path
from support.kfp_backend import Backend
from support.kfp_pod import MARK, Document, Failed, LocalPods, Lost

from components.train import train  # isort: skip

from ddpm_core import errors
from ddpm_core.storage.base import Refused, Silent
from ddpm_core.storage.workspace import Workspace
from ddpm_kube import steps, tasks
from ddpm_kube.record import Run, open_run
from ddpm_kube.watch import WatchLost

COMPILED = ROOT / "pipelines/ddpm.yaml"
HOUR = 3600.0
OUTPUTS = {"plan": ["8:0/1"], "evaluate": "pass", "train": 8}  # of other steps: a text


class Clockwork:
    """Pods that do nothing but take time, and tell when they were killed.

    `hours` has the life of each pod of a step, in order; a negative one: the pod disappears then.
    """

    root = "/artifacts"

    def __init__(self, **hours: list[float]) -> None:
        self.now, self._hours = 0.0, hours
        self.started: list[str] = []

    def output(self, place: str) -> str:
        return f"{place}/output.json"

    def run(self, pod: Document) -> str:
        step = pod["metadata"]["name"].rpartition("-")[0]
        self.started.append(step)
        left = self._hours.get(step, [])
        hours = left.pop(0) if left else 0.01
        deadline = pod["spec"]["activeDeadlineSeconds"]
        self.now += min(abs(hours) * HOUR, deadline)
        if abs(hours) * HOUR > deadline:
            raise Failed(f"{step}: DeadlineExceeded")
        if hours < 0:
            raise Lost(f"{step}: its node is gone")
        (main,) = pod["spec"]["containers"]
        asked = json.loads(main["command"][3])["outputs"]
        made = {n: {"artifacts": [a["artifacts"][0]]} for n, a in asked["artifacts"].items()}
        values = {name: OUTPUTS.get(step, "text") for name in asked["parameters"]}
        output = {"artifacts": made, "parameterValues": values}
        return MARK + json.dumps({"output": output, "sizes": dict.fromkeys(made, 1)})


@pytest.mark.parametrize(
    ("step", "hours"),
    [
        ("train", [-200.0, -200.0, 200.0]),
        ("sample", [-20.0, -20.0, 20.0]),
        ("prepare", [-11.0, 11.0]),
        ("evaluate", [-0.2, 20.0]),
    ],
)
def test_a_lost_pod_is_retried_however_long_it_ran(step: str, hours: list[float]) -> None:
    pods = Clockwork(**{step: list(hours)})
    Backend(pods, COMPILED, clock=lambda: pods.now).run()
    assert pods.started.count(step) == len(hours)
    assert pods.started[-2:] == ["register", "finish"]


def test_no_retry_ends_before_the_hours_of_all_attempts() -> None:
    spec, platforms = yaml.safe_load_all(COMPILED.read_text())
    pods = platforms["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    graphs = [spec["root"], *spec["components"].values()]
    every = [t for g in graphs for t in g.get("dag", {}).get("tasks", {}).values()]
    retried = [task for task in every if "retryPolicy" in task]
    assert len(retried) == 6
    for task in retried:
        policy, name = task["retryPolicy"], task["taskInfo"]["name"]
        own = int(pods[f"exec-{name}"]["activeDeadlineSeconds"])
        longest = int(policy["backoffMaxDuration"].removesuffix("s"))
        assert longest >= own * (policy["maxRetryCount"] + 1), name


# Processes instead of pods

TINY = """
device: cpu
prepare: {source: digits, image_size: 8, workers: 1}
model: {channels: 8, multipliers: [1, 2], blocks: 1, attention: [4]}
diffusion: {timesteps: 50}
train: {steps: 8, batch_size: 8, snapshot_every: 8, milestone_every: 8, grid: 4, ema: [0.9]}
sample: {count: 20, batch_size: 10, steps: 4, shards: 2}
evaluate: {metrics: [fid]}
"""
MODES = {True: 0o755, False: 0o644}  # of folders and of files


def run(folder: Path, pods: LocalPods, **inputs: Any) -> tuple[Backend, str]:
    """Run the pipeline, whose step fails; return the backend and the summary of `finish`."""
    backend = Backend(pods, COMPILED)
    given = {"params": TINY, "workspace": str(folder / "run"), "backend": "process"}
    with pytest.raises(Failed):
        backend.run(**{**given, "tracking": "", **inputs})
    (finished,) = backend.ran["finish"]
    return backend, finished.log


class LosingPods(LocalPods):
    """Loses the first pods of a step."""

    def __init__(self, folder: Path, step: str, losses: int) -> None:
        super().__init__(folder)
        self._step, self.losses = step, losses

    def run(self, pod: Document) -> str:
        if self.losses and pod["metadata"]["name"].startswith(f"{self._step}-"):
            self.losses -= 1
            raise Lost(self._step)
        return super().run(pod)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_lost_a_pod_succeeds_with_the_modes_of_plain_jobs(tmp_path: Path) -> None:
    pods = LosingPods(tmp_path, "train", losses=1)
    backend = Backend(pods, COMPILED)
    workspace, tracking = tmp_path / "run", f"sqlite:///{tmp_path}/mlflow.db"
    backend.run(params=TINY, workspace=str(workspace), backend="process", tracking=tracking)
    assert pods.losses == 0
    (finished,) = backend.ran["finish"]
    assert "# The run succeeded\n\nRegistered **models:/ddpm/1**, step 8." in finished.log
    kept = {path.name for path in workspace.glob("pipeline/*/**/*") if path.is_file()}
    assert kept == {"settings.json", "outcome.json"}
    assert len(backend.ran["prepare"][0].outputs.parameters["Output"]) < 500  # a reference
    made = [path for path in workspace.rglob("*") if path.name != ".lock"]
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in made}
    # As in a plain job, the lock is for every user of the workspace.
    wrong = {path: oct(modes[path]) for path in made if modes[path] != MODES[path.is_dir()]}
    assert len(made) > 30 and not wrong


def test_a_run_that_lost_every_pod_of_a_step_was_stopped(tmp_path: Path) -> None:
    _, summary = run(tmp_path, LosingPods(tmp_path, "train", losses=3))
    assert "# The run stopped" in summary and "No step reports an error" in summary
    assert "KFP reports the state RUNNING" in summary


def test_a_failed_step_is_named_with_its_cause(tmp_path: Path) -> None:
    pods = LocalPods(tmp_path)
    _, summary = run(tmp_path, pods, source="/no/such/folder")
    assert "# The run failed" in summary
    assert "**prepare** failed: " in summary and "/no/such/folder" in summary
    assert "submit the pipeline again with the same inputs" in summary
    assert "/no/such/folder" in json.loads(pods.messages["prepare"])["error"]


def test_a_mistake_in_the_inputs_is_named_at_the_end(tmp_path: Path) -> None:
    _, summary = run(tmp_path, LocalPods(tmp_path), overrides=["train.stepz=3"])
    assert "# The run failed" in summary
    assert "**prepare** failed: " in summary
    assert "train.stepz: unknown key in train; did you mean steps?" in summary


# Servers that are unavailable for a while


def counted(times: int, error: Exception) -> tuple[list[int], Callable[..., str]]:
    calls: list[int] = []

    def work(*_: Any) -> str:
        calls.append(len(calls))
        if len(calls) <= times:
            raise error
        return "done"

    return calls, work


@pytest.fixture
def settings(tmp_path: Path) -> str:
    """Return the reference that `prepare` passes on."""
    config = steps.make_config(TINY, [], str(tmp_path / "run"))
    return Run(Workspace.open(config.workspace), "a-run").save(config)


@pytest.fixture
def begun(settings: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Return the start of a step, and remove the pauses between attempts."""
    monkeypatch.setattr(tasks, "PAUSE", 0.01)
    return lambda: open_run(settings)


def test_patience_is_an_option_of_the_job(settings: str, capfd: pytest.CaptureFixture[str]) -> None:
    nothing = dict.fromkeys(("data", "model", "metrics", "preview"))
    given = {"settings": settings, "backend": "pytorchjob", "patience": "soon", **nothing}
    with pytest.raises(SystemExit):
        train.python_func(job={}, **given)
    assert "patience: got 'soon'; must be a time such as" in capfd.readouterr().err
    with pytest.raises(SystemExit):  # that of `job` counts
        train.python_func(job={"patience": "never"}, **given)
    assert "patience: got 'never'" in capfd.readouterr().err


def test_a_step_tries_again_while_a_server_is_unavailable(
    begun: Callable[[], Any], capfd: pytest.CaptureFixture[str]
) -> None:
    for error in (Silent("S3 is away."), WatchLost("The API server is away.")):
        calls, work = counted(tasks.ATTEMPTS - 1, error)
        assert tasks.attempt("train", begun, work) == "done"
        assert len(calls) == tasks.ATTEMPTS
        assert f"warning: train: {error} Trying again in " in capfd.readouterr().err
    assert begun()[1].unfinished() == {}


def test_a_step_gives_up_after_its_attempts_and_leaves_the_cause(
    begun: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    termination = tmp_path / "message"
    termination.touch()
    monkeypatch.setattr(errors, "TERMINATION_LOG", termination)
    for error, attempts in ((Silent("S3 is away."), tasks.ATTEMPTS), (Refused("No key."), 1)):
        calls, work = counted(99, error)
        with pytest.raises(SystemExit):
            tasks.attempt("register", begun, work)
        assert len(calls) == attempts
        assert begun()[1].unfinished() == {"register": str(error)}
        assert json.loads(termination.read_text()) == {"error": str(error)}


def test_an_internal_error_is_left_as_the_cause(begun: Callable[[], Any]) -> None:
    with pytest.raises(ZeroDivisionError):
        tasks.attempt("plan", begun, lambda *_: 1 // 0)
    cause = begun()[1].unfinished()["plan"]
    assert cause.startswith("internal error, ZeroDivisionError")
