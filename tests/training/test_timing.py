"""Steps on made-up images train the real network, and their memory is close to the real one."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpm_core.config import Config
from ddpm_core.config import load as params
from ddpm_core.runtime.distributed import world
from ddpm_core.training.dry_run import ExpectedImages
from ddpm_core.training.step import step
from ddpm_core.training.timing import (
    activation_bytes,
    made_up_batch,
    made_up_data,
    made_up_state,
    time_of_evaluation,
)


def settings(conditioning: str = "none", prediction: str = "v", **train: Any) -> Config:
    return params.validate(
        {
            "device": "cpu",
            "prepare": {"image_size": 8},
            "model": {"channels": 8, "multipliers": [1, 2], "conditioning": conditioning},
            "diffusion": {"prediction": prediction, "timesteps": 50},
            "train": {"batch_size": 4, "precision": "fp32", **train},
            "sample": {"steps": 4, "batch_size": 4},
        }
    )


@pytest.mark.parametrize("conditioning", ["none", "class", "text"])
@pytest.mark.parametrize("prediction", ["v", "wiener"])
@pytest.mark.parametrize("channels", [1, 3])
def test_made_up_images_can_be_trained_on_and_sampled(
    conditioning: str, prediction: str, channels: int
) -> None:
    config = settings(conditioning, prediction)
    images = ExpectedImages(8, channels, ["a", "b", "c"], "")
    with world("cpu", {}) as here:
        state = made_up_state(config, images, here)
        before = [weights.detach().clone() for weights in state.parameters]
        step(state, made_up_batch(config, images, 4, here.device), torch.zeros(()))
        data = made_up_data(images, conditioning)
        seconds = time_of_evaluation(config, state.model, data, here, state.moments)
    assert not int(state.bad_step) and seconds > 0
    assert not all(map(torch.equal, before, state.parameters))


@pytest.mark.parametrize("count", [1, 4])
def test_activations_do_not_depend_on_the_batch_size(count: int) -> None:
    images = ExpectedImages(8, 3, [], "")
    found = []
    with world("cpu", {}) as here:
        for config in (settings(), settings(batch_size=4 * count)):
            state = made_up_state(config, images, here)
            one, two = (made_up_batch(config, images, n, here.device) for n in (1, 2))
            found.append(activation_bytes(state, (one, two)))
    assert found[0] == found[1] > 8 * 8 * 8 * 4


def _memory(precision: str) -> tuple[float, float]:
    """Return the predicted and the measured memory of an image, in bytes, in this process."""
    torch.set_num_threads(1)
    batch = 32
    config = params.validate(
        {
            "prepare": {"image_size": 32},
            "model": {"dropout": 0.1},
            "train": {"batch_size": batch, "precision": precision},
        }
    )
    images = ExpectedImages(32, 3, [], "")
    with world("cpu", {}) as here:
        state = made_up_state(config, images, here)
        one, two, full = (made_up_batch(config, images, n, here.device) for n in (1, 2, batch))
        predicted = activation_bytes(state, (one, two))
        before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        for _ in range(2):
            step(state, full, torch.zeros(()))
    peak = next(
        int(line.split()[1])
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    return predicted, (1024 * peak - before) / batch


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_predicted_memory_is_close_to_the_peak_of_a_step(precision: str) -> None:
    """In a fresh process, whose memory earlier tests have not enlarged."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        try:
            predicted, measured = pool.apply(_memory, (precision,))
        except PermissionError:
            pytest.skip("this container does not let a process reset its peak memory")
    assert 0.5 * predicted < measured < predicted, (predicted, measured)
