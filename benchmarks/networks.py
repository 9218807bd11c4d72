"""The networks that are compared, as our params describe them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ddpm_core.config import Config


@dataclass(frozen=True)
class Network:
    """A network with its work: images of a size in batches, `steps` updates of a sampling chain."""

    name: str
    config: Config
    channels: int
    steps: int

    @property
    def classes(self) -> list[str]:
        """None of them is conditional."""
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
    """The network with batches of another size, to train and to sample; of its own if None."""
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
    """Ho's 35.7M network for CIFAR-10 with his recipe, in batches that suit a CPU."""
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
    """The larger of the networks for digits, 16x16: 1.6M weights in batches of 64."""
    settings = {
        "model": {"channels": 32, "multipliers": [1, 2, 2], "blocks": 2},
        "train": {"batch_size": 64},
        "sample": {"sampler": "ddpm", "steps": steps, "batch_size": 64},
    }
    return Network("digits", Config.model_validate(settings), channels=1, steps=steps)


def demo(steps: int) -> Network:
    """The network of `ddpm run` with its defaults."""
    settings = {"sample": {"sampler": "ddpm", "steps": steps}}
    return Network("demo", Config.model_validate(settings), channels=1, steps=steps)


NETWORKS = {"ho": ho, "digits": digits, "demo": demo}
