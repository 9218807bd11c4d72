"""On a device other than the CPU, no step waits for it, and results equal the CPU's."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from faults.attempt import together
from support.apart import Record, ddpm_apart, use_it
from support.digits_workspace import digits, make_config, put_data
from support.program import TINY, Program, ddpm, new_run, prepare_run
from support.runs import Tensors, at_start, bits, distance, final, of_file, rows

from ddpm_core.errors import UserError
from ddpm_core.runtime import device as devices
from ddpm_core.runtime import distributed, stopping
from ddpm_core.runtime.device import choose_device, worker_count
from ddpm_core.runtime.distributed import WORKER_LOST_STATUS, WorkerLost, World, world
from ddpm_core.runtime.stopping import StopRequest
from ddpm_core.storage.workspace import Workspace
from ddpm_core.training import launch as launcher

SETTINGS = (
    TINY.replace("attention: [8]}", "attention: [8], dropout: 0.2, conditioning: class}")
    .replace(
        "batch_size: 8\n  log",
        "batch_size: 8\n  precision: fp32\n  flip: true\n  augment: edm\n  log",
    )
    .replace("steps: 4}", "steps: 4, precision: fp32, guidance: 2.0}")
)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_run(tmp_path_factory.mktemp("begun"), SETTINGS)


@pytest.fixture(scope="module")
def here(begun: Path) -> Path:
    """Training and sampling on the CPU, to compare with."""
    folder = new_run(begun, "here", SETTINGS)
    for verb in ("train", "sample"):
        ddpm(folder, verb)
    return folder


@pytest.fixture(scope="module")
def start(begun: Path) -> Tensors:
    return of_file(at_start(new_run(begun, "start", SETTINGS)))


@pytest.fixture(scope="module")
def apart(begun: Path) -> tuple[Path, dict[str, Record]]:
    """The verbs on the device, and where each of them waited for it."""
    folder = new_run(begun, "apart", SETTINGS)
    return folder, {verb: ddpm_apart(folder, verb) for verb in ("train", "sample", "evaluate")}


@pytest.mark.slow
def test_model_equals_that_of_the_cpu_up_to_rounding(
    here: Path, apart: tuple[Path, dict[str, Record]], start: Tensors
) -> None:
    for file in ("model", "ema-0.9"):
        ours, theirs = (of_file(final(folder, 12), file) for folder in (here, apart[0]))
        begun_with = {name.replace("model/", f"{file}/"): t for name, t in start.items()}
        assert distance(theirs, ours, begun_with) < 1e-4


@pytest.mark.slow
def test_resumed_equals_uninterrupted_on_a_device(
    begun: Path, apart: tuple[Path, dict[str, Record]]
) -> None:
    folder = new_run(begun, "resumed", SETTINGS)
    ddpm_apart(folder, "train", "-S", "train.steps=7")
    ddpm_apart(folder, "train")
    assert bits(final(folder, 12)) == bits(final(apart[0], 12))


@pytest.mark.slow
def test_two_workers_exchange_tensors_of_their_devices(
    begun: Path, here: Path, start: Tensors
) -> None:
    folder = new_run(begun, "together", SETTINGS)
    together(folder, 2, "train", beside=use_it)
    assert {row["world_size"] for row in rows(folder)} == {2}
    ours, theirs = of_file(final(here, 12)), of_file(final(folder, 12))
    assert distance(theirs, ours, start) < 1e-4


@pytest.mark.slow
def test_images_equal_those_of_the_cpu_up_to_rounding(
    here: Path, apart: tuple[Path, dict[str, Record]]
) -> None:
    files = sorted((here / "workspace" / "samples").rglob("shard-*.npy"))
    assert len(files) == 2
    for file in files:
        ours = np.load(file).astype(int)
        theirs = np.load(apart[0] / file.relative_to(here)).astype(int)
        assert np.abs(ours - theirs).max() <= 1
        assert (ours != theirs).mean() < 0.01


@pytest.mark.slow
def test_no_step_waits_for_the_device(apart: tuple[Path, dict[str, Record]]) -> None:
    train, sample, evaluate = apart[1].values()
    assert set(train.waits) <= {
        "training/state.py:_host",  # the copy for a snapshot
        "training/state.py:values",  # this and the next: once per logged row
        "training/checks.py:loss_problem",
        "training/checks.py:weights_problem",
        "training/trainer.py:gather_times",
        "training/validation.py:_noise_levels",  # once per run
        "training/validation.py:_losses",  # once per measurement
        "sampling/sampler.py:batch",  # the grid of a milestone
        "sampling/sampler.py:draw",
    }
    assert train.waits["training/state.py:_host"] > 0
    batches = 2 * 3  # 20 images in batches of 8, of two checkpoints
    assert sum(sample.waits.values()) <= 3 * batches
    assert all(place.startswith("evaluation/") for place in evaluate.waits)


@pytest.mark.slow
def test_device_without_float64_is_supported(apart: tuple[Path, dict[str, Record]]) -> None:
    """MPS has no float64, and raises an error for it."""
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
def test_choose_device_prefers_the_fastest(
    monkeypatch: pytest.MonkeyPatch, gpus: int, mps: bool, setting: str, rank: int, chosen: str
) -> None:
    has(monkeypatch, gpus, mps)
    assert choose_device(setting, rank) == torch.device(chosen)


@pytest.mark.parametrize("setting", ["cuda", "cuda:0", "mps"])
def test_missing_device_is_refused(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    has(monkeypatch, 0, mps=False)
    with pytest.raises(UserError, match="no such device on this machine"):
        choose_device(setting)


@pytest.mark.parametrize(
    ("gpus", "mps", "setting", "count"),
    [(4, False, "auto", 4), (4, False, "cuda:1", 1), (0, True, "auto", 1), (0, False, "cpu", 1)],
)
def test_worker_count_is_one_per_gpu(
    monkeypatch: pytest.MonkeyPatch, gpus: int, mps: bool, setting: str, count: int
) -> None:
    has(monkeypatch, gpus, mps)
    assert worker_count("auto", setting) == count
    if setting == "cuda:1" or mps:
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        with (
            pytest.raises(UserError, match="workers cannot share"),
            world(setting, {"WORLD_SIZE": "2"}),
        ):
            pass


def test_more_workers_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, 2, mps=False)
    assert [worker_count(2, "auto"), worker_count(4, "cpu")] == [2, 4]
    with pytest.raises(UserError, match="Got 3 workers for 2 GPUs"):
        worker_count(3, "auto")


def test_started_worker_ignores_train_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a pod with one GPU whose params ask for more processes."""
    has(monkeypatch, 1, mps=False)
    config = make_config(tmp_path, device="auto", train={"processes": 4})
    images, labels = digits(16)
    put_data(Workspace.open(config.workspace), images, labels)
    launcher.train(config, {"WORLD_SIZE": "2"}, ["train"], dry_run=True)
    assert "2 x cuda" in capsys.readouterr().out
    with pytest.raises(UserError, match="Got 4 workers for 1 GPUs"):
        launcher.train(config, {}, ["train"], dry_run=True)


@pytest.mark.slow
def test_make_deterministic_sets_every_switch(tmp_path: Path) -> None:
    program = Program(tmp_path / "none", (), run_deterministic)
    assert (program.ended(), program.returncode) == ("", 0)


def run_deterministic(folder: Path, arguments: tuple[str, ...], output: Path) -> None:
    """Check the switches in this process, whose state no other test sees."""
    assert torch.backends.cudnn.allow_tf32
    devices.make_deterministic()
    import torch._inductor.config as inductor

    assert torch.are_deterministic_algorithms_enabled() and inductor.deterministic
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
    assert not torch.backends.cudnn.allow_tf32 and os.environ["CUBLAS_WORKSPACE_CONFIG"]


class Never:
    """An event that the device never reaches, since another worker has died."""

    def query(self) -> bool:
        return False


def test_signal_ends_the_wait_for_a_step_that_never_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stopping, "GRACE", 0.1)
    # A worker with one of two GPUs, and the event of a step as `note` keeps it.
    stop = StopRequest(World(0, 2, torch.device("cuda")))
    stop._flags[1] = torch.ones(()), Never()
    with stop:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(WorkerLost, match=r"not end within 0\.1 s of the signal") as lost:
            stop.agreed(1 + stopping.LAG)
    assert lost.value.status == WORKER_LOST_STATUS and stop.status == stopping.STOP_STATUS


@pytest.mark.parametrize(
    ("device", "error", "closed"),
    [
        ("cpu", UserError("the disk is full"), True),
        ("cuda", UserError("the disk is full"), False),
        ("cuda", None, True),
    ],
)
def test_failing_worker_does_not_wait_for_the_others(
    monkeypatch: pytest.MonkeyPatch, device: str, error: Exception | None, closed: bool
) -> None:
    """Closing NCCL would wait for a collective that this worker never joins."""
    has(monkeypatch, 2 if device == "cuda" else 0, mps=False)
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(distributed, "_connect", lambda *_: None)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: done.append("closed"))
    try:
        with world(device, {"WORLD_SIZE": "2"}):
            if error:
                raise error
    except UserError as raised:
        assert raised is error
    assert bool(done) is closed


def test_gpu_that_pytorch_does_not_support_is_not_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    has(monkeypatch, 2, mps=False, capability=(6, 1))
    told = "GTX 1080 has compute capability 6.1, but this PyTorch build supports 7.5"
    assert choose_device("auto").type == choose_device("auto").type == "cpu"
    assert capsys.readouterr().err.count(told) == 1
    with pytest.raises(UserError, match=told.replace(".", r"\.")):
        choose_device("cuda:1")


def has(
    monkeypatch: pytest.MonkeyPatch, gpus: int, mps: bool, capability: tuple[int, int] = (9, 0)
) -> None:
    """Set what PyTorch reports about the machine."""
    devices._too_old.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90a", "compute_120"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GTX 1080")
    monkeypatch.setattr(devices, "make_deterministic", lambda: None)  # it changes the whole process
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
