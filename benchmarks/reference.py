"""The training and sampling of diffusers' unconditional example, on images prepared by ddpm.

Its defaults (examples/unconditional_image_generation): AdamW with its betas and weight decay, a
learning rate of 1e-4 with 500 steps of warm-up and cosine annealing, the average EMAModel with
power 3/4, DDPMScheduler, fp32. On a GPU it uses bf16, which the example offers as
--mixed_precision. Two things differ. The network and the batch size are those of ddpm, because
the example's network is made for larger images. The images are read from ddpm's packed file, which
is faster than the example's decoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import DDPMPipeline, DDPMScheduler, DPMSolverMultistepScheduler
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from torch.nn import functional

from benchmarks import ours, theirs
from benchmarks.networks import Network
from ddpm_core.console import progress
from ddpm_core.data.dataset import PackedDataset
from ddpm_core.runtime.device import autocast
from ddpm_core.sampling.images import Pixels
from ddpm_core.training.timing import Timed, timed

WARMUP = 500  # steps
LEARNING_RATE = 1e-4
BETAS = (0.95, 0.999)
WEIGHT_DECAY = 1e-6
MAX_DECAY = 0.9999  # of the average


class Reference:
    """A training in progress."""

    def __init__(
        self, network: Network, data: PackedDataset, steps: int, seed: int, device: torch.device
    ) -> None:
        torch.manual_seed(seed)
        self._network, self._data, self._steps, self._device = network, data, steps, device
        self._precision = "bf16" if device.type == "cuda" else "fp32"
        self._model = theirs.unet(network).train().to(device)
        self._scheduler = DDPMScheduler()
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY
        )
        self._rate = get_scheduler(
            "cosine", self._optimizer, num_warmup_steps=WARMUP, num_training_steps=steps
        )
        self._ema = EMAModel(
            self._model.parameters(), MAX_DECAY, use_ema_warmup=True, inv_gamma=1.0, power=3 / 4
        )
        self._batches = self._endless()

    def __call__(self, count: int) -> Timed:
        """Take `count` steps; return the mean time of one."""

        def work() -> None:
            for _ in range(count):
                self._step()

        with _their_kernels(self._device):
            found = timed(work, self._device)
        return Timed(*(seconds / count for seconds in found))

    def train(self) -> float:
        """Take all steps, and return the seconds that they took."""
        seconds = 0.0
        with progress("speedrun: diffusers", self._steps, "steps") as advance:
            for start in range(0, self._steps, 10):
                count = min(10, self._steps - start)
                seconds += count * self(count).clock
                advance(count)
        return seconds

    def images(self, count: int, steps: int, seed: int) -> Pixels:
        """Draw images with the averaged weights and DPM-Solver++; uint8 (count, H, W, C).

        The weights stay those of the average.
        """
        self._ema.copy_to(self._model.parameters())
        # Clips x0 to [-1, 1], as DDPMScheduler and ddpm do. Without, the errors of a network that
        # predicts noise grow at high noise, and distances after a short training double.
        solver = DPMSolverMultistepScheduler.from_config(self._scheduler.config, thresholding=True)
        pipeline: Any = DDPMPipeline(self._model.eval(), solver)
        pipeline.set_progress_bar_config(disable=True)
        generator, size = torch.Generator().manual_seed(seed), self._network.sample_batch
        drawn = []
        with (
            _their_kernels(self._device),
            progress("speedrun: diffusers", count, "images") as advance,
        ):
            for start in range(0, count, size):
                batch = min(size, count - start)
                given = {"num_inference_steps": steps, "output_type": "np", "generator": generator}
                floats = torch.from_numpy(pipeline(batch, **given).images)
                drawn.append((floats * 255).round().to(torch.uint8))
                advance(batch)
        return torch.cat(drawn).numpy()

    def _step(self) -> None:
        images = next(self._batches)
        noise = torch.randn(images.shape).to(self._device)
        t = torch.randint(0, len(self._scheduler.betas), (len(images),), device=self._device)
        with autocast(self._precision, self._device):
            output = self._model(self._scheduler.add_noise(images, noise, t), t).sample
        loss: Any = functional.mse_loss(output.float(), noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._rate.step()
        self._optimizer.zero_grad()
        self._ema.step(self._model.parameters())

    def _endless(self) -> Iterator[torch.Tensor]:
        """Yield batches in [-1, 1], (B, C, H, W), of epochs in random order."""
        size = min(self._network.batch, len(self._data))
        while True:
            order = torch.randperm(len(self._data))
            for start in range(0, len(order) - size + 1, size):
                pixels = torch.from_numpy(self._data.take(order[start : start + size].numpy()))
                images = pixels.permute(0, 3, 1, 2).float() / 127.5 - 1
                if self._network.config.train.flip:
                    mirrored = torch.rand(size, 1, 1, 1) < 0.5
                    images = torch.where(mirrored, images.flip(3), images)
                yield images.to(self._device)


@contextmanager
def _their_kernels(device: torch.device) -> Iterator[None]:
    """Use PyTorch's default kernels on a GPU, and those of ddpm afterwards."""
    if device.type != "cuda":
        yield
        return
    ours.use_kernels(False)
    try:
        yield
    finally:
        ours.use_kernels(True)
