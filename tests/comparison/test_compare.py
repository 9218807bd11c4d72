"""`ddpm compare`: a comparison end to end, interrupted or not."""

from __future__ import annotations

import csv
import io
import re
import shutil
import signal
from math import prod
from pathlib import Path

import pytest
import torch
from faults.attempt import running, until
from support.comparison import STEPS, record_cost, write_experiment
from support.program import ddpm, start, wait_until

from ddpm_core.comparison.cost import Cost, measured, medians
from ddpm_core.comparison.experiment import Arm, Run, load
from ddpm_core.comparison.report import write
from ddpm_core.comparison.results import Results, with_error
from ddpm_core.data.dataset import open_dataset
from ddpm_core.runtime.distributed import World
from ddpm_core.sampling.gather import open_samples
from ddpm_core.storage.workspace import Workspace
from ddpm_core.training.init import fresh_network
from ddpm_core.training.step import next_batch
from ddpm_core.training.timing import Timed

RUNS = {
    "runs/uniform/lr-0.001/seed-3",
    "runs/uniform/lr-0.002/seed-3",
    "runs/variance/seed-3",
    "runs/variance/seed-4",
    "runs/variance-other_seed/seed-3",
    "runs/variance-other_seed/seed-4",
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished comparison."""
    root = tmp_path_factory.mktemp("finished")
    record_cost(write_experiment(root))
    ddpm(root, "compare", "tiny.yaml")
    return root / "comparisons" / "tiny"


def rows(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO((folder / "results.csv").read_text())))


@pytest.mark.slow
def test_every_run_is_scored_at_each_share(finished: Path) -> None:
    found = {}
    for row in rows(finished):
        key = (row["method"], row["learning_rate"], row["seed"])
        found.setdefault(key, []).append(
            (row["share"], row["step"], row["sampler"], row["samples"])
        )
        assert all(float(row[name]) >= 0 for name in row if name.startswith("fd_"))
    expected = [
        ("0.25", "1", "dpmpp", "12"),
        ("0.5", "2", "dpmpp", "12"),
        ("1.0", "4", "dpmpp", "12"),
        ("1.0", "4", "ddpm", "8"),
    ]
    assert sorted(map(len, found.values())) == [3, 4, 4, 4, 4, 4, 4]
    assert all(each == expected[: len(each)] for each in found.values())
    tuned = [rate for method, rate, _ in found if method == "uniform"]
    assert len(found) == 7 and sorted(set(tuned)) == ["0.001", "0.002"]


@pytest.mark.slow
def test_only_the_chosen_learning_rate_has_all_seeds(finished: Path) -> None:
    chosen = {r["learning_rate"] for r in rows(finished) if r["chosen"] == "1"}
    uniform = [r for r in rows(finished) if r["method"] == "uniform"]
    tuned = [
        r for r in uniform if r["seed"] == "3" and (r["share"], r["sampler"]) == ("1.0", "dpmpp")
    ]
    best = min(tuned, key=lambda r: prod(float(r[name]) for name in r if name.startswith("fd_")))
    seeds = {r["seed"] for r in uniform if r["learning_rate"] == best["learning_rate"]}
    assert best["learning_rate"] in chosen and seeds == {"3", "4"}


@pytest.mark.slow
def test_report_is_self_contained(finished: Path) -> None:
    page = (finished / "report.html").read_text()
    assert not re.search(r'(?:src|href)="(?!data:)', page)
    assert page.count("<svg") == 14 and "variance-other_seed" in page
    assert (finished / "tables" / "variance.png").is_file()
    assert "| variance | " in (finished / "results.md").read_text()


@pytest.mark.slow
def test_methods_share_weights_batches_and_sampling_noise(finished: Path) -> None:
    experiment = record_cost(write_experiment(finished.parent.parent))
    data = open_dataset(Workspace.open(str(finished)))
    states, batches = [], []
    for method in ("uniform", "variance"):
        config = experiment.run_config(Run(Arm(method, method), None, 3, STEPS), finished)
        states.append(fresh_network(config, data)[0].state_dict())
        world = World(0, 1, torch.device("cpu"), 1.0)
        batches.append(next_batch(config, data, world, 2))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert torch.equal(batches[0].pixels, batches[1].pixels)
    runs = [Workspace.open(str(finished / f"runs/variance/seed-{seed}")) for seed in (3, 4)]
    manifests = [open_samples(run, STEPS).manifest for run in runs]
    assert manifests[0].seed == manifests[1].seed


@pytest.mark.slow
def test_finished_comparison_repeats_no_run(finished: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in finished.rglob("scores.json")}
    output = ddpm(finished.parent.parent, "compare", "tiny.yaml")
    assert before == {p: p.stat().st_mtime_ns for p in finished.rglob("scores.json")}
    assert "train:" not in output and "Done." in output


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="finds the workers in /proc")
def test_killed_workers_resume_to_the_same_results(finished: Path, tmp_path: Path) -> None:
    record_cost(write_experiment(tmp_path))
    folder = tmp_path / "comparisons" / "tiny"
    for part in ("data", "evaluation"):
        shutil.copytree(finished / part, folder / part)
    fewer = ["-S", "seeds=[3]", "-S", "methods.variance.controls=[]"]
    program = start(tmp_path, "compare", "tiny.yaml", *fewer, "--workers", "2")
    snapshots = "runs/*/*/seed-3/snapshots/step-*/manifest.json"
    assert wait_until(lambda: any(folder.glob(snapshots)), program)
    workers = Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
    program.send_signal(signal.SIGKILL)
    until(lambda: not any(running(int(pid)) for pid in workers), "the workers end")
    assert not (folder / "results.csv").exists()
    ddpm(tmp_path, "compare", "tiny.yaml", *fewer)
    expected = [r for r in rows(finished) if r["seed"] == "3" and not r["control_of"]]
    assert rows(folder) == expected


@pytest.mark.slow
def test_dry_run_prints_the_cost_and_trains_nothing(finished: Path, tmp_path: Path) -> None:
    record_cost(write_experiment(tmp_path))
    output = ddpm(tmp_path, "compare", "tiny.yaml", "--dry-run")
    assert "runs      7, with 28 steps in total" in output
    assert "training  1 min 10 s on cpu" in output
    assert not (tmp_path / "comparisons" / "tiny" / "runs").exists()


@pytest.mark.slow
def test_budget_shorter_than_the_warmup_is_refused(tmp_path: Path) -> None:
    record_cost(write_experiment(tmp_path))
    setting = "settings.train.optimizer.warmup=4"
    output = ddpm(tmp_path, "compare", "tiny.yaml", "-S", setting, "--dry-run", status=1)
    assert "4 steps of uniform; must be longer than train.optimizer.warmup, 4 steps" in output


@pytest.mark.slow
def test_cost_is_measured_in_turns_and_kept(finished: Path, tmp_path: Path) -> None:
    experiment = record_cost(write_experiment(tmp_path))
    workspace = Workspace.open(str(tmp_path / "comparisons" / "tiny"))
    Path(workspace.uri, "data").symlink_to(finished / "data")
    assert measured(experiment, workspace).seconds["variance"] == 2.5
    workspace.storage.remove("cost.json")
    cost = measured(experiment, workspace)
    assert 0.2 < cost.seconds["variance"] / cost.seconds["uniform"] < 5
    assert measured(experiment, workspace) == cost


def test_slow_round_does_not_change_the_ratio_of_costs() -> None:
    rounds = [
        {"a": Timed(1.0, 1.0), "b": Timed(2.0, 2.0)},
        {"a": Timed(50.0, 1.0), "b": Timed(2.0, 2.0)},  # `a` waited for the processor
        {"a": Timed(10.0, 10.0), "b": Timed(20.0, 20.0)},
    ]
    assert medians(rounds) == pytest.approx({"a": 10.0, "b": 20.0})


@pytest.mark.slow
def test_unfinished_comparison_has_a_report_without_verdict(finished: Path, tmp_path: Path) -> None:
    experiment = load(write_experiment(tmp_path))
    cost = Cost.model_validate_json((finished / "cost.json").read_text())
    steps, floors = cost.steps(experiment), {"dpmpp": ({}, 0), "ddpm": ({}, 0)}
    found = Results(experiment, finished, cost, steps, ["fd_pixel_pca"], floors, planned=7)
    workspace = Workspace.open(str(tmp_path))
    (tmp_path / "data").symlink_to(finished / "data")
    write(found, workspace)
    page = (tmp_path / "report.html").read_text()
    assert "not finished yet" in page and "0 of 7 runs" in page
    assert "requires at least two seeds" in page and "<svg" not in page


@pytest.mark.parametrize(
    ("mean", "error", "text"),
    [
        (4.2149, 0.1349, "4.21 ± 0.13"),
        (-0.00105, 0.0204, "−0.001 ± 0.020"),
        (1234.5, 31.0, "1234 ± 31"),
        (0.64, None, "0.640"),
        (3.0, 0.0, "3.00 ± 0.00"),
        (0.00917, 0.000378, "0.00917 ± 0.00038"),
    ],
)
def test_scores_are_rounded_to_two_digits_of_their_error(
    mean: float, error: float | None, text: str
) -> None:
    assert with_error(mean, error) == text
