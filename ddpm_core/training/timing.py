"""The time and memory of training steps and of sampling, measured on made-up images."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ddpm_core.checkpoint import TrainingData
from ddpm_core.config import Config
from ddpm_core.data.captions import CAPTION_BYTES
from ddpm_core.diffusion.moments import Moments
from ddpm_core.models.unet import UNet
from ddpm_core.runtime.distributed import World
from ddpm_core.sampling.sampler import ImageSampler
from ddpm_core.training.init import ImageShape, fresh_network
from ddpm_core.training.optim import Execution
from ddpm_core.training.state import TrainState
from ddpm_core.training.step import Batch, step

EVALUATIONS = 4  # of the network, to estimate the time of sampling
# Peak memory of a step divided by the memory of the tensors that the backward pass needs. Measured
# on a CPU, 16 to 64 pixels: 0.8 to 1.4 in fp32, up to 1.8 in bf16, which has temporary copies.
WORKING_MEMORY = 2.0


class Timed(NamedTuple):
    """The seconds of some work: on the clock, and of the processor (on a GPU also on the clock)."""

    clock: float
    processor: float


def timed(work: Callable[[], object], device: torch.device) -> Timed:
    """Return the time of `work()`, until the device has finished it."""
    start, processor = time.perf_counter(), time.process_time()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    clock = time.perf_counter() - start
    return Timed(clock, time.process_time() - processor if device.type == "cpu" else clock)


def time_of_evaluation(
    config: Config, model: UNet, data: TrainingData, world: World, moments: Moments | None
) -> float:
    """Return the seconds of one evaluation of the network for one image in a batch of samples.

    `model` is changed in place for sampling. `moments` are used if the prediction depends on them.
    """
    settings = config.sample.model_copy(update={"steps": EVALUATIONS, "guide": None})
    sampler = ImageSampler(
        model.to(world.device),
        data,
        settings,
        config.diffusion,
        moments=moments if config.diffusion.uses_moments else None,
    )
    size = min(settings.batch_size, settings.count)

    def work() -> None:
        sampler.images(range(size))

    work()
    return timed(work, world.device).clock / (EVALUATIONS * size)


# Made-up images


def made_up_state(config: Config, images: ImageShape, world: World) -> TrainState:
    """Return the state of a training before its first step, without data."""
    model, _ = fresh_network(config, images)
    moments = made_up_moments(images, world.device) if config.measures_moments else None
    execution = Execution.choose(config.train, world.device)
    return TrainState.create(config, world, execution, model, moments)


def made_up_moments(images: ImageShape, device: torch.device) -> Moments:
    """Return moments of images whose values are independent, of mean 0 and variance 1."""
    shape = (images.channels, images.image_size, images.image_size)
    basis = torch.eye(images.channels)
    return Moments(torch.zeros(shape), torch.ones(shape), basis).to(device)


def made_up_batch(config: Config, images: ImageShape, count: int, device: torch.device) -> Batch:
    """Return a batch of `count` gray images, with classes or captions if the settings use them."""
    side = images.image_size
    condition = None
    if config.model.conditioning == "class":
        condition = torch.arange(count, device=device) % len(images.classes)
    elif config.model.conditioning == "text":
        condition = torch.full((count, CAPTION_BYTES), ord("a"), dtype=torch.uint8, device=device)
    pixels = torch.full((count, side, side, images.channels), 127, dtype=torch.uint8, device=device)
    return Batch(pixels, condition, torch.arange(count, device=device))


def made_up_data(images: ImageShape, conditioning: str) -> TrainingData:
    """Return the description of a data set of such images, for a sampler."""
    names = images.classes if conditioning == "class" else []
    return TrainingData(
        fingerprint="",
        classes=list(names),
        class_counts=[1] * len(names),
        captions=[("a", 1)] if conditioning == "text" else [],
        image_size=images.image_size,
        channels=3 if images.channels == 3 else 1,
        source={},
    )


def activation_bytes(state: TrainState, batches: tuple[Batch, Batch]) -> int:
    """Return the memory that each image of a training step takes, in bytes; takes two steps.

    `batches` have one and two images. The tensors that the backward pass needs are counted in
    both, because some, such as copies of the weights in bf16, do not depend on the number.
    """
    flag = torch.zeros((), device=state.world.device)
    one, two = (_saved_bytes(partial(step, state, batch, flag)) for batch in batches)
    return round(WORKING_MEMORY * max(0, two - one))


def _saved_bytes(work: Callable[[], object]) -> int:
    """Return the size of all tensors that a forward pass saves for its backward pass."""
    sizes: dict[int, int] = {}  # by address: several tensors may share their memory

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        work()
    return sum(sizes.values())
