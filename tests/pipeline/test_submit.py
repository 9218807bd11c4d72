"""Submitting: checks before it, requests to the server, and output while a run is followed.

These tests need no KFP: `FakeKfp` is a server with the responses of KFP's API 2.17.0, which has no
reason for any failure: only the logs of pods have it.
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

from ddpm_core.config import load as params
from ddpm_core.config.template import template
from ddpm_core.errors import UserError

TINY = """
device: cpu
prepare: {image_size: 8, workers: 1}
model: {channels: 8, multipliers: [1, 2], blocks: 1, attention: [4]}
train: {steps: 8, batch_size: 8}
"""


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"overrides": ["train.stepz=4"]}, "train.stepz: unknown key in train; did you mean steps"),
        ({"overrides": ["sample.checkpoints=best"]}, "the pipeline samples before it evaluates"),
        ({"job": {"memory": "much"}}, "memory: got 'much'"),
        ({"patience": "soon"}, "patience: got 'soon'; must be a time such as"),
        ({"job": {"max_replicas": 9}}, "must be at most train.batch_size, 8"),
        ({"workspace": "/elsewhere"}, "/elsewhere is not on a writable volume"),
        ({"tracking": "http://me:secret@mlflow"}, "A URI in the inputs contains a password"),
        (
            {"source": "dvc:https://ghp_TOKEN@github.com/me/registry.git#photos@v1"},
            "A URI in the inputs contains a password or token",
        ),
        ({"backend": "slurm"}, "must be one of auto, pytorchjob, trainjob, process"),
        ({"params": TINY + "#" * 10_000}, "more than 10,000 bytes"),
    ],
)
def test_invalid_inputs_are_refused_before_submission(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    (tmp_path / "params.yaml").write_text(TINY)
    inputs = commands.make_inputs(tmp_path / "params.yaml", None, "/workspace/run", "", 0.0)
    inputs |= {"backend": "pytorchjob", "tracking": "http://ddpm-mlflow:5000"}
    commands.check(inputs)
    with pytest.raises(UserError, match=re.escape(message)):
        commands.check({**inputs, **changed})


def test_all_explained_settings_fit_into_the_inputs(tmp_path: Path) -> None:
    file = tmp_path / "params.yaml"
    file.write_text(template(None) + "\n# " + 5000 * "#")
    inputs = commands.make_inputs(file, None, "/workspace/run", "", 0.0)
    commands.check({**inputs, "backend": "process", "tracking": "http://ddpm-mlflow:5000"})
    sent = params.load_text(inputs["params"], "sent", ())
    assert sent == params.load(file, ())
    assert len(inputs["params"]) < commands.MAX_INPUTS / 2


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"overrides": ["train.stepz=4", "seed=1", "sample.count=many"]},
            "2 problems in the overrides:\n  train.stepz: unknown key in train; did you mean steps?"
            "\n  sample.count: got 'many'",
        ),
        ({"overrides": ["trian.steps=4"]}, "trian: unknown key; did you mean train?"),
        ({"overrides": ["train.steps"]}, "must be section.key=value"),
        ({"overrides": ["evaluate.metrics=[fid, speed]"]}, "evaluate.metrics[1]: got 'speed'"),
        ({"overrides": ["tracking.uri=http://me:secret@mlflow"]}, "contains a password"),
        ({"tracking": "http://me:secret@mlflow"}, "contains a password"),
        ({"source": "dvc:https://ghp_TOKEN@github.com/me/r.git#photos"}, "contains a password"),
        ({"params": TINY + "# was: http://me:secret@mlflow"}, "contains a password"),
        ({"job": {"env": {"PROXY": "http://me:secret@proxy"}}}, "contains a password"),
    ],
)
def test_inputs_are_checked_without_knowing_the_config_map(
    changed: dict[str, Any], message: str
) -> None:
    inputs = commands.make_inputs(None, None, "/workspace/run", "", 0.0)
    inputs |= {"backend": "pytorchjob", "tracking": "http://ddpm-mlflow:5000"}
    with pytest.raises(UserError, match=re.escape(message)):
        commands.check({**inputs, **changed})


def test_inputs_that_the_config_map_may_complete_are_sent() -> None:
    overrides = [
        "model.attention=[32]",
        "model.heads=3",
        "sample.classes=[cat]",
        "sample.ema=0.5",
        "evaluate.extractor=inception",
        "train.microbatches=500",
    ]
    inputs = commands.make_inputs(None, overrides, "/workspace/run", "", 0.0)
    commands.check({**inputs, "backend": "pytorchjob", "tracking": ""})


class FakeKfp(ThreadingHTTPServer):
    """Serves one run; each request for it takes the next response in `story`.

    `logs` has the log of each pod that has ended; KFP has none of others.
    """

    def __init__(self, story: list[dict[str, Any]]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.logs: dict[str, str] = {}
        self.story, self.asked, self.tokens = story, [], set()  # type: ignore[var-annotated]
        self.host = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: FakeKfp

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        if log := re.fullmatch("/apis/v1alpha1/runs/r-1/nodes/(.+)/log", self.path):
            found = self.server.logs.get(log[1])
            self._send(200 if found else 500, (found or "no such pod").encode(), "text/plain")
            return
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
        data = json.dumps(document).encode()
        self._send(document.get("status", 200), data, "application/json")

    def _send(self, status: int, data: bytes, kind: str) -> None:
        self.server.tokens.add(self.headers.get("Authorization"))
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def look(state: str, **steps: str) -> dict[str, Any]:
    """Return a run whose steps have these states, with all the other tasks that KFP lists.

    The states of several tasks of a step are separated by spaces; KFP has none for an OMITTED one.
    The pod of a step's attempt is known to its executor only.
    """
    tasks = [("ddpm-6d2kx(0)", "RUNNING", []), ("root(0)", "RUNNING", []), ("root", "RUNNING", [])]
    for name, states in steps.items():
        for number, one in enumerate(states.split()):
            node = f"ddpm-6d2kx-{name}-{number}"
            tasks += [(f"{name}-driver(0)", "SUCCEEDED", []), (name, one, [node])]
            tasks += [("executor", one, [f"{node}-pod-0"]), ("executor(0)", one, [])]
        if name == "sample":
            tasks += [("iteration-item-driver(0)", "SUCCEEDED", []), ("sampling", one, [])]
    details = [
        {
            "task_id": str(number),
            "display_name": name,
            "state": None if one == "OMITTED" else one,
            "child_tasks": [{"pod_name": pod} for pod in pods],
        }
        for number, (name, one, pods) in enumerate(tasks)
    ]
    return {"run_id": "r-1", "state": state, "run_details": {"task_details": details}}


@pytest.fixture
def kfp(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKfp]:
    monkeypatch.setattr(submission, "INTERVAL", 0.01)
    server = FakeKfp([])
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


FAILED_LOG = """[worker-0] train: 4/9 steps, 2.0/s, 2 s left
[worker-0] train: 8/9 steps, 2.0/s, 0 s left
Giving up: worker-0 ran out of memory (OOMKilled).
train: worker-0 ran out of memory (OOMKilled). Give it more:
  memory: 4Gi
I1129 19:00:00.000000 23 main.go:55] failed to execute component: exit status 1
"""


def test_a_run_is_submitted_and_followed_to_its_end(
    pipeline: Any, kfp: FakeKfp, capfd: pytest.CaptureFixture[str]
) -> None:
    kfp.story[:] = [
        look("PENDING"),
        look("RUNNING", prepare="RUNNING"),
        {"status": 503},
        look("RUNNING", prepare="SUCCEEDED", train="RUNNING"),
        look("RUNNING", prepare="SUCCEEDED", train="RUNNING"),
        look("FAILED", prepare="SUCCEEDED", train="FAILED", plan="OMITTED", finish="SUCCEEDED"),
    ]
    kfp.logs = {
        "ddpm-6d2kx-prepare-0-pod-0": "prepare: data in /workspace/run are up to date.\n",
        "ddpm-6d2kx-train-0-pod-0": FAILED_LOG,
    }
    server = submission.Server(kfp.host, "kubeflow", lambda: "the-token", "http://ui:8080/")
    inputs = {"params": TINY, "overrides": ["train.steps=9"], "worst": 2.0}
    assert (
        server.create(pipeline, {"ddpm:dev": "registry/ddpm:7"}, True, "digits", "first", inputs)
        == "r-1"
    )
    assert submission.follow(server, "r-1") == 1

    (experiment, run) = kfp.asked
    assert experiment[1]["display_name"] == "digits"
    assert (run[1]["experiment_id"], run[1]["display_name"]) == ("e-1", "first")
    assert run[1]["runtime_config"]["parameters"] == inputs
    spec = run[1]["pipeline_spec"]
    assert spec["pipeline_spec"]["pipelineInfo"]["name"] == "ddpm"
    assert "registry/ddpm:7" in json.dumps(spec) and "ddpm:dev" not in json.dumps(spec)
    assert "kubernetes" in spec["platform_spec"]["platforms"]
    assert json.dumps(spec).count('"resourceType": "nvidia.com/gpu"') == 3
    assert kfp.tokens == {"Bearer the-token"}
    printed = capfd.readouterr()
    assert "Run details: http://ui:8080/#/runs/details/r-1" in printed.out
    assert printed.err.splitlines()[1:] == [
        "prepare: running",
        f'warning: KFP at {kfp.host} is not ready (503): {{"status": 503}}. Retrying for '
        "600 s; the run continues meanwhile.",
        f"KFP at {kfp.host} responds again.",
        "prepare: succeeded",
        "train: running",
        "  kubectl logs -n kubeflow -f -c main -l pipeline/runid=r-1,ddpm.io/uses-api=true",
        "train: failed",
        "finish: succeeded",
        "The run has failed. http://ui:8080/#/runs/details/r-1",
        "train: worker-0 ran out of memory (OOMKilled). Give it more:",
        "  memory: 4Gi",
    ]
    assert "the-token" not in printed.out + printed.err


def test_parts_are_counted_and_a_lost_pod_is_named(
    pipeline: Any, kfp: FakeKfp, capfd: pytest.CaptureFixture[str]
) -> None:
    """A run that was submitted elsewhere: `watch`."""
    kfp.logs = {"ddpm-6d2kx-sample-1-pod-0": "sample: step 8 still waits for shard-002-of-003.\n"}
    kfp.logs["ddpm-6d2kx-sample-2-pod-0"] = "sample: 8/20 images, 2.0/s, 6 s left\n"
    kfp.story[:] = [
        look("RUNNING", train="SUCCEEDED", plan="SUCCEEDED", sample="RUNNING RUNNING PENDING"),
        look("RUNNING", train="SUCCEEDED", plan="SUCCEEDED", sample="SUCCEEDED RUNNING RUNNING"),
        look("FAILED", train="SUCCEEDED", plan="SUCCEEDED", sample="SUCCEEDED SUCCEEDED FAILED"),
    ]
    with pytest.raises(SystemExit) as ended:
        commands.app(["watch", "r-1", "--host", kfp.host], obj=pipeline, standalone_mode=False)
    assert ended.value.code == 1
    assert capfd.readouterr().err.splitlines() == [
        "train: succeeded",
        "plan: succeeded",
        "sample: 1 pending, 2 running",
        "sample: 2 running, 1 succeeded",
        "sample: 1 failed, 2 succeeded",
        f"The run has failed. {kfp.host}/#/runs/details/r-1",
        "sample: failed without an error in its log: the pod was lost or killed, or never started. "
        "`kubectl get events` in the namespace of the run shows why.",
    ]


def test_a_terminated_run_is_not_reported_as_failed(
    kfp: FakeKfp, capfd: pytest.CaptureFixture[str]
) -> None:
    """KFP's last state is FAILED for it too, and the pods were killed without an error."""
    past = [{"state": one} for one in ("PENDING", None, "RUNNING", "CANCELING", "FAILED")]
    kfp.story[:] = [
        look("RUNNING", train="RUNNING"),
        look("FAILED", train="FAILED", finish="SUCCEEDED") | {"state_history": past},
    ]
    assert submission.follow(submission.Server(kfp.host, "kubeflow", lambda: None), "r-1") == 1
    assert capfd.readouterr().err.splitlines()[2:] == [
        "train: failed",
        "finish: succeeded",
        f"The run was terminated. {kfp.host}/#/runs/details/r-1",
    ]


def test_the_error_of_a_sampling_part_is_printed(
    kfp: FakeKfp, capfd: pytest.CaptureFixture[str]
) -> None:
    error = "sample 8:1/4: Access to s3://bucket/run is denied."
    kfp.logs["ddpm-6d2kx-sample-1-pod-0"] = f"sample: 8/20 images, 2.0/s, 6 s left\n{error}\n"
    kfp.story[:] = [look("FAILED", sample="SUCCEEDED FAILED")]
    assert submission.follow(submission.Server(kfp.host, "kubeflow", lambda: None), "r-1") == 1
    assert capfd.readouterr().err.splitlines()[-1] == error


def test_a_run_is_named_after_workspace_and_settings(tmp_path: Path) -> None:
    inputs = commands.make_inputs(None, ["train.steps=9", "seed=1"], "s3://b/run", "cifar10", 0.0)
    assert commands.run_name(None, inputs) == "s3://b/run cifar10 train.steps=9 seed=1"
    assert commands.run_name(tmp_path / "large.yaml", {**inputs, "source": ""}) == (
        "s3://b/run large.yaml train.steps=9 seed=1"
    )


@pytest.mark.parametrize("status", [429, 500, 501])
def test_an_unavailable_server_is_retried_while_following(kfp: FakeKfp, status: int) -> None:
    """KFP sends 500 while its database restarts."""
    kfp.story[:] = [look("RUNNING"), {"status": status}, look("SUCCEEDED")]
    assert submission.follow(submission.Server(kfp.host, "kubeflow", lambda: None), "r-1") == 0


def test_an_expired_token_is_read_again(kfp: FakeKfp, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("old\n")
    server = submission.Server(kfp.host, "kubeflow", lambda: commands.read_token(file))
    kfp.story[:] = [look("RUNNING"), {"status": 401}, look("SUCCEEDED")]
    assert server.state("r-1")[0] == "RUNNING"
    file.write_text("new\n")
    assert submission.follow(server, "r-1") == 0
    assert kfp.tokens == {"Bearer old", "Bearer new"}


def test_a_refusal_names_the_token_options(kfp: FakeKfp) -> None:
    kfp.story[:] = [{"status": 401, "message": "who are you?"}]
    server = submission.Server(kfp.host, "kubeflow", lambda: None)
    with pytest.raises(
        UserError, match=r"refuses the request \(401\): .*who are you.* --token-file"
    ):
        server.state("r-1")


def test_a_missing_server_is_reported_with_the_remedy() -> None:
    with pytest.raises(UserError, match=r"^No KFP server responds at http://127.0.0.1:9. Forward"):
        submission.Server("127.0.0.1:9", "kubeflow", lambda: None)


def test_a_token_is_read_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("from-file\n")
    monkeypatch.setenv("KFP_TOKEN", "from-environment")
    assert commands.read_token(tmp_path / "token") == "from-file"
    assert commands.read_token(None) == "from-environment"
    with pytest.raises(UserError, match="Cannot read the token"):
        commands.read_token(tmp_path / "absent")


# local


def test_local_refuses_a_workspace_in_s3(
    pipeline: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        commands.app(["local", "-w", "s3://bucket/run"], obj=pipeline, standalone_mode=False)
    assert stop.value.code == 1
    assert "local: -w: got s3://bucket/run; must be a directory" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_unexpected_errors_of_local_are_printed() -> None:
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
