"""The networks that the benchmarks compare, as settings of ddpm."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ddpm_core.config import Config


@dataclass(frozen=True)
class Network:
    """A network and its workload: settings, image channels, and `steps` updates per sampling."""

    name: str
    config: Config
    channels: int
    steps: int

    @property
    def classes(self) -> list[str]:
        """No classes: the networks are unconditional."""
        return []

    @property
    def image_size(self) -> int:
        return self.config.prepare.image_size

    @property
    def batch(self) -> int:
        return self.config.train.batch_size

    @property
    def sample_batch(self) -> int:
        return self.config.sample.batch_size


def resized(network: Network, batch: int | None) -> Network:
    """Return the network with another batch size for training and sampling; None keeps its own."""
    if batch is None:
        return network
    config = network.config.model_copy(
        update={
            "train": network.config.train.model_copy(update={"batch_size": batch}),
            "sample": network.config.sample.model_copy(update={"batch_size": batch}),
        }
    )
    return replace(network, config=config)


def ho(steps: int) -> Network:
    """Return Ho's network for CIFAR-10 (35.7M weights) with his recipe, in batches for a CPU."""
    settings: dict[str, Any] = {
        "prepare": {"image_size": 32},
        "model": {
            "channels": 128,
            "multipliers": [1, 2, 2, 2],
            "blocks": 2,
            "attention": [16],
            "dropout": 0.1,
        },
        "diffusion": {"schedule": "linear", "prediction": "noise"},
        "train": {
            "batch_size": 8,
            "optimizer": {"lr": 2e-4, "warmup": 5000},
            "ema": [0.9999],
            "loss": {"weighting": "uniform"},
        },
        "sample": {"sampler": "ddpm", "steps": steps, "batch_size": 8},
    }
    return Network("ho", Config.model_validate(settings), channels=3, steps=steps)


def digits(steps: int) -> Network:
    """Return the larger network for 16x16 digits: 1.6M weights, in batches of 64."""
    settings = {
        "model": {"channels": 32, "multipliers": [1, 2, 2], "blocks": 2},
        "train": {"batch_size": 64},
        "sample": {"sampler": "ddpm", "steps": steps, "batch_size": 64},
    }
    return Network("digits", Config.model_validate(settings), channels=1, steps=steps)


def demo(steps: int) -> Network:
    """Return the network of `ddpm run` with default settings."""
    settings = {"sample": {"sampler": "ddpm", "steps": steps}}
    return Network("demo", Config.model_validate(settings), channels=1, steps=steps)


NETWORKS = {"ho": ho, "digits": digits, "demo": demo}
