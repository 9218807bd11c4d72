"""The launcher and an API server that refuses, is slow or forgets: what becomes of the job."""

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
from ddpm_kube import answers, launch, options
from ddpm_kube.feed import LostSight
from ddpm_kube.outcome import Outcome

pytestmark = pytest.mark.timeout(120)

VOLUME = {"claim": "ddpm-workspace", "path": "/workspace"}


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Path:
    return tmp_path / "kubeconfig"


@pytest.fixture
def api(kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfig))
    monkeypatch.setattr(launch, "LOOK", 0.05)
    monkeypatch.setattr(answers, "PAUSES", (0.1, 0.1))
    with api_server(kubeconfig) as server:
        yield server


def train(keep: bool = False) -> Outcome:
    config = params.load(None, ("tracking.uri=''",), "/workspace/run")
    given = options.read({"image": "ddpm:dev", "volumes": [VOLUME]})
    return launch.train(config, given, "run", {}, keep=keep)


# Refusals


@pytest.mark.parametrize("kind", ["pytorchjobs", "pods", "events"])
@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_that_passes_costs_nothing(
    api: Api, capsys: pytest.CaptureFixture[str], kind: str, status: int
) -> None:
    """API servers refuse what they allow for a while after they have started again."""

    def answer(question: str, number: int) -> int:
        if question == f"watch {kind}" and number == 6:
            api.state = "Succeeded"
        return status if question == f"watch {kind}" and 2 <= number <= 4 else 200

    api.status = answer
    assert train(keep=True).job == "train-run"
    assert not api.asked["delete"]
    told = capsys.readouterr().err
    assert "The API server answers again." in told and "Without them" not in told


@pytest.mark.parametrize("kind", ["pods", "events"])
def test_a_refusal_that_lasts_ends_the_launcher_and_not_the_job(
    api: Api, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(answers, "PATIENCE", 0.5)
    api.status = lambda question, n: 403 if question == f"watch {kind}" and n > 1 else 200
    with pytest.raises(
        LostSight, match=rf"ceased to tell of {kind} \(watch {kind}: no\).* goes on"
    ):
        train()
    assert api.job and api.asked[f"watch {kind}"] > 2


@pytest.mark.parametrize("question", ["list pods", "watch pods"])
def test_what_was_refused_from_the_beginning_is_told_at_once_and_no_job_is_left(
    api: Api, question: str
) -> None:
    api.status = lambda asked, _: 403 if asked == question else 200
    with pytest.raises(UserError, match=r"^Not allowed to watch pods: .*needs the Role"):
        train()
    assert api.job is None and api.asked[question] == 1


# The end


@pytest.mark.parametrize("state", ["Succeeded", "Failed"])
def test_a_job_that_cannot_be_removed_hides_not_what_became_of_it(
    api: Api, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], state: str
) -> None:
    monkeypatch.setattr(answers, "PATIENCE", 0.3)
    api.state, api.message = state, "The deadline has passed."
    api.status = lambda question, _: 500 if question == "delete" else 200
    if state == "Succeeded":
        assert train().job == "train-run"
    else:
        with pytest.raises(UserError, match=r"^The job failed: The deadline has passed\."):
            train()
    assert api.job
    assert "ddpm/train-run is left for `ddpm jobs gc`" in capsys.readouterr().err


@pytest.mark.parametrize("asked", [signal.SIGINT, signal.SIGTERM])
def test_a_launcher_that_is_told_to_stop_while_its_job_is_made_leaves_none(
    api: Api, kubeconfig: Path, asked: signal.Signals
) -> None:
    api.slow = 1.0
    arguments = ["jobs", "train", "-w", "s3://bucket/run", "--image", "ddpm:dev"]
    launcher = subprocess.Popen(
        [sys.executable, "-m", "ddpm_core.cli", *arguments, "-S", "tracking.uri=''"],
        env={**os.environ, "KUBECONFIG": str(kubeconfig)},
        cwd=kubeconfig.parent,
    )
    wait_until(lambda: api.asked["making"], "the job is asked for")
    launcher.send_signal(asked)
    assert launcher.wait(60) == 128 + asked
    wait_until(lambda: api.asked["create"], "the job was made")
    assert api.job is None
