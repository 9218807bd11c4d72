"""The training step and the sampling of ddpm, with the code of the product."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.networks import Network
from ddpm_core import rng
from ddpm_core.diffusion.moments import Moments
from ddpm_core.models.unet import UNet
from ddpm_core.runtime.device import MIN_EVALUATIONS, compiles_sampling
from ddpm_core.runtime.distributed import World
from ddpm_core.sampling.sampler import ImageSampler
from ddpm_core.training.init import initial_weights, network_config
from ddpm_core.training.optim import Execution
from ddpm_core.training.state import TrainState
from ddpm_core.training.step import Batch, step

CPU = torch.device("cpu")
_DRAWS = ("uniform", "normal", "dropout_mask")


def use_kernels(repeatable: bool) -> None:
    """Use the repeatable GPU kernels of `ddpm`, or PyTorch's defaults, as other libraries do."""
    torch.backends.cudnn.allow_tf32 = not repeatable
    torch.backends.cudnn.deterministic = repeatable
    torch.use_deterministic_algorithms(repeatable, warn_only=True)


def unet(network: Network) -> UNet:
    """Return the network with its initial weights."""
    made = UNet(network_config(network.config, network))
    initial_weights(made, network.config)
    return made


def train_state(
    network: Network, device: torch.device = CPU, moments: Moments | None = None
) -> TrainState:
    """Return the state of a run on one worker before its first step."""
    world = World(0, 1, device)
    execution = Execution.choose(network.config.train, world.device)
    return TrainState.create(network.config, world, execution, unet(network), moments)


def images(network: Network, count: int) -> torch.Tensor:
    """Return images, uint8 (count, H, W, C)."""
    shape = (count, network.image_size, network.image_size, network.channels)
    return (torch.arange(torch.Size(shape).numel()) * 37 % 256).view(shape).to(torch.uint8)


def train_step(network: Network, state: TrainState | None = None) -> Callable[[], None]:
    """Return a function that runs one step of `ddpm train`, on images in memory."""
    state = state or train_state(network)
    device = state.world.device
    pixels = images(network, network.batch).to(device)
    batch = Batch(pixels, None, torch.arange(network.batch, device=device))
    return lambda: step(state, batch, torch.zeros((), device=device))


def denoise(network: Network, device: torch.device = CPU) -> Callable[[], None]:
    """Return a function that draws one batch as `ddpm sample` does, in `network.steps` updates."""
    config = network.config
    model = unet(network).eval().requires_grad_(False).to(device)
    compiled = compiles_sampling(config.sample.compile, device, MIN_EVALUATIONS)
    sampler = ImageSampler(model, {}, config.sample, config.diffusion, compiled)

    def run() -> None:
        sampler.images(range(network.sample_batch))

    return run


@contextmanager
def timed_draws() -> Iterator[Callable[[], float]]:
    """Yield a function that returns the seconds spent on random numbers so far."""
    spent = 0.0
    originals = {name: getattr(rng, name) for name in _DRAWS}

    def timed(draw: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal spent
            started = time.perf_counter()
            drawn = draw(*args, **kwargs)
            spent += time.perf_counter() - started
            return drawn

        return run

    for name, draw in originals.items():
        setattr(rng, name, timed(draw))
    try:
        yield lambda: spent
    finally:
        for name, draw in originals.items():
            setattr(rng, name, draw)
