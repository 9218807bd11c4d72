"""torch.compile: what the network computes stays, and it is compiled once, not at each step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from digits_workspace import digits, make_config

from ddpm_core.distributed import World
from ddpm_core.models.unet import UNet, UNetConfig
from ddpm_core.training.batches import Batch
from ddpm_core.training.execution import Execution
from ddpm_core.training.initial import initial_weights
from ddpm_core.training.state import TrainState
from ddpm_core.training.step import step

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
    """A state after some steps with all that is drawn at random."""
    config = make_config(
        root,
        prepare={"image_size": 8},
        model=NETWORK,
        train={"batch_size": 8, "flip": True, "label_drop": 0.3, "optimizer": {"warmup": 0}},
    )
    model = UNet(UNetConfig(image_size=8, in_channels=1, classes=10, **NETWORK))
    initial_weights(model, config)
    state = TrainState.create(config, HERE, Execution("fp32", compile=False), model)
    if compiled:  # without the C++ compiler, which takes a minute
        state.forward = torch.compile(state.model, backend="aot_eager", fullgraph=True)
    images, labels = digits(8)
    for number in range(steps):
        rows = slice(8 * number, 8 * number + 8)
        batch = Batch(
            torch.from_numpy(images[rows]), torch.from_numpy(labels[rows]), torch.arange(8)
        )
        step(state, batch, torch.zeros(()))
    return state


def test_a_network_is_compiled_once_for_all_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A second compilation costs minutes with the real compiler.
    monkeypatch.setattr(torch._dynamo.config, "error_on_recompile", True)
    compiled, eager = trained(tmp_path, compiled=True), trained(tmp_path, compiled=False)
    for ours, theirs in zip(compiled.parameters, eager.parameters, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert float(eager.totals.loss) == pytest.approx(float(compiled.totals.loss), rel=1e-5)
