"""What the light image runs works where PyTorch is not installed."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from support.images import write_classes
from support.program import TINY, ddpm, environment, new_run, prepare_run, settings
from support.results import results, row

# The light image has none of these. Importing them fails in such a process.
HIDE = (
    "import sys; sys.modules.update(dict.fromkeys("
    "('torch', 'torchvision', 'torch_fidelity', 'matplotlib'))); "
)
PROGRAM = HIDE + "from ddpm_core.__main__ import main; main()"
PARTS = (
    HIDE
    + """
import json
from pathlib import Path
from ddpm_core.config import load as params
from ddpm_core.storage.workspace import Workspace
from ddpm_kube import artifacts, gc, launch, steps
config = params.load(Path("params.yaml"), sys.argv[1:])
print(json.dumps(steps.list_parts(config, Workspace.open(config.workspace))))
"""
)


def run(folder: Path, code: str, *arguments: str, status: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == status, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with samples of steps 6 and 12, drawn with bf16."""
    folder = prepare_run(tmp_path_factory.mktemp("sampled"), TINY)
    ddpm(folder, "train")
    ddpm(folder, "sample", *settings("sample.precision=bf16"))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("source", ["digits", "images"])
def test_prepare_gives_the_same_data(tmp_path: Path, source: str) -> None:
    write_classes(tmp_path / "images", ["a", "b"])
    for name, code in (("with", PROGRAM.removeprefix(HIDE)), ("without", PROGRAM)):
        given = settings(f"prepare.source={source}", "prepare.image_size=8", "prepare.workers=2")
        run(tmp_path, code, "prepare", "-w", name, *given)
    manifests = [(tmp_path / name / "data/manifest.json") for name in ("with", "without")]
    facts = [json.loads(file.read_text()) for file in manifests]
    assert facts[0]["fingerprint"] == facts[1]["fingerprint"]


def test_status_finds_samples_of_any_precision(sampled: Path) -> None:
    printed = run(sampled, PROGRAM, "status", *settings("sample.precision=auto"))
    states = {
        line.split("│")[1].strip(): line.split("│")[2]
        for line in printed.splitlines()
        if "│" in line
    }
    assert [states[verb].strip() for verb in ("prepare", "train", "sample")] == ["up to date"] * 3
    assert states["evaluate"].strip() == "nothing is scored yet"


def test_status_finds_settings_that_changed(sampled: Path) -> None:
    printed = run(sampled, PROGRAM, "status", *settings("sample.steps=3"))
    assert "step 6: no samples with these settings" in printed


def test_wait_sees_that_training_is_complete(sampled: Path) -> None:
    assert "train is up to date" in run(sampled, PROGRAM, "wait", "train", "--limit", "5s")


def parts(folder: Path, *overrides: str) -> list[str]:
    listed: list[str] = json.loads(run(folder, PARTS, *overrides).splitlines()[-1])
    return listed


def test_plan_lists_only_the_missing_shards(sampled: Path) -> None:
    assert parts(sampled) == ["6:0/1", "12:0/1"]
    folder = new_run(sampled, "some", TINY, "data", "snapshots")
    four = settings("sample.precision=bf16", "sample.shards=3")
    ddpm(folder, "sample", "--shard", "1/3", *four)
    assert parts(folder, "sample.shards=3") == [
        "6:0/3",
        "6:2/3",
        "12:0/3",
        "12:2/3",
    ]


def test_the_launcher_prints_its_options() -> None:
    assert "--run-id" in run(Path(), PROGRAM, "jobs", "train", "--help")


def test_verbs_that_compute_name_the_full_image(sampled: Path) -> None:
    printed = run(sampled, PROGRAM, "sample", *settings("sample.steps=3"), status=1)
    expected = "PyTorch is missing, as in the light image. Use the full image for this."
    assert printed == f"ddpm sample: {expected}\n"


def test_the_page_of_a_run_is_served(sampled: Path) -> None:
    """Also with scores, and the grids of milestones."""
    folder = new_run(sampled, "page", TINY, "snapshots", "log.jsonl")
    (folder / "workspace/evaluation").mkdir()
    scored = results([row(6, 9.0), row(12, 5.0)])
    (folder / "workspace/evaluation/results.json").write_text(json.dumps(scored.plain()))
    command = [sys.executable, "-c", PROGRAM, "watch", "--port", "0"]
    page = subprocess.Popen(command, cwd=folder, env=environment(), stderr=subprocess.PIPE)
    try:
        assert page.stderr is not None
        address = page.stderr.readline().decode().split("open ")[1].strip()
        with urllib.request.urlopen(f"{address}live", timeout=60) as response:
            found = json.load(response)
        assert "Finished: 12 steps" in found["head"] and found["grids"] == [6, 12]
        assert "fd_in_domain_500" in found["head"] + found["curves"]
    finally:
        page.terminate()
        page.wait(30)
