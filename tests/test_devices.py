"""A device that is not the CPU: all is computed there, no step waits for it, the result stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from apart import Record, ddpm_apart
from program import TINY, ddpm, environment, new_run, prepare_run
from runs import at_start, bits, distance, final, of_file, rows

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
