"""On a real GPU: results equal the CPU's, resuming is bitwise, and errors are readable.

`make test-gpu` runs these.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from support.program import GPU, TINY, ddpm, environment, new_run, prepare_run, settings
from support.runs import at_start, bits, distance, final, of_file

from ddpm_core.runtime.device import has_compiler

pytestmark = pytest.mark.cuda
on_gpu_only = pytest.mark.skipif(GPU == "cpu", reason="takes too much time or memory on a CPU")

SETTINGS = (
    TINY.replace("attention: [8]}", "attention: [8], dropout: 0.2, conditioning: class}")
    .replace("batch_size: 8\n  log", "batch_size: 8\n  precision: fp32\n  compile: false\n  log")
    .replace("ema: [0.9]", "ema: [0.9]\n  augment: edm")
    .replace("steps: 4}", "steps: 4, precision: fp32, guidance: 2.0}")
)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_run(tmp_path_factory.mktemp("begun"), SETTINGS)


def trained(begun: Path, name: str, device: str, *given: str) -> Path:
    folder = new_run(begun, name, SETTINGS)
    ddpm(folder, "train", *settings(f"device={device}", *given))
    return folder


@pytest.fixture(scope="module")
def here(begun: Path) -> Path:
    return trained(begun, "here", "cpu")


@pytest.fixture(scope="module")
def there(begun: Path) -> Path:
    return trained(begun, "there", GPU)


@pytest.fixture(scope="module")
def start(begun: Path) -> Path:
    return new_run(begun, "start", SETTINGS)


def apart(one: Path, other: Path, start: Path) -> float:
    models = [of_file(final(folder, 12)) for folder in (one, other)]
    return distance(*models, of_file(at_start(start)))


def test_model_equals_that_of_the_cpu(here: Path, there: Path, start: Path) -> None:
    assert apart(there, here, start) < 1e-3


def test_images_equal_those_of_the_cpu(here: Path, there: Path) -> None:
    ddpm(here, "sample", *settings("device=cpu"))
    ddpm(there, "sample", *settings(f"device={GPU}"))
    files = sorted((here / "workspace" / "samples").rglob("shard-*.npy"))
    assert len(files) == 2
    for file in files:
        differences = np.abs(np.load(file).astype(int) - np.load(there / file.relative_to(here)))
        assert differences.max() <= 2 and (differences > 0).mean() < 0.02


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_resumed_equals_uninterrupted(begun: Path, precision: str) -> None:
    given = f"train.precision={precision}"
    whole = trained(begun, f"whole-{precision}", GPU, given)
    folder = trained(begun, f"resumed-{precision}", GPU, given, "train.steps=7")
    ddpm(folder, "train", *settings(f"device={GPU}", given))
    assert bits(final(folder, 12)) == bits(final(whole, 12))


@on_gpu_only
@pytest.mark.skipif(not has_compiler(), reason="requires a C compiler and Python's headers")
def test_compiled_network_trains_the_same_model(begun: Path, there: Path, start: Path) -> None:
    compiled = trained(begun, "compiled", GPU, "train.compile=true")
    assert apart(compiled, there, start) < 1e-3


@on_gpu_only
def test_out_of_memory_names_the_settings_to_change(begun: Path) -> None:
    folder = new_run(begun, "too-large", SETTINGS)
    given = ("model.channels=512", f"train.batch_size={2**18}", f"device={GPU}")
    said = ddpm(folder, "train", *settings(*given), status=None)
    assert "Out of memory" in said and "train.microbatches" in said, said
    assert "Traceback" not in said


def test_workers_connect_and_reduce_with_nccl() -> None:
    code = """
        import sys, torch, torch.distributed as dist
        from ddpm_core.runtime.distributed import World, _connect
        device = torch.device(sys.argv[1])
        group = _connect(device, World(0, 1, device, 60.0), 30.0)
        assert dist.get_backend(group) == ("nccl" if device.type == "cuda" else "gloo")
        rows = torch.arange(4.0, device=device)
        dist.all_reduce(rows, group=group)
        dist.barrier(group=group, device_ids=[0] if device.type == "cuda" else None)
        assert rows.tolist() == [0, 1, 2, 3]
        dist.destroy_process_group()
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    one = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    device = "cuda:0" if GPU == "cuda" else GPU
    code_of = [sys.executable, "-c", textwrap.dedent(code), device]
    subprocess.run(code_of, check=True, env=environment() | one, timeout=120)
