"""What becomes of a job when the API server refuses requests, is slow or fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes.config import kube_config
from support.kube_api import Api, api_server
from support.mlflow_server import wait_until

from ddpm_core.config import load as params
from ddpm_core.errors import UserError
from ddpm_kube import cli, cluster, launch, options, watch
from ddpm_kube.job import RUN_ID
from ddpm_kube.launch import Outcome
from ddpm_kube.watch import WatchLost

pytestmark = pytest.mark.timeout(120)

VOLUME = {"claim": "ddpm-workspace", "path": "/workspace"}


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Path:
    return tmp_path / "kubeconfig"


@pytest.fixture
def api(kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfig))
    monkeypatch.setattr(launch, "LOOK_INTERVAL", 0.05)
    for module in (cluster, watch):
        monkeypatch.setattr(module, "PAUSES", (0.1, 0.1))
    with api_server(kubeconfig) as server:
        yield server


def train(keep: bool = False) -> Outcome:
    config = params.load(None, ("tracking.uri=''",), "/workspace/run")
    given = options.read({"image": "ddpm:dev", "volumes": [VOLUME]})
    return launch.train(config, given, "run", {}, keep=keep)


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
    assert train(keep=True).job == "train-run"
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
        train()
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
        assert train().job == "train-run"
    else:
        with pytest.raises(UserError, match=r"^The job failed: The deadline has passed\."):
            train()
    assert api.job
    assert "ddpm/train-run is left for `ddpm jobs gc`" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_job_is_created_leaves_no_job(
    api: Api, kubeconfig: Path, number: signal.Signals
) -> None:
    api.slow = 1.0
    arguments = ["jobs", "train", "-w", "s3://bucket/run", "--image", "ddpm:dev"]
    launcher = subprocess.Popen(
        [sys.executable, "-m", "ddpm_core.cli", *arguments, "-S", "tracking.uri=''"],
        env={**os.environ, "KUBECONFIG": str(kubeconfig)},
        cwd=kubeconfig.parent,
    )
    wait_until(lambda: api.asked["making"], "the job is requested")
    launcher.send_signal(number)
    assert launcher.wait(60) == 128 + number
    wait_until(lambda: api.asked["create"], "the job was created")
    assert api.job is None


# Listing


def test_jobs_are_listed_with_complete_names(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    cli.list_()
    assert capsys.readouterr().out == "No jobs.\n"
    run = "s3://a-bucket-with-a-long-name/" + "a-long-prefix/" * 5
    labels = {RUN_ID: run}
    api.make({"metadata": {"name": "train-run", "labels": labels}, "spec": {}})
    cli.list_()
    heads, cells = capsys.readouterr().out.splitlines()
    assert heads.split() == ["job", "state", "workers", "age", "run", "launcher"]
    assert cells.split()[:3] == ["train-run", "Running", "0"]
    assert cells.split()[-2:] == [run, "none"]
