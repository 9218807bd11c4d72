"""What becomes of a job when the API server refuses requests, is slow or fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes.config import kube_config
from support.kube_api import CREATED, Api, api_server
from support.mlflow_server import wait_until
from support.program import TINY, ddpm, prepare_run, write_params
from support.s3_server import Bucket

from ddpm_core.config import load as params
from ddpm_core.errors import UserError
from ddpm_kube import cli, cluster, launch, options, steps, watch
from ddpm_kube.backends import BACKENDS
from ddpm_kube.job import RUN_ID, build
from ddpm_kube.launch import Outcome
from ddpm_kube.location import Location
from ddpm_kube.spec import JobSpec
from ddpm_kube.watch import WatchLost

pytestmark = pytest.mark.timeout(120)

VOLUME = {"claim": "ddpm-workspace", "path": "/workspace"}


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Path:
    return tmp_path / "kubeconfig"


@pytest.fixture
def api(
    request: pytest.FixtureRequest, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Api]:
    """Start an API server with PyTorchJobs, or with the kind of jobs that EITHER names."""
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfig))
    monkeypatch.setattr(launch, "LOOK_INTERVAL", 0.05)
    for module in (cluster, watch):
        monkeypatch.setattr(module, "PAUSES", (0.1, 0.1))
    with api_server(kubeconfig) as server:
        server.backend = BACKENDS[getattr(request, "param", "pytorchjob")]
        yield server


EITHER = pytest.mark.parametrize("api", BACKENDS, indirect=True)


def train(keep: bool = False, patience: str = "15m") -> Outcome | None:
    config = params.load(None, ("tracking.uri=''",), "/workspace/run")
    given = options.read({"image": "ddpm:dev", "volumes": [VOLUME], "patience": patience})
    return launch.train(config, given, "run", {}, keep=keep)


def start(kubeconfig: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a launcher of a job in an S3 workspace, in a separate process."""
    fixed = ["jobs", "train", "-w", "s3://bucket/run", "--image", "ddpm:dev"]
    return subprocess.Popen(
        [sys.executable, "-m", "ddpm_core.cli", *fixed, "-S", "tracking.uri=''", *arguments],
        env={
            **os.environ,
            "KUBECONFIG": str(kubeconfig),
            "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
            "AWS_EC2_METADATA_DISABLED": "true",
        },
        cwd=kubeconfig.parent,
        stderr=subprocess.PIPE,
        text=True,
    )


# Nothing to train


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_run(tmp_path_factory.mktemp("trained"), TINY)


@pytest.fixture
def in_s3(bucket: Bucket, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a params file of a workspace in S3 that is trained to its last step."""
    uri = bucket.uri("trained")
    if not bucket.keys("trained/snapshots/"):
        ddpm(trained, "train")
        for path in (trained / "workspace").rglob("*"):
            if path.is_file():
                name = path.relative_to(trained / "workspace").as_posix()
                bucket.put(f"trained/{name}", path.read_bytes())
    bucket.enter(monkeypatch, tmp_path)
    return write_params(tmp_path, TINY.replace("workspace: workspace", f"workspace: {uri}"))


@EITHER
@pytest.mark.parametrize("left", [None, "Succeeded"])
def test_no_job_is_created_if_training_is_up_to_date(
    api: Api, in_s3: Path, capsys: pytest.CaptureFixture[str], left: str | None
) -> None:
    """A launcher may have been lost before its job ended."""
    given = options.read({"image": "ddpm:dev"})
    if left:
        chosen = given.model_copy(update={"backend": api.backend.name})
        api.make(build(JobSpec(params.load(in_s3), chosen, "run", "ddpm", "ddpm:dev")))
        api.state = left
        api.listed(api.backend.plural)
    assert launch.train(params.load(in_s3), given, "run", {}) is None
    assert capsys.readouterr().err == f"train: up to date; no {api.backend.kind} is created.\n"
    assert api.asked["making"] == 0 and api.job is None
    assert api.asked["delete"] == (1 if left else 0)


@pytest.mark.parametrize("setting", ["train.steps=13", "seed=4"])
def test_a_job_is_created_if_other_settings_were_trained(
    api: Api, in_s3: Path, setting: str
) -> None:
    """A finished job of an earlier attempt is replaced."""
    given = options.read({"image": "ddpm:dev"})
    api.state = "Succeeded"
    api.make(build(JobSpec(params.load(in_s3), given, "run", "ddpm", "ddpm:dev")))
    api.listed("pytorchjobs")
    outcome = launch.train(params.load(in_s3, (setting,)), given, "run", {})
    assert outcome and outcome.step == 12
    assert api.asked["create"] == api.asked["delete"] == 2  # the first is refused: it exists


def test_the_component_creates_no_job_either(api: Api, in_s3: Path) -> None:
    steps.train(params.load(in_s3), "pytorchjob", {"image": "ddpm:dev"}, "run")
    assert api.asked["making"] == 0


def test_a_path_is_read_only_in_a_pod(trained: Path) -> None:
    """Outside, the path of a volume may be a different directory."""
    ddpm(trained, "train")
    config = params.load(trained / "params.yaml", (), str(trained / "workspace"))
    nowhere: Any = None
    assert launch.is_trained(config, Location(nowhere, {"metadata": {}}))
    assert not launch.is_trained(config, Location(nowhere, None))


# Outages


@pytest.mark.parametrize("status", [0, 429, 500, 503])
def test_an_outage_of_the_api_server_is_waited_for(
    api: Api, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int
) -> None:
    """It lasts longer than the retries of other requests."""
    monkeypatch.setattr(cluster, "RETRY_FOR", 0.3)
    api.status = outage(api, status, seconds=2.0)
    outcome = train()
    assert outcome and outcome.job == "train-run"
    output = capsys.readouterr().err
    assert "warning: Cannot watch " in output and "The API server responds again." in output
    assert api.asked["create"] == 1


def test_an_outage_does_not_count_as_waiting(api: Api) -> None:
    """The pod may have got a node meanwhile."""
    api.conditions = [{"type": "PodScheduled", "reason": "Unschedulable", "message": "no node"}]
    api.status = outage(api, 503, seconds=8.0)
    assert train(patience="4s")


def outage(api: Api, status: int, seconds: float) -> Callable[[str, int], int]:
    """Return an Api.status that fails once the job is followed; afterwards the job succeeds."""
    began: list[float] = []

    def answer(request: str, number: int) -> int:
        now = time.monotonic()
        if request == "watch pods" and not began:
            began.append(now)
        if began and now > began[0] + seconds:
            api.state, api.conditions = "Succeeded", []
            return 200
        return status if began else 200

    return answer


@EITHER
def test_a_launcher_that_was_killed_finds_its_job_again(api: Api, kubeconfig: Path) -> None:
    """The job may have been running for months."""
    killed = start(kubeconfig)
    wait_until(lambda: api.asked["watch pods"], "the job is followed")
    killed.kill()
    killed.communicate()
    assert api.job and api.job["metadata"]["creationTimestamp"] == CREATED
    again = start(kubeconfig, "--patience", "1h")
    followed = api.asked["watch pods"]
    wait_until(lambda: api.asked["watch pods"] > followed + 2, "the job is followed again")
    api.state = "Succeeded"
    _, output = again.communicate(timeout=60)
    assert again.returncode == 0, output
    assert f"The {api.backend.kind} ddpm/train-s3-bucket-run-" in output
    assert "is already running; following it." in output
    assert api.asked["delete"] == 1 and api.job is None


# Refusals


@pytest.mark.parametrize("kind", ["pytorchjobs", "pods", "events"])
@pytest.mark.parametrize("status", [401, 403])
def test_a_temporary_refusal_does_not_end_the_job(
    api: Api, capsys: pytest.CaptureFixture[str], kind: str, status: int
) -> None:
    """API servers refuse permitted requests for a while after a restart."""

    def answer(request: str, number: int) -> int:
        if request == f"watch {kind}" and number == 6:
            api.state = "Succeeded"
        return status if request == f"watch {kind}" and 2 <= number <= 4 else 200

    api.status = answer
    assert train(keep=True)
    assert not api.asked["delete"]
    output = capsys.readouterr().err
    assert "The API server responds again." in output and "Without events" not in output


@pytest.mark.parametrize("kind", ["pods", "events"])
def test_a_lasting_refusal_ends_the_launcher_not_the_job(
    api: Api, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(cluster, "RETRY_FOR", 0.5)
    api.status = lambda request, n: 403 if request == f"watch {kind}" and n > 1 else 200
    with pytest.raises(
        WatchLost,
        match=rf"no longer permits to watch {kind} \(watch {kind}: no\).* still be running",
    ):
        train(patience="1s")
    assert api.job and api.asked[f"watch {kind}"] > 2


@pytest.mark.parametrize("request_", ["list pods", "watch pods"])
def test_an_initial_refusal_is_reported_and_leaves_no_job(api: Api, request_: str) -> None:
    api.status = lambda request, _: 403 if request == request_ else 200
    with pytest.raises(
        UserError, match=r"^Not allowed to watch pods: .* to the Role ddpm-launcher"
    ):
        train()
    assert api.job is None and api.asked[request_] == 1


# The end of the job


@pytest.mark.parametrize("state", ["Succeeded", "Failed"])
def test_the_outcome_is_reported_even_if_cleanup_fails(
    api: Api, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], state: str
) -> None:
    monkeypatch.setattr(cluster, "RETRY_FOR", 0.3)
    api.state, api.message = state, "The deadline has passed."
    api.status = lambda request, _: 500 if request == "delete" else 200
    if state == "Succeeded":
        assert train(patience="1s")
    else:
        with pytest.raises(UserError, match=r"^The job failed: The deadline has passed\."):
            train(patience="1s")
    assert api.job
    assert "ddpm/train-run is left for `ddpm jobs gc`" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_job_is_created_leaves_no_job(
    api: Api, kubeconfig: Path, number: signal.Signals
) -> None:
    api.slow = 1.0
    launcher = start(kubeconfig)
    wait_until(lambda: api.asked["making"], "the job is requested")
    launcher.send_signal(number)
    launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + number
    wait_until(lambda: api.asked["create"], "the job was created")
    assert api.job is None


# Listing


@EITHER
def test_jobs_are_listed_with_complete_names(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    cli.list_()
    assert capsys.readouterr().out == "No jobs.\n"
    run = "s3://a-bucket-with-a-long-name/" + "a-long-prefix/" * 5
    labels = {RUN_ID: run}
    api.make({"metadata": {"name": "train-run", "labels": labels}, "spec": {}})
    cli.list_()
    heads, cells = capsys.readouterr().out.splitlines()
    assert heads.split() == ["job", "state", "workers", "age", "run", "launcher"]
    assert cells.split()[:3] == ["train-run", "Running", "1"]
    assert cells.split()[-2:] == [run, "none"]
