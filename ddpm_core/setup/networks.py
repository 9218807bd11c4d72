"""The networks that `ddpm init` chooses from, and how much training each of them takes."""

from __future__ import annotations

from dataclasses import dataclass

FEWEST_FOR_WIDE = 10_000  # training images


@dataclass(frozen=True)
class Network:
    """A network for one image size, and how it is trained.

    Attributes:
        channels, multipliers, blocks: As in the section model.
        batch: Images per step.
        lr: Learning rate.
        least: Images to train on, with repetitions, until samples show more than colors.
        enough: Images to train on until samples hardly become better.
    """

    channels: int
    multipliers: tuple[int, ...]
    blocks: int
    batch: int
    lr: float
    least: int
    enough: int

    @property
    def dropout(self) -> float:
        """Return the dropout of the presets, which have networks from 64 channels on."""
        return 0.1 if self.channels >= 64 else 0.0

    @property
    def fewest(self) -> int:
        """Return the number of training images below which the network mostly memorizes them."""
        return FEWEST_FOR_WIDE if self.channels >= 128 else 0


# Networks by image size, from the fastest on. Learning rates and `enough` of wide networks are
# those of the presets; `least` of the small ones is from the results in README.md.
NETWORKS: dict[int, tuple[Network, ...]] = {
    16: (
        Network(32, (1, 2, 2), 1, 32, 1e-3, 16_000, 100_000),
        Network(64, (1, 2, 2), 2, 64, 4e-4, 400_000, 2_000_000),
    ),
    32: (
        Network(32, (1, 2, 2), 1, 32, 1e-3, 64_000, 500_000),
        Network(64, (1, 2, 2, 2), 2, 64, 4e-4, 800_000, 5_000_000),
        Network(128, (1, 2, 2, 2), 2, 128, 2e-4, 4_000_000, 25_000_000),
    ),
    64: (
        Network(32, (1, 2, 3, 4), 1, 32, 1e-3, 250_000, 1_000_000),
        Network(64, (1, 2, 3, 4), 2, 64, 2e-4, 1_000_000, 2_500_000),
        Network(128, (1, 2, 2, 2), 2, 128, 2e-4, 8_000_000, 25_000_000),
    ),
    128: (
        Network(64, (1, 1, 2, 3, 4), 2, 64, 2e-4, 2_000_000, 5_000_000),
        Network(128, (1, 1, 2, 3, 4), 2, 128, 1e-4, 12_000_000, 50_000_000),
    ),
}


def networks_for(size: int) -> tuple[Network, ...]:
    """Return the networks for images of `size` pixels: those of the nearest size in NETWORKS."""
    return NETWORKS[min(NETWORKS, key=lambda known: abs(known - size))]
