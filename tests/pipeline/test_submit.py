"""Submitting: what is refused before, what a server is asked, what is told of a run.

A whole KFP is no part of these tests: `Answers` is a server with the answers of KFP's API alone.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from components_run import ROOT  # the others are found by its path
from support.mlflow_server import wait_until

import commands  # isort: skip
import submission  # isort: skip
from ddpm import ddpm  # isort: skip

from ddpm_core.errors import UserError

TINY = """
device: cpu
prepare: {image_size: 8, workers: 1}
model: {channels: 8, multipliers: [1, 2], blocks: 1, attention: [4]}
train: {steps: 8, batch_size: 8}
"""


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"overrides": ["train.stepz=4"]}, "train.stepz: unknown key in train; did you mean steps"),
        ({"overrides": ["sample.checkpoints=best"]}, "in the pipeline evaluate depends on sample"),
        ({"job": {"memory": "much"}}, "memory: 'much' given"),
        ({"job": {"max_replicas": 9}}, "more than the 8 images of a batch"),
        ({"workspace": "/elsewhere"}, "/elsewhere lies on no volume"),
        ({"tracking": "http://me:secret@mlflow"}, "A URI among the inputs holds a password"),
        (
            {"source": "dvc:https://ghp_TOKEN@github.com/me/registry.git#photos@v1"},
            "A URI among the inputs holds a password or token",
        ),
        ({"backend": "slurm"}, "pytorchjob or process is needed"),
        ({"params": TINY + "#" * 10_000}, "more than the 10,000 bytes that KFP takes"),
    ],
)
def test_what_cannot_work_is_refused_before_it_is_submitted(
    tmp_path: Path, changed: dict[str, Any], told: str
) -> None:
    (tmp_path / "params.yaml").write_text(TINY)
    inputs = commands.given(tmp_path / "params.yaml", None, "/workspace/run", "", 0.0)
    inputs |= {"backend": "pytorchjob", "tracking": "http://mlflow:5000"}
    commands.check(inputs)
    with pytest.raises(UserError, match=re.escape(told)):
        commands.check({**inputs, **changed})


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (
            {"overrides": ["train.stepz=4", "seed=1", "sample.count=many"]},
            "2 problems in the overrides:\n  train.stepz: unknown key in train; did you mean steps?"
            "\n  sample.count: got 'many'",
        ),
        ({"overrides": ["trian.steps=4"]}, "trian: unknown key; did you mean train?"),
        ({"overrides": ["train.steps"]}, "must be section.key=value"),
        ({"overrides": ["evaluate.metrics=[fid, speed]"]}, "evaluate.metrics[1]: got 'speed'"),
        ({"overrides": ["tracking.uri=http://me:secret@mlflow"]}, "holds a password"),
        ({"tracking": "http://me:secret@mlflow"}, "holds a password"),
        ({"source": "dvc:https://ghp_TOKEN@github.com/me/r.git#photos"}, "holds a password"),
        ({"params": TINY + "# was: http://me:secret@mlflow"}, "holds a password"),
        ({"job": {"env": {"PROXY": "http://me:secret@proxy"}}}, "holds a password"),
    ],
)
def test_beside_the_params_of_the_cluster_what_is_given_is_checked(
    changed: dict[str, Any], told: str
) -> None:
    inputs = commands.given(None, None, "/workspace/run", "", 0.0)
    inputs |= {"backend": "pytorchjob", "tracking": "http://mlflow:5000"}
    with pytest.raises(UserError, match=re.escape(told)):
        commands.check({**inputs, **changed})


def test_what_the_params_of_the_cluster_may_make_right_is_sent() -> None:
    right_there = [
        "model.attention=[32]",
        "model.heads=3",
        "sample.classes=[cat]",
        "sample.ema=0.5",
        "evaluate.extractor=inception",
        "train.microbatches=500",
    ]
    inputs = commands.given(None, right_there, "/workspace/run", "", 0.0)
    commands.check({**inputs, "backend": "pytorchjob", "tracking": ""})


class Answers(ThreadingHTTPServer):
    """Knows one run, whose tasks go through `story`, a state of all of them for each look."""

    def __init__(self, story: list[dict[str, Any]]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.story, self.asked, self.tokens = story, [], set()  # type: ignore[var-annotated]
        self.host = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Answers

    def log_message(self, *_: object) -> None:
        """Silence."""

    def do_GET(self) -> None:
        looks = "/runs/" in self.path
        state = self.server.story[0] if looks else {"experiments": []}
        if looks and len(self.server.story) > 1:
            self.server.story.pop(0)
        self._answer(state)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body))
        self._answer({"experiment_id": "e-1"} if "experiments" in self.path else {"run_id": "r-1"})

    def _answer(self, document: dict[str, Any]) -> None:
        self.server.tokens.add(self.headers.get("Authorization"))
        data = json.dumps(document).encode()
        self.send_response(document.get("status", 200))
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def look(state: str, **tasks: tuple[str, str]) -> dict[str, Any]:
    details = [
        {"task_id": name, "display_name": name, "state": s, "error": {"code": 1, "message": e}}
        for name, (s, e) in tasks.items()
    ]
    return {"run_id": "r-1", "state": state, "run_details": {"task_details": details}}


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Answers]:
    monkeypatch.setattr(submission, "INTERVAL", 0.01)
    server = Answers([])
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_run_is_submitted_whole_and_followed_to_its_end(
    answers: Answers, capfd: pytest.CaptureFixture[str]
) -> None:
    answers.story[:] = [
        look("PENDING"),
        look("RUNNING", prepare=("RUNNING", ""), **{"prepare-driver": ("SUCCEEDED", "")}),
        {"status": 503},
        look("RUNNING", prepare=("SUCCEEDED", ""), train=("RUNNING", "")),
        look("FAILED", prepare=("SUCCEEDED", ""), train=("FAILED", "worker-0: OOMKilled")),
    ]
    server = submission.Server(answers.host, "kubeflow", lambda: "the-token")
    inputs = {"params": TINY, "overrides": ["train.steps=9"], "worst": 2.0}
    assert server.create(ddpm, "registry/ddpm:7", True, "digits", "first", inputs) == "r-1"
    assert submission.follow(server, "r-1") == 1

    (experiment, run) = answers.asked
    assert experiment[1]["display_name"] == "digits"
    assert (run[1]["experiment_id"], run[1]["display_name"]) == ("e-1", "first")
    assert run[1]["runtime_config"]["parameters"] == inputs
    spec = run[1]["pipeline_spec"]
    assert spec["pipeline_spec"]["pipelineInfo"]["name"] == "ddpm"
    assert "registry/ddpm:7" in json.dumps(spec) and "ddpm:dev" not in json.dumps(spec)
    assert "kubernetes" in spec["platform_spec"]["platforms"]
    assert json.dumps(spec).count('"resourceType": "nvidia.com/gpu"') == 3
    assert answers.tokens == {"Bearer the-token"}
    printed = capfd.readouterr()
    told = printed.err.splitlines()
    assert told[1:] == [
        "prepare: running",
        f'warning: KFP at {answers.host} is not ready (503): {{"status": 503}}. Trying again for '
        "600 s; the run goes on meanwhile.",
        f"KFP at {answers.host} answers again.",
        "prepare: succeeded",
        "train: running",
        "train: failed: worker-0: OOMKilled",
        "The run has failed.",
    ]
    assert "the-token" not in printed.out + printed.err


@pytest.mark.parametrize("status", [429, 500, 501])
def test_a_server_in_trouble_is_asked_again_while_a_run_is_followed(
    answers: Answers, status: int
) -> None:
    """500 is what KFP says while its database restarts."""
    answers.story[:] = [look("RUNNING"), {"status": status}, look("SUCCEEDED")]
    assert submission.follow(submission.Server(answers.host, "kubeflow", lambda: None), "r-1") == 0


def test_a_token_that_was_made_anew_meanwhile_is_read_again(
    answers: Answers, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("old\n")
    server = submission.Server(answers.host, "kubeflow", lambda: commands.token(file))
    answers.story[:] = [look("RUNNING"), {"status": 401}, look("SUCCEEDED")]
    assert server.look("r-1")[0] == "RUNNING"
    file.write_text("new\n")
    assert submission.follow(server, "r-1") == 0
    assert answers.tokens == {"Bearer old", "Bearer new"}


def test_a_refusal_is_told_with_what_to_do(answers: Answers) -> None:
    answers.story[:] = [{"status": 401, "message": "who are you?"}]
    server = submission.Server(answers.host, "kubeflow", lambda: None)
    with pytest.raises(UserError, match=r"refuses \(401\): .*who are you.* --token-file"):
        server.look("r-1")


def test_an_absent_server_is_one_sentence() -> None:
    with pytest.raises(UserError, match=r"^No KFP server answers at http://127.0.0.1:9: forward"):
        submission.Server("127.0.0.1:9", "kubeflow", lambda: None)


def test_a_token_is_read_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("from-file\n")
    monkeypatch.setenv("KFP_TOKEN", "from-environment")
    assert commands.token(tmp_path / "token") == "from-file"
    assert commands.token(None) == "from-environment"
    with pytest.raises(UserError, match="Cannot read the token"):
        commands.token(tmp_path / "absent")


# Here: `local`


def test_local_takes_no_workspace_in_s3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        commands.app(["local", "-w", "s3://bucket/run"], obj=ddpm, standalone_mode=False)
    assert stop.value.code == 1
    assert "local: -w s3://bucket/run given; a directory is needed" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_what_local_did_not_expect_is_printed() -> None:
    code = "import local, sys; sys.exit(local.in_session(lambda: 1 // 0))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT / "pipelines",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


FAMILY = """
import subprocess, sys
sys.path.insert(0, sys.argv[1])
from local import in_session
task = "import os, signal, time; print(os.getpid(), flush=True); time.sleep(100)"
sys.exit(in_session(lambda: subprocess.call([sys.executable, "-c", task])))
"""


def test_a_signal_to_local_reaches_its_tasks() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", FAMILY, str(ROOT / "pipelines")], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout
    task = int(parent.stdout.readline())
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(60) == 128 + signal.SIGTERM
    wait_until(lambda: not Path(f"/proc/{task}/cmdline").exists(), "the task is gone")
