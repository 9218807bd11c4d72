"""`ddpm watch`: what the page says about a run, while it trains and afterwards."""

from __future__ import annotations

import json
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.chromium import needs_chromium
from support.mlflow_server import wait_until
from support.program import TINY, ddpm, new_run, prepare_run, start
from support.s3_server import Bucket

from ddpm_core.storage.workspace import Workspace
from ddpm_core.watch.live import POINTS, Live, charts, progress_of

SETTINGS = TINY.replace("  grid: 4", "  grid: 4\n  validate_every: 6")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """Yield the folder of a prepared run, and the address of its page."""
    prepared = prepare_run(tmp_path_factory.mktemp("watch"), SETTINGS)
    folder = new_run(prepared, "run", SETTINGS)
    program = start(folder, "watch", "--port", "0")
    wait_until(lambda: "/\n" in program.said() or program.wait(0), "it listens")
    yield folder, program.said().split("open ")[1].strip().rstrip("/")
    program.send_signal(signal.SIGTERM)
    program.ended(30)
    assert program.returncode == 0, program.said()


def get(address: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(address, timeout=30) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def view(address: str) -> dict[str, Any]:
    status, body = get(f"{address}/live")
    assert status == 200
    found: dict[str, Any] = json.loads(body)
    return found


def test_page_follows_a_run_from_nothing_to_its_end(run: tuple[Path, str]) -> None:
    folder, address = run
    empty = view(address)
    assert "Nothing is trained yet." in empty["head"]
    assert empty["grids"] == []
    ddpm(folder, "train")
    wait_until(lambda: view(address)["grids"] == [6, 12], "the page shows both milestones")
    found = view(address)
    assert "Finished: 12 steps" in found["head"] and "held-out loss is" in found["head"]
    assert found["title"] == "100% ddpm"
    for title in ("loss on fixed images", "training loss", "learning rate", "memory, GB"):
        assert f"<h3>{title}</h3>" in found["curves"]
    status, png = get(f"{address}/grid/12.png")
    assert status == 200 and Image.open(BytesIO(png)).size == (494, 494)
    assert get(f"{address}/grid/5.png")[0] == 404
    assert get(f"{address}/grid/x.png")[0] == 404


def test_page_runs_only_its_own_script(run: tuple[Path, str]) -> None:
    with urllib.request.urlopen(f"{run[1]}/") as response:
        policy, text = response.headers["Content-Security-Policy"], response.read().decode()
    assert "default-src 'none'" in policy and "script-src 'self'" in policy
    assert "http" not in text.replace("http-equiv", "")


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("width", [1280, 500])
def test_browser_shows_the_run_without_errors(run: tuple[Path, str], width: int) -> None:
    folder, address = run
    ddpm(folder, "train")
    done = subprocess.run(
        [
            *("chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            *("--enable-logging=stderr", f"--window-size={width},900"),
            *("--virtual-time-budget=5000", f"{address}/"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "Finished: 12 steps" in done.stdout
    assert 'src="grid/12.png"' in done.stdout and "Step 12" in done.stdout
    assert "CONSOLE" not in done.stderr


def rows(count: int, every: int = 10, seconds: float = 2.0) -> list[dict[str, Any]]:
    return [
        {"step": every * i, "steps": 1000, "loss": 1 / i, "time": seconds * i, "lr": 0.1}
        for i in range(1, count + 1)
    ]


@pytest.mark.parametrize(
    ("found", "now", "state"),
    [
        ([], 0.0, "Nothing is trained yet."),
        (rows(50), 101.0, "Training: step 500 of 1,000, about 1 min 40 s left"),
        (rows(50), 400.0, "Interrupted? Step 500 of 1,000 was 5 min ago"),
        (rows(100), 10**6, "Finished: 1,000 steps"),
        (rows(1), 2.0, "Training: step 10 of 1,000"),
    ],
)
def test_progress_in_words(found: list[dict[str, Any]], now: float, state: str) -> None:
    assert progress_of(found, now)["state"] == state


def test_long_curves_are_thinned_to_means() -> None:
    (loss, rate) = charts(rows(1000), None)
    assert loss.title == "training loss" and rate.title == "learning rate"
    assert len(loss.lines[0].dots) == POINTS
    mean = sum(1 / i for i in range(1, 6)) / 5
    assert loss.lines[0].dots[0].text == f"step 50: {mean:.4g}"


def test_workspace_is_read_at_most_once_per_second(tmp_path: Path) -> None:
    now = [0.0]
    live = Live(Workspace.open(str(tmp_path)), lambda: now[0])
    before = live.view()
    (tmp_path / "log.jsonl").write_text(json.dumps(rows(1)[0]) + "\n")
    now[0] = 0.9
    assert live.view() == before
    now[0] = 1.1
    assert "step 10 of 1,000" in live.view()["head"]


def test_texts_of_a_workspace_are_escaped(tmp_path: Path) -> None:
    row = {**rows(1)[0], "warnings": ["<script>alert(1)</script>\x1b[2J"], "loss": float("nan")}
    (tmp_path / "log.jsonl").write_text(json.dumps(row) + "\n")
    head = Live(Workspace.open(str(tmp_path))).view()["head"]
    assert "Step 10: &lt;script&gt;alert(1)" in head
    assert "\x1b" not in head and "<script" not in head


@pytest.mark.slow
def test_warnings_of_a_training_are_in_its_log(run: tuple[Path, str]) -> None:
    folder = new_run(run[0].parent, "warned", SETTINGS)
    ddpm(folder, "train", "-S", "train.steps=4")
    next((folder / "workspace" / "snapshots").glob("step-*/model.safetensors")).write_bytes(b"")
    said = ddpm(folder, "train")
    text = (folder / "workspace" / "log.jsonl").read_text()
    (warning,) = [one for line in text.splitlines() for one in json.loads(line).get("warnings", ())]
    assert warning.startswith("A snapshot was skipped: ") and warning in " ".join(said.split())


def test_workspace_in_s3_is_watched(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    row = json.dumps(rows(1)[0]) + "\n"
    bucket.put("watched/log.jsonl", row.encode())
    assert "Step 10 of 1,000" in Live(Workspace.open(bucket.uri("watched"))).view()["head"]
