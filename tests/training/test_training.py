"""Training: the parts of a step, and what must not depend on how it is executed."""

from __future__ import annotations

import contextlib
import json
import resource
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models import write_checkpoint
from support.program import (
    TINY,
    Program,
    ddpm,
    environment,
    new_run,
    prepare_run,
    run_in,
    settings,
)
from support.runs import Tensors, at_start, distance, final, of_file, rows

from ddpm_core.config import Optimizer, Train
from ddpm_core.config import load as params
from ddpm_core.diffusion.process import make_schedule, q_sample
from ddpm_core.errors import UserError
from ddpm_core.models.config import UNetConfig
from ddpm_core.models.unet import UNet
from ddpm_core.runtime.distributed import World
from ddpm_core.runtime.stopping import LAG, StopRequest
from ddpm_core.tracking.rows import read_rows
from ddpm_core.training.dry_run import kept_at_the_end
from ddpm_core.training.identity import differences, identity
from ddpm_core.training.log import RunLog
from ddpm_core.training.optim import Ema, Execution, learning_rate
from ddpm_core.training.snapshot import prunable
from ddpm_core.training.state import TrainState
from ddpm_core.training.trainer import snapshot_due, translate_errors

MODEL = "workspace/snapshots/step-00000012/model.safetensors"
# In fp32, since the tests compare up to rounding.
LIVELY = TINY.replace(
    "attention: [8]}", "attention: [8], dropout: 0.2, conditioning: class}"
).replace("batch_size: 8\n  log", "batch_size: 8\n  precision: fp32\n  log")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_run(tmp_path_factory.mktemp("prepared"), LIVELY)


def train(prepared: Path, name: str, *arguments: str) -> Tensors:
    """Train in a new workspace on the same data, and return the weights."""
    folder = new_run(prepared, name, LIVELY)
    ddpm(folder, "train", *arguments)
    return of_file(final(folder, 12))


@pytest.mark.slow
def test_microbatches_change_only_rounding(prepared: Path) -> None:
    start = of_file(at_start(new_run(prepared, "initial", LIVELY)))
    whole = train(prepared, "whole")
    cut = train(prepared, "cut", "-S", "train.microbatches=3")
    assert distance(whole, cut, start) < 1e-4
    other = train(prepared, "other", "-S", "seed=4")
    assert distance(whole, other, start) > 0.1


@pytest.mark.parametrize("workers", [1, 2])
def test_stop_flags_of_past_steps_are_released(workers: int) -> None:
    stop = StopRequest(World(0, workers, torch.device("cpu")))
    flags = []
    for step in range(1, 10):
        flags.append(weakref.ref(stop.flag()))
        stop.note(step)
        stop.agreed(step)
    assert sum(flag() is not None for flag in flags) <= LAG


def test_training_leaves_the_global_generator_alone(prepared: Path) -> None:
    program = Program(new_run(prepared, "caller", LIVELY), ("train",), run_with_generator)
    said = program.ended()
    assert program.returncode == 0, said


def run_with_generator(folder: Path, arguments: tuple[str, ...], output: Path) -> None:
    """Run, and raise AssertionError if the state of PyTorch's generator has changed."""
    before = torch.get_rng_state()
    with contextlib.suppress(SystemExit):
        run_in({}, folder, arguments, output)
    assert len(rows(folder)) == 6
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_noise_of_every_timestep_matches_the_schedule(schedule: str) -> None:
    config = params.validate({"diffusion": {"schedule": schedule, "timesteps": 4000}})
    model = UNet(UNetConfig(8, 1, channels=8, multipliers=(1,), blocks=1, attention=()))
    here = World(0, 1, torch.device("cpu"))
    state = TrainState.create(config, here, Execution("fp32", compile=False), model)
    noise, zero = torch.ones(4000, 1, 1, 1), torch.zeros(4000, 1, 1, 1)
    added = q_sample(zero, noise, state.alphas_bar[torch.arange(4000)]).flatten().double()
    exact = (1 - make_schedule(schedule, 4000).alphas_bar).sqrt()
    assert float((added / exact - 1).abs().max()) < 2.0**-23


def test_ema_follows_its_formula_and_copies_buffers() -> None:
    model = torch.nn.BatchNorm1d(2)
    ema = Ema(model, 0.9, warmup=False)
    for step, value in enumerate((1.0, 2.0, 5.0), start=1):
        torch.nn.init.constant_(model.weight, value)
        model.running_mean.fill_(value)
        ema.update(step)
    expected = 0.9 * (0.9 * (0.9 * 1 + 0.1 * 1) + 0.1 * 2) + 0.1 * 5
    assert torch.allclose(ema.tensors["weight"], torch.full((2,), expected))
    assert torch.equal(ema.tensors["running_mean"], torch.full((2,), 5.0))


def test_ema_warms_up_only_if_asked() -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    plain, warm = Ema(model, 0.999, warmup=False), Ema(model, 0.999, warmup=True)
    torch.nn.init.ones_(model.weight)
    plain.update(1)
    warm.update(1)
    assert float(plain.tensors["weight"]) == pytest.approx(0.001, rel=1e-4)
    assert float(warm.tensors["weight"]) == pytest.approx(1 - 2 / 11, rel=1e-4)


def test_learning_rate_warms_up_then_follows_the_schedule() -> None:
    constant = Optimizer(lr=0.1, warmup=10)
    assert [learning_rate(constant, s, 100) for s in (1, 5, 10, 11, 100)] == pytest.approx(
        [0.01, 0.05, 0.1, 0.1, 0.1]
    )
    cosine = Optimizer(lr=0.1, warmup=10, schedule="cosine")
    assert learning_rate(cosine, 55, 100) == pytest.approx(0.05)
    assert learning_rate(cosine, 100, 100) == pytest.approx(0.0)
    assert learning_rate(Optimizer(lr=0.1, warmup=0), 1, 100) == 0.1


def test_pruning_keeps_the_newest_and_milestones() -> None:
    steps = [5, 10, 15, 20, 25, 30]
    assert prunable(steps, kept(2, 10, 30)) == ([5, 15], [10, 20])
    assert prunable([10, 20], kept(3, 10, 20)) == ([], [])
    assert prunable([7, 14, 21, 23], kept(1, 100, 14)) == ([7, 21], [14])


def kept(keep: int, milestone_every: int, steps: int, every: int | str = 200) -> Train:
    return Train(keep=keep, milestone_every=milestone_every, steps=steps, snapshot_every=every)


@pytest.mark.parametrize(
    "train", [kept(20, 5, 60, 1), kept(2, 10, 31, 4), kept(3, 7, 6, 2), kept(5, 6, 40, 9)]
)
def test_dry_run_counts_the_snapshots_that_will_remain(train: Train) -> None:
    there: set[int] = set()
    for at in range(1, train.steps + 1):
        if snapshot_due(train, at):
            there.add(at)
            there -= set(prunable(there, train)[0])
    slim = prunable(there, train)[1]
    assert kept_at_the_end(train) == (len(there) - len(slim), len(slim))


def test_dry_run_counts_every_milestone_for_timed_snapshots() -> None:
    assert kept_at_the_end(kept(3, 5, 60, "5m")) == (3, 11)


def test_differences_name_the_settings() -> None:
    one = identity(params.load(None, ["train.loss.weighting=uniform"]), "data")
    two = identity(params.load(None, ["train.processes=4", "train.steps=9"]), "data")
    assert differences(one, two) == ["train.loss.weighting: uniform -> min_snr"]
    cosine = ["train.optimizer.schedule=cosine"]
    longer = identity(params.load(None, [*cosine, "train.steps=9"]), "data")
    assert "train.steps: 800 -> 9" in differences(
        identity(params.load(None, cosine), "data"), longer
    )


def test_identity_includes_train_init_while_it_exists(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    config = params.load(None, [f"train.init={folder}"])
    found = []
    for seed in (1, 2):
        write_checkpoint(folder, seed=seed)
        found.append(identity(config, "data"))
        shutil.rmtree(folder)
    [told] = differences(*found)
    assert told.startswith("weights of train.init: ")
    gone = identity(config, "data")
    assert differences(found[0], gone) == differences(gone, found[0]) == []


def test_incomplete_line_of_the_log_is_ignored(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "log.jsonl")
    for step in (1, 2, 3):
        log.append({"step": step, "loss": 1.0})
    with log.path.open("a") as file:
        file.write('{"step": 4, "lo')
    assert [row["step"] for row in read_rows(log.path)] == [1, 2, 3]
    again = RunLog(log.path)
    again.recover(9)
    again.append({"step": 3, "loss": 2.0})
    again.append({"step": 4, "loss": 2.0})
    assert [row["loss"] for row in read_rows(log.path)] == [1.0, 1.0, 1.0, 2.0]
    assert len(log.path.read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("steps", "left"),
    [
        ([20, 30, 400000, 50, 60], [20, 30, 50, 60]),
        ([20, 30, 400000], [20, 30]),
        ([400000, 20], [20]),
        ([20, 30, 4, 40], [20, 30, 40]),
        ([10, 20, 30, 15, 20, 25, 30, 35], [10, 20, 25, 30, 35]),
    ],
)
def test_row_with_a_damaged_step_blocks_no_other_row(
    tmp_path: Path, steps: list[int], left: list[int]
) -> None:
    log = RunLog(tmp_path / "log.jsonl")
    log.path.write_text("".join(json.dumps({"step": step}) + "\n" for step in steps))
    log.recover(100)
    log.append({"step": 70})
    assert [row["step"] for row in read_rows(log.path)] == [*left, 70]


def test_worker_timeout_has_an_upper_limit() -> None:
    with pytest.raises(UserError, match=r"train\.worker_timeout: got .*; must be at most"):
        params.load(None, ["train.worker_timeout=1e15"])


def test_rows_wait_in_memory_while_the_disk_is_full(tmp_path: Path) -> None:
    log, limits = RunLog(tmp_path / "log.jsonl"), resource.getrlimit(resource.RLIMIT_FSIZE)
    log.append({"step": 1})
    try:  # a limit on file sizes makes a write fail halfway, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
        log.append({"step": 2})
        log.append({"step": 3})
        assert log.path.read_text() == '{"step": 1}\n'
        with pytest.raises(OSError, match="File too large"):
            log.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    log.append({"step": 4})
    assert [row["step"] for row in read_rows(log.path)] == [1, 2, 3, 4]
    assert len(log.path.read_text().splitlines()) == 4


def test_out_of_memory_names_the_settings_to_change() -> None:
    config = params.load()
    told = r"batch_size 32 .* model.channels 32 .* raise microbatches"
    with pytest.raises(UserError, match=told), translate_errors(config):
        torch.empty(1 << 60, dtype=torch.uint8)
    with pytest.raises(UserError, match="Tried to allocate 2 GiB"), translate_errors(config):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    with pytest.raises(RuntimeError, match="shapes differ"), translate_errors(config):
        raise RuntimeError("shapes differ")


def test_failed_compilation_names_the_setting_to_change() -> None:
    error = torch._dynamo.exc.BackendCompilerFailed(None, ImportError("main.so: too short"), None)
    with pytest.raises(UserError, match=r"too short.* train\.compile: false"):  # noqa: SIM117
        with translate_errors(params.load()):
            raise error


def test_dry_run_prints_the_plan_and_writes_nothing(prepared: Path) -> None:
    folder = new_run(prepared, "dry", LIVELY)
    said = ddpm(folder, "train", "--dry-run", "-S", "train.steps=1000000")
    for line in (
        "steps: 1000000",
        "parameters",
        " per snapshot, up to ",
        "for the program itself",
        "per worker",
        "1 x cpu",
    ):
        assert line in said
    assert [path.name for path in (folder / "workspace").iterdir()] == ["data"]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
def test_dry_run_predicts_the_memory_of_training(tmp_path: Path) -> None:
    """Six million weights on images of 8 pixels, so that activations are negligible."""
    given = {
        "prepare": {"image_size": 8},
        "model": {"channels": 96, "multipliers": [1, 2], "blocks": 1, "attention": []},
        "train": {
            "batch_size": 1,
            "steps": 2,
            "grid": 1,
            "snapshot_every": 2,
            "reduction": "exact",
        },
    }
    code = (
        "import json, re, sys; from pathlib import Path\n"
        "from support.digits_workspace import digits, make_config, put_data\n"
        "from ddpm_core.training import dry_run, launch\n"
        "from ddpm_core.data.dataset import open_dataset\n"
        "from ddpm_core.storage.workspace import Workspace\n"
        "PROC = Path('/proc/self/status')\n"
        "config = make_config(Path('.'), **json.loads(sys.argv[1]))\n"
        "workspace = Workspace.open(config.workspace)\n"
        "put_data(workspace, *digits(8))\n"
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', PROC.read_text())[1])\n"
        "small = {'model': {'channels': 8, 'multipliers': [1], 'attention': []}}\n"
        "other = make_config(Path('small'), **{**json.loads(sys.argv[1]), **small})\n"
        "put_data(Workspace.open(other.workspace), *digits(8))\n"
        "launch.train(other, {}, ['train']); before = peak()\n"
        "launch.train(config, {}, ['train']); took = 1024 * (peak() - before)\n"
        "count = dry_run.count_parameters(config, open_dataset(workspace))\n"
        "print(count, took, sum(dry_run.memory_needed(config, count, 1)))\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, json.dumps(given)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**environment(), "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert told.returncode == 0, told.stderr
    parameters, took, expected = map(int, told.stdout.split())
    assert parameters > 5_000_000
    assert expected / 1.4 < took < expected * 1.4, (took, expected)


def test_warm_start_uses_the_average_of_another_run(prepared: Path) -> None:
    whole = prepared / "whole"
    if not (whole / MODEL).exists():
        train(prepared, "whole")
    source = whole / "workspace/snapshots/step-00000012"
    same = ("-S", f"train.init={source}", "-S", "train.optimizer.lr=1e-30", "-S", "train.steps=12")
    started = train(prepared, "warm", *same)
    average = of_file(final(whole, 12), "ema-0.9")
    assert len(average) == len(started)
    for name, array in average.items():
        assert np.array_equal(started[name.replace("ema-0.9/", "model/")], array)
    folder = new_run(prepared, "unfit", LIVELY)
    said = ddpm(folder, "train", "-S", f"train.init={source}", "-S", "model.channels=16", status=1)
    assert "model.channels is 8 in train.init, 16 in this run" in said


@pytest.mark.slow
def test_steps_skipped_by_fp16_are_counted(prepared: Path) -> None:
    folder = new_run(prepared, "skipped", LIVELY)
    ddpm(folder, "train", "-S", "train.precision=fp16", "-S", "train.steps=4")
    for row in rows(folder):
        assert np.isfinite(row["grad_norm"])
        assert 0.0 <= row["skip_rate"] <= 1.0
        assert row["loss_scale"] > 0
    # A gradient that is never finite halves the scale at every step; the run must not succeed.
    given = settings(
        "train.precision=fp16",
        "train.steps=60",
        "train.snapshot_every=60",
        "train.milestone_every=60",
    )
    program = Program(folder, ("train", *given), run_infinite)
    said = program.ended()
    assert program.returncode == 1, said
    assert "are not finite at the smallest loss scale" in said
    assert "The snapshot of step 4 is complete" in said
    assert rows(folder)[-1]["skip_rate"] == 1.0


def run_infinite(folder: Path, arguments: tuple[str, ...], output: Path) -> None:
    """Run with one gradient that is never finite, while the loss is."""
    create = TrainState.create

    def wild(*given: Any) -> TrainState:
        state = create(*given)
        state.parameters[0].register_hook(lambda gradient: gradient + float("inf"))
        return state

    TrainState.create = wild  # type: ignore[method-assign]
    run_in({}, folder, arguments, output)


def test_gray_images_train_in_bf16(prepared: Path) -> None:
    folder = new_run(prepared, "half", LIVELY)
    ddpm(folder, "train", "-S", "train.precision=bf16", "-S", "train.steps=4")
    state = json.loads((folder / "workspace/snapshots/step-00000004/state.json").read_text())
    assert state["execution"] == {"precision": "bf16", "compile": False}
