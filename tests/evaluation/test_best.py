"""The best checkpoint does not change when the same command runs again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.digits_workspace import digits, make_config, put_data
from support.evaluated import in_haste
from support.mlflow_server import put_store
from support.models import write_checkpoint

from ddpm_core.chain import CHECKS
from ddpm_core.evaluation.evaluate import evaluate
from ddpm_core.registry.register import register
from ddpm_core.runtime.distributed import World
from ddpm_core.sampling.run import sample
from ddpm_core.storage.workspace import Workspace, snapshot_key

pytestmark = pytest.mark.slow
STEPS = (4, 8, 12)


class Run:
    """A workspace of 8x8 digits with three untrained checkpoints."""

    def __init__(self, root: Path, store: Path) -> None:
        self.workspace = Workspace.open(str(root / "run"))
        self.store = store  # MLflow's, shared by all runs of the fixture

    def fill(self) -> None:
        images, labels = digits(8)
        data = put_data(self.workspace, images[:400], labels[:400], held_out=60)
        for step in STEPS:
            folder = self.workspace.path(snapshot_key(step))
            classes = {"classes": list("0123456789"), "class_counts": [1] * 10}
            write_checkpoint(folder, seed=10 * step, step=step, fingerprint=data, **classes)

    def go(self, *, name: str = "best-by-tests", **given: Any) -> list[str]:
        """Run the verbs that are not up to date, as `ddpm run` does, and return their names."""
        settings = {"count": 37, "batch_size": 20, "steps": 4, "seed": 5, **given}
        config = make_config(
            self.workspace.path("").parent,
            train={"ema": [0.9], "milestone_every": 4},
            sample=settings,
            evaluate={"metrics": ["fid"]},
            register={"name": name},
            tracking={"uri": f"sqlite:///{self.store}", "experiment": "best"},
        )
        done = []
        for verb, action in (
            ("sample", lambda: sample(config, self.workspace, World(0, 1, torch.device("cpu")))),
            ("evaluate", lambda: evaluate(config, self.workspace)),
            ("register", lambda: register(config, self.workspace)),
        ):
            if CHECKS[verb]()(config, self.workspace) is not None:
                action()
                done.append(verb)
        return done

    def results(self) -> dict[str, Any]:
        return self.workspace.read_json("evaluation/results.json")

    def registered(self) -> int:
        return int(self.workspace.read_json("registered.json")["step"])

    def report(self) -> str:
        return self.workspace.path("evaluation/report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with three scored checkpoints, the best of which is registered."""
    root = tmp_path_factory.mktemp("begun")
    put_store(root / "mlflow.db")
    run = Run(root, root / "mlflow.db")
    run.fill()
    with in_haste():
        assert run.go() == ["sample", "evaluate", "register"]
    return root


@pytest.fixture
def run(begun: Path, tmp_path: Path) -> Iterator[Run]:
    shutil.copytree(begun / "run", tmp_path / "run")
    with in_haste():
        yield Run(tmp_path, begun / "mlflow.db")


@pytest.mark.parametrize("change", [{"count": 50}, {"sampler": "ddim"}])
def test_best_stays_best_when_sampled_with_other_settings(run: Run, change: dict[str, Any]) -> None:
    best = run.registered()
    name = f"fresh-{next(iter(change))}"
    done = run.go(checkpoints="best", name=name, **change)
    assert done == ["sample", "evaluate", "register"]
    assert run.results()["best"]["step"] == run.registered() == best
    assert f"Step {best} is not comparable with any other checkpoint." in run.report()
    assert run.go(checkpoints="best", name=name, **change) == []
    assert run.go() == ["sample", "evaluate", "register"]  # all three with one recipe again
    assert run.registered() == best and f"Step {best} is the best of 3" in run.report()


def test_latest_with_another_sampler_is_ranked_alone(run: Run) -> None:
    run.go(checkpoints="latest", sampler="ddim", name="latest")
    assert run.results()["best"]["step"] == run.registered() == STEPS[-1]
    assert run.go(checkpoints="latest", sampler="ddim", name="latest") == []


def test_selected_checkpoints_change_the_ranking(run: Run) -> None:
    best = run.registered()
    others = [step for step in STEPS if step != best]
    run.go(checkpoints=[best], count=50)
    assert run.go(checkpoints=others) == ["evaluate", "register"]
    assert run.results()["best"]["step"] in others
    assert f"Step {run.registered()} is the best of 2" in run.report()
    assert run.go(checkpoints=others) == []


def test_best_does_not_depend_on_the_seed(run: Run) -> None:
    best = run.registered()
    for seed in (6, 7):
        run.go(checkpoints="best", seed=seed)
        assert run.results()["best"]["step"] == best
        assert run.go(checkpoints="best", seed=seed) == []


def test_best_after_latest_is_the_best_of_the_others(run: Run) -> None:
    others = [row for row in run.results()["rows"] if row["step"] != STEPS[-1]]
    run.go(checkpoints="latest", sampler="ddim", name="later")
    run.go(checkpoints="best", count=50, name="later")
    assert run.registered() == min(others, key=lambda row: row["score"])["step"]
