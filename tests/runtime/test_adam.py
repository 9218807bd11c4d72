"""Our Adam equals PyTorch's bit by bit, and its state can be restored."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from ddpm_core.runtime.adam import Adam

KINDS = {False: torch.optim.Adam, True: torch.optim.AdamW}


def start() -> list[Tensor]:
    return [torch.linspace(-1, 1, n).requires_grad_() for n in (7, 3, 5)]


def advance(optimizer: torch.optim.Optimizer, weights: list[Tensor], steps: range) -> None:
    """Take steps on a loss that does not depend on the last weight."""
    for step in steps:
        optimizer.zero_grad()
        sum((weight * (step + 1)).sin().sum() for weight in weights[:-1]).backward()
        optimizer.step()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
def test_steps_equal_those_of_torch_optim(decoupled: bool, fused: bool) -> None:
    ours, theirs = start(), start()
    settings = {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.3}
    advance(Adam(ours, decoupled=decoupled, fused=fused, **settings), ours, range(9))
    advance(KINDS[decoupled](theirs, fused=fused or None, **settings), theirs, range(9))
    assert not torch.equal(ours[0], start()[0])
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


def test_scaler_skips_a_step_with_infinite_gradients() -> None:
    weights = start()
    optimizer = Adam(weights, lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor, moved in ((float("inf"), False), (1.0, True)):
        before = [weight.detach().clone() for weight in weights]
        optimizer.zero_grad()
        scaler.scale(sum(weight.sum() for weight in weights) * factor).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(weights[0], before[0]) is not moved
    assert optimizer.state[weights[0]]["step"] == 1


def test_restored_state_continues_bit_by_bit() -> None:
    whole, parts = start(), start()
    advance(Adam(whole, lr=0.1), whole, range(6))
    first, second = Adam(parts, lr=0.1), Adam(parts, lr=0.1)
    advance(first, parts, range(3))
    for weight in parts[:-1]:
        second.restore(weight, first.state[weight])
    advance(second, parts, range(3, 6))
    assert all(torch.equal(one, other) for one, other in zip(whole, parts, strict=True))


def test_restore_refuses_another_shape() -> None:
    weights = start()
    optimizer = Adam(weights, lr=0.1)
    advance(optimizer, weights, range(1))
    with pytest.raises(ValueError, match="shapes"):
        optimizer.restore(weights[0], optimizer.state[weights[1]])


def test_network_and_optimizer_do_not_import_torch_dynamo() -> None:
    code = """
import sys, torch
from ddpm_core.runtime.adam import Adam
from ddpm_core.models.config import UNetConfig
from ddpm_core.models.init import initialise
from ddpm_core.models.unet import UNet
network = UNet(UNetConfig(8, 1, 8, (1, 2), 1, (4,), conditioning="class", classes=2))
initialise(network, lambda name, shape: torch.full(shape, 0.3))
optimizer = Adam(network.parameters(), lr=0.1)
network(torch.ones(2, 1, 8, 8), torch.tensor([1, 2])).square().mean().backward()
optimizer.step()
sys.exit(", ".join({"sympy", "torch._dynamo"} & set(sys.modules)) or None)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert result.returncode == 0, result.stderr
