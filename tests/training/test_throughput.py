"""The log reports where the time of training goes; snapshots may be due by the clock."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest
import torch
from faults.attempt import together
from support.program import TINY, new_run, prepare_run, settings
from support.runs import bits, final, rows

from ddpm_core.config import load as params
from ddpm_core.errors import UserError
from ddpm_core.training.throughput import PHASES, Stopwatch, Throughput

LONG = TINY.replace("steps: 12", "steps: 160\n  precision: fp32", 1).replace(
    "milestone_every: 6", "milestone_every: 160"
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_run(tmp_path_factory.mktemp("prepared"), TINY)


def train(prepared: Path, name: str, text: str, *given: str, size: int = 1) -> tuple[str, Path]:
    folder = new_run(prepared, name, text)
    return together(folder, size, "train", *settings(*given)), folder


def test_log_rows_have_the_time_shares_of_each_worker(prepared: Path) -> None:
    said, folder = train(prepared, "two", TINY, size=2)
    for row in rows(folder):
        for owner in ("", "worker-0/", "worker-1/"):
            shares = [row[f"{owner}share/{phase}"] for phase in PHASES]
            assert sum(shares) == pytest.approx(1.0)
            assert row[f"{owner}share/compute"] > 0 < row[f"{owner}share/reduce"]
        assert row["slowest_worker"] in (0, 1)
        assert row["slowest_ratio"] >= 1
        assert all(isinstance(value, int | float) for value in row.values())  # as MLflow requires
    assert "worker 0:" in said
    assert "worker 1:" in said
    assert "all-reduce" in said


def test_single_worker_spends_no_time_in_the_all_reduce(prepared: Path) -> None:
    said, folder = train(prepared, "one", TINY)
    shares = [(row["share/reduce"], row["share/compute"]) for row in rows(folder)]
    assert median(r for r, _ in shares) < median(c for _, c in shares)
    assert not any("worker-0" in key or "slowest" in key for key in rows(folder)[0])
    assert "images/s when it does not wait" in said


def test_throughput_names_the_slowest_worker() -> None:
    seconds = torch.zeros(3, len(PHASES), dtype=torch.float64)
    seconds[:, list(PHASES).index("compute")] = torch.tensor([1.0, 3.0, 1.5])
    seconds[:, list(PHASES).index("reduce")] = torch.tensor([2.0, 0.0, 1.5])
    throughput = Throughput(3)
    row = throughput.row(seconds, [30, 30, 30])
    assert (row["slowest_worker"], row["slowest_ratio"]) == (1, 3)
    assert row["worker-0/share/reduce"] == pytest.approx(2 / 3)
    throughput.row(seconds, [30, 30, 30])
    assert throughput.summary()[1].startswith("worker 1: 10 images/s")


def test_stopwatch_counts_every_second_once() -> None:
    watch = Stopwatch(torch.device("cpu"))
    watch.mark("data")
    watch.mark("compute")
    watch.mark("data")
    taken = dict(zip(PHASES, watch.take().tolist(), strict=True))
    assert taken["data"] > 0 < taken["compute"]
    assert taken["reduce"] == taken["snapshot"] == 0
    assert watch.take().sum() == 0


@pytest.mark.slow
def test_timed_snapshots_do_not_change_the_weights(prepared: Path) -> None:
    keep, every = "train.keep=1000", "train.snapshot_every"
    _, timed = train(prepared, "timed", LONG, keep, f"{every}=1s", size=2)
    _, plain = train(prepared, "plain", LONG, keep, f"{every}=160", size=2)
    steps = sorted(folder.name for folder in (timed / "workspace/snapshots").iterdir())
    assert len(steps) > 1
    assert steps[-1] == "step-00000160"
    assert all(int(step[5:]) % 2 == 0 for step in steps)  # at a logged step
    assert [folder.name for folder in (plain / "workspace/snapshots").iterdir()] == steps[-1:]
    assert bits(final(timed, 160)) == bits(final(plain, 160))


@pytest.mark.parametrize("given", ["5", "0s", "-1m", "5 minutes", "", 0, 1.5])
def test_snapshot_every_refuses_invalid_values(given: object) -> None:
    with pytest.raises(UserError, match=r"train\.snapshot_every"):
        params.validate({"train": {"snapshot_every": given}})


@pytest.mark.parametrize(
    ("given", "steps", "seconds"),
    [(200, 200, None), ("90s", None, 90), ("5m", None, 300), ("1h", None, 3600)],
)
def test_snapshot_every_is_steps_or_a_time(
    given: int | str, steps: int | None, seconds: float | None
) -> None:
    train = params.validate({"train": {"snapshot_every": given}}).train
    assert (train.snapshot_steps, train.snapshot_seconds) == (steps, seconds)
