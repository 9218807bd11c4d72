"""`ddpm wait`: jobs that start together wait for output that matches their settings."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.program import (
    TINY,
    command,
    ddpm,
    environment,
    new_run,
    prepare_run,
    start,
    wait_until,
)
from support.strangers import STEP, Strangers

from ddpm_core.chain import CHECKS, Checker, wait
from ddpm_core.config import Config
from ddpm_core.config.durations import duration
from ddpm_core.errors import UserError
from ddpm_core.storage.workspace import Workspace


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_run(tmp_path_factory.mktemp("waiting"), TINY)


def waits(config: Config, verb: str, limit: float = 0.0) -> str | None:
    """The reason for still waiting after `limit` seconds."""
    try:
        wait(config, verb, limit, 0.02)
    except UserError as error:
        return str(error)
    return None


def test_checks_are_the_verbs_own_in_order() -> None:
    assert list(CHECKS) == ["prepare", "train", "sample", "evaluate", "register"]
    for verb, load in CHECKS.items():
        check = load()
        assert check.__name__ == "stale"
        folder = {"prepare": "data", "train": "training", "sample": "sampling"}
        folder |= {"evaluate": "evaluation", "register": "registry"}
        assert check.__module__.split(".")[1] == folder[verb]


def test_wait_ends_when_the_workspace_is_filled(begun: Path, tmp_path: Path) -> None:
    folder = new_run(begun, "empty", TINY)
    (folder / "workspace" / "data").unlink()
    waiting = start(folder, "wait", "prepare", "--interval", "0.05", "--limit", "60")
    assert wait_until(lambda: "prepare: there are no data yet." in waiting.said(), waiting)
    (folder / "workspace" / "data").symlink_to(begun / "workspace" / "data")
    assert "prepare is up to date" in waiting.ended()
    assert waiting.returncode == 0


def test_a_timeout_is_an_error_with_status_1(begun: Path) -> None:
    said = ddpm(begun, "wait", "train", "--limit", "0.1", "--interval", "0.05", status=1)
    assert said.count("wait: for train in workspace") == 1
    assert "Timed out after 0 s waiting for `ddpm train` in workspace: train: nothing is" in said
    assert "Traceback" not in said
    assert "ddpm wait: got 'trian'; must be one of prepare" in ddpm(
        begun, "wait", "trian", status=1
    )
    assert "a time such as 90s" in ddpm(begun, "wait", "train", "--limit", "soon", status=1)


def test_output_of_different_settings_does_not_count(tmp_path: Path) -> None:
    made = Strangers(tmp_path)
    assert waits(made.config, "sample") is None
    changed = {
        "prepare": {"prepare": made.config.prepare.model_copy(update={"holdout": 0.4})},
        "train": {"train": made.config.train.model_copy(update={"flip": True})},
        "sample": {"sample": made.config.sample.model_copy(update={"seed": 9})},
    }
    for verb, update in changed.items():
        # A later job waits too, although its direct input matches its settings.
        assert f" {verb}: " in str(waits(made.config.model_copy(update=update), "sample")), verb


def test_replaced_output_is_checked_again(tmp_path: Path) -> None:
    """Data can be replaced after their check. That makes later output stale."""
    made = Strangers(tmp_path)
    checker = Checker(made.config, "sample")
    samples = made.workspace.path("samples")
    shutil.move(samples, tmp_path / "aside")
    assert str(checker.reason()).startswith("sample: ")
    shutil.rmtree(made.workspace.path("data"))
    shutil.move(tmp_path / "aside", samples)
    assert str(checker.reason()).startswith("prepare: there are no data yet")


def test_an_incomplete_workspace_is_waited_for(tmp_path: Path) -> None:
    made = Strangers(tmp_path)
    target = made.workspace.path(f"snapshots/step-{STEP:08d}/config.json")
    whole = target.read_bytes()
    target.write_bytes(whole[: len(whole) // 2])
    assert "damaged" in str(waits(made.config, "train"))
    target.write_bytes(whole)
    assert waits(made.config, "train") is None
    locked = Config.model_validate({**made.config.dump(), "workspace": str(target / "below")})
    with pytest.raises(UserError, match="Cannot use"):
        Workspace.open(locked.workspace)
    assert "Cannot use" in str(waits(locked, "train"))


def test_waiting_for_training_does_not_import_torch() -> None:
    code = (
        "import sys, ddpm_core.cli, ddpm_core.chain as c;"
        "[c.CHECKS[v]() for v in ('prepare', 'train')];"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="name spaces of processes are Linux's")
def test_pid_1_of_a_container_ends_at_sigterm(begun: Path) -> None:
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-p", "-f", "true"], check=False).returncode:
        pytest.skip("no right to make a name space of processes; the cluster's tests do it too")
    waiting = subprocess.Popen(
        [unshare, "--pid", "--fork", "--kill-child", *command("wait", "train")],
        cwd=begun,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert waiting.stderr and "wait: for train" in waiting.stderr.readline()
    children = Path(f"/proc/{waiting.pid}/task/{waiting.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGTERM)
    assert waiting.wait(20) == 128 + signal.SIGTERM


def test_sigterm_removes_temporary_folders(begun: Path, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, tempfile, ddpm_core.cli as cli\n"
        "@cli.verb\n"
        "def hold() -> None:\n"
        "    with tempfile.TemporaryDirectory(prefix='ddpm-register-'):\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        signal.pause()\n"
        "sys.argv = ['ddpm', 'hold']\n"
        "cli.main()\n"
    )
    own = {**environment(), "TMPDIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", code], cwd=begun, env=own, check=False)
    assert ended.returncode == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())


def test_durations_have_units() -> None:
    assert [duration(t) for t in ("90", "90s", "1.5m", "2h", "1d")] == [90, 90, 90, 7200, 86400]
    with pytest.raises(UserError, match="'2 hours'"):
        duration("2 hours")
    with pytest.raises(UserError, match="must be at most 366d"):
        duration("9999999d")
