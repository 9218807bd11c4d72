"""A device that is not the CPU: all is computed there, no step waits for it, the result stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from apart import Record, ddpm_apart
from program import TINY, ddpm, environment, new_run, prepare_run
from runs import at_start, bits, distance, final, of_file, rows

from ddpm_core.distributed import choose_device, processes, world
from ddpm_core.errors import UserError

SETTINGS = (
    TINY.replace("attention: [8]}", "attention: [8], dropout: 0.2, conditioning: class}")
    .replace("batch_size: 8\n  log", "batch_size: 8\n  precision: fp32\n  flip: true\n  log")
    .replace("steps: 4}", "steps: 4, precision: fp32, guidance: 2.0}")
)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_run(tmp_path_factory.mktemp("begun"), SETTINGS)


@pytest.fixture(scope="module")
def here(begun: Path) -> Path:
    """The chain on the CPU, as far as it is compared."""
    folder = new_run(begun, "here", SETTINGS)
    for verb in ("train", "sample"):
        ddpm(folder, verb)
    return folder


@pytest.fixture(scope="module")
def apart(begun: Path) -> tuple[Path, dict[str, Record]]:
    """The chain on the device, and where each verb waited for it."""
    folder = new_run(begun, "apart", SETTINGS)
    return folder, {verb: ddpm_apart(folder, verb) for verb in ("train", "sample", "evaluate")}


def test_the_model_is_the_cpus_to_rounding(
    begun: Path, here: Path, apart: tuple[Path, dict[str, Record]]
) -> None:
    start = of_file(at_start(new_run(begun, "start", SETTINGS)))
    for file in ("model", "ema-0.9"):
        ours, theirs = (of_file(final(folder, 12), file) for folder in (here, apart[0]))
        begun_with = {name.replace("model/", f"{file}/"): t for name, t in start.items()}
        assert distance(theirs, ours, begun_with) < 1e-4


def test_resumed_equals_uninterrupted_there_too(
    begun: Path, apart: tuple[Path, dict[str, Record]]
) -> None:
    folder = new_run(begun, "resumed", SETTINGS)
    ddpm_apart(folder, "train", "-S", "train.steps=7")
    ddpm_apart(folder, "train")
    assert bits(final(folder, 12)) == bits(final(apart[0], 12))


def test_workers_tell_each_other_what_lies_on_their_devices(begun: Path, here: Path) -> None:
    folder = new_run(begun, "together", SETTINGS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node=2", str(Path(__file__).with_name("apart.py")), "train"],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {row["world_size"] for row in rows(folder)} == {2}
    start = of_file(at_start(new_run(begun, "together-start", SETTINGS)))
    ours, theirs = of_file(final(here, 12)), of_file(final(folder, 12))
    assert distance(theirs, ours, start) < 1e-4


def test_the_images_are_the_cpus_to_rounding(
    here: Path, apart: tuple[Path, dict[str, Record]]
) -> None:
    files = sorted((here / "workspace" / "samples").rglob("shard-*.npy"))
    assert len(files) == 2
    for file in files:
        ours = np.load(file).astype(int)
        theirs = np.load(apart[0] / file.relative_to(here)).astype(int)
        assert np.abs(ours - theirs).max() <= 1
        assert (ours != theirs).mean() < 0.01


def test_no_step_waits_for_the_device(apart: tuple[Path, dict[str, Record]]) -> None:
    train, sample, evaluate = apart[1].values()
    assert set(train.waits) <= {
        "training/state.py:_host",  # a snapshot's copy
        "training/state.py:values",  # and the rest once a logged row
        "training/trainer.py:check_finite",
        "training/trainer.py:time_of_all",
        "generate/images.py:images",  # a milestone's grid
        "generate/images.py:_draw",
    }
    assert train.waits["training/state.py:_host"] > 0
    batches = 2 * 3  # 20 images in batches of 8, of two checkpoints
    assert sum(sample.waits.values()) <= 2 * batches
    assert all(place.startswith("evaluation/") for place in evaluate.waits)


def test_a_device_without_float64_is_enough(apart: tuple[Path, dict[str, Record]]) -> None:
    """MPS has none, and refuses to make one."""
    for record in apart[1].values():
        assert not record.wide


@pytest.mark.parametrize(
    ("gpus", "mps", "setting", "rank", "chosen"),
    [
        (2, False, "auto", 0, "cuda:0"),
        (2, False, "auto", 1, "cuda:1"),
        (2, False, "cuda:1", 0, "cuda:1"),
        (2, True, "mps", 0, "mps"),
        (0, True, "auto", 0, "mps"),
        (0, False, "auto", 3, "cpu"),
        (2, True, "cpu", 0, "cpu"),
    ],
)
def test_the_device_is_the_fastest_there_is_or_the_one_asked_for(
    monkeypatch: pytest.MonkeyPatch, gpus: int, mps: bool, setting: str, rank: int, chosen: str
) -> None:
    has(monkeypatch, gpus, mps)
    assert choose_device(setting, rank) == torch.device(chosen)


@pytest.mark.parametrize("setting", ["cuda", "cuda:0", "mps"])
def test_a_device_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    has(monkeypatch, 0, mps=False)
    with pytest.raises(UserError, match="this machine has none that PyTorch can use"):
        choose_device(setting)


@pytest.mark.parametrize(
    ("gpus", "mps", "setting", "count"),
    [(4, False, "auto", 4), (4, False, "cuda:1", 1), (0, True, "auto", 1), (0, False, "cpu", 1)],
)
def test_there_is_a_worker_a_gpu_and_one_where_it_can_not_be_shared(
    monkeypatch: pytest.MonkeyPatch, gpus: int, mps: bool, setting: str, count: int
) -> None:
    has(monkeypatch, gpus, mps)
    assert processes("auto", setting) == count
    if setting == "cuda:1" or mps:
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        with (
            pytest.raises(UserError, match="which they can't share"),
            world(setting, {"WORLD_SIZE": "2"}),
        ):
            pass


def has(monkeypatch: pytest.MonkeyPatch, gpus: int, mps: bool) -> None:
    """What PyTorch says of the machine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
