"""torch.compile does not change results, and compiles once instead of at each step."""

from __future__ import annotations

import functools
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.digits_workspace import digits, make_config
from support.models import write_checkpoint

from ddpm_core.config import Config
from ddpm_core.config import load as params
from ddpm_core.models.config import UNetConfig
from ddpm_core.models.unet import UNet
from ddpm_core.runtime import device as devices
from ddpm_core.runtime.distributed import World
from ddpm_core.sampling import gather
from ddpm_core.sampling.freshness import recipe_on, stale
from ddpm_core.sampling.run import sample
from ddpm_core.storage.workspace import Workspace, snapshot_key
from ddpm_core.training.init import initial_weights
from ddpm_core.training.optim import Execution
from ddpm_core.training.snapshot import SavedExecution
from ddpm_core.training.state import TrainState
from ddpm_core.training.step import Batch, step

HERE = World(0, 1, torch.device("cpu"))
NETWORK: dict[str, Any] = {
    "channels": 8,
    "multipliers": (1,),
    "blocks": 1,
    "attention": (8,),
    "dropout": 0.2,
    "conditioning": "class",
}


def trained(root: Path, *, compiled: bool, steps: int = 4) -> TrainState:
    """Return the state after some steps that use every kind of random number."""
    config = make_config(
        root,
        prepare={"image_size": 8},
        model=NETWORK,
        train={
            "batch_size": 8,
            "flip": True,
            "augment": "edm",
            "label_drop": 0.3,
            "optimizer": {"warmup": 0},
        },
    )
    model = UNet(UNetConfig(image_size=8, in_channels=1, classes=10, augmentation=14, **NETWORK))
    initial_weights(model, config)
    state = TrainState.create(config, HERE, Execution("fp32", compile=False), model)
    if compiled:  # this backend needs no C++ compiler, which takes a minute
        state.forward = torch.compile(state.model, backend="aot_eager", fullgraph=True)
    images, labels = digits(8)
    for number in range(steps):
        rows = slice(8 * number, 8 * number + 8)
        batch = Batch(
            torch.from_numpy(images[rows]), torch.from_numpy(labels[rows]), torch.arange(8)
        )
        step(state, batch, torch.zeros(()))
    return state


@pytest.fixture
def once() -> Iterator[None]:
    """Raise an error at a second compilation, which would take minutes in practice."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


@pytest.mark.slow
def test_network_is_compiled_once_for_all_steps(tmp_path: Path, once: None) -> None:
    compiled, eager = trained(tmp_path, compiled=True), trained(tmp_path, compiled=False)
    for ours, theirs in zip(compiled.parameters, eager.parameters, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert float(eager.totals.loss) == pytest.approx(float(compiled.totals.loss), rel=1e-5)


# Sampling

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, once: None) -> None:
    """Compile with a backend that traces the network and then runs it unchanged."""
    quick = functools.partial(torch.compile, backend="eager", fullgraph=True)
    monkeypatch.setattr(torch, "compile", quick)


def drawn(root: Path, **settings: Any) -> tuple[dict[int, np.ndarray], Config]:
    """Draw 37 images from each of two checkpoints, in batches of 10."""
    workspace = Workspace.open(str(root / "run"))
    given: dict[str, Any] = {"count": 37, "batch_size": 10, "steps": 3, **settings}
    given |= {"guidance": 2.0, "precision": "fp32"}
    config = make_config(root, model={"conditioning": "class"}, train={"ema": [0.9]}, sample=given)
    for at in (200, 400):
        if not workspace.path(snapshot_key(at)).exists():
            write_checkpoint(workspace.path(snapshot_key(at)), "class", step=at, seed=at)
    sample(config, workspace, HERE)
    return {s: np.array(gather.open_samples(workspace, s).images) for s in (200, 400)}, config


@pytest.mark.slow
def test_compiled_networks_draw_equal_images_up_to_rounding(tmp_path: Path, compiler: None) -> None:
    compiled, asked = drawn(tmp_path, compile=True)
    workspace = Workspace.open(str(tmp_path / "run"))
    assert stale(asked, workspace) is None
    eager, _ = drawn(tmp_path, compile=False)
    assert "samples" in str(stale(asked, workspace))  # never mixed: they round differently
    for at, images in eager.items():
        apart = np.abs(images.astype(int) - compiled[at])
        assert len(images) == 37 and apart.max() <= 1 and (apart > 0).mean() < 0.01


def test_auto_compiles_on_gpus_if_it_pays_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "has_compiler", lambda: True)
    many = devices.MIN_EVALUATIONS
    assert devices.compiles_sampling("auto", GPU, many) and devices.compiles_training(GPU)
    assert not devices.compiles_sampling("auto", GPU, many - 1)
    assert not devices.compiles_sampling("auto", CPU, many) and not devices.compiles_training(CPU)
    assert devices.compiles_sampling(True, CPU, 1) and not devices.compiles_sampling(
        False, GPU, many
    )


def test_auto_counts_evaluations_not_updates(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Heun's sampler evaluates the network 2 n - 1 times in n updates."""
    monkeypatch.setattr(devices, "has_compiler", lambda: True)
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    given = {"steps": 20, "count": devices.MIN_EVALUATIONS // 39 + 1, "precision": "fp32"}
    chosen = {}
    for sampler in ("heun", "dpmpp"):
        config = make_config(tmp_path, train={"ema": [0.9]}, sample={**given, "sampler": sampler})
        chosen[sampler] = recipe_on(GPU, config, checkpoint).compiled
    assert chosen == {"heun": True, "dpmpp": False}


def test_gpu_without_a_c_compiler_trains_uncompiled_with_a_hint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Triton needs one; without this check, training would fail at its first step."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path))
    train = params.load().train.model_copy(update={"precision": "fp32"})
    assert not Execution.choose(train, GPU).compile
    assert not devices.compiles_sampling("auto", GPU, devices.MIN_EVALUATIONS)
    assert "gcc" in str(devices.compiler_hint(GPU, "auto"))
    assert devices.compiler_hint(CPU, "auto") is None and devices.compiler_hint(GPU, False) is None
    # If the user asks for it, or the run began with it, the error of the compiler is shown.
    assert Execution.choose(train.model_copy(update={"compile": True}), GPU).compile
    assert Execution.choose(train, GPU, SavedExecution(precision="fp32", compile=True)).compile
    (tmp_path / "gcc").touch(mode=0o755)
    assert not Execution.choose(train, GPU).compile  # Python's headers may be missing
    (tmp_path / "Python.h").touch()
    assert Execution.choose(train, GPU).compile and devices.compiler_hint(GPU, "auto") is None
