"""What is known when settings are chosen: the images, the machine, the network and the time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ddpm_core.config import Sample, Train
from ddpm_core.data.check import DataReport, class_totals
from ddpm_core.evaluation.in_domain import BATCH, steps_for
from ddpm_core.setup.machine import Measured
from ddpm_core.setup.mirror import Mirror
from ddpm_core.setup.networks import Network

NIGHT = 8 * 3600.0  # seconds; without --time, training that gets the most out of a network
START = 20.0  # seconds to start the verbs, to plot, and to register a model
SAMPLING = 0.15  # share of sampling in the time of training and sampling
BESIDE_STEPS = 1.05  # snapshots, moments of the images, the log
PASSES = 4000  # over the images; the presets have up to 3,200
FEATURES = 1 / 3  # time of an image's features, of that of training the classifier on it
# Checkpoints, and the images that each must get; otherwise there are fewer checkpoints.
CHECKPOINTS = ((10, 1000), (4, 200), (2, 100))
FEWEST_SAMPLES = 50
COUNTS = (50, 100, 200, 500, 1000, 2000, 5000, 10_000)


@dataclass(frozen=True)
class Facts:
    """The images: a report on them, whether mirroring changes them, and the time to read them."""

    report: DataReport
    mirror: Mirror
    seconds: float

    @cached_property
    def classes(self) -> dict[str, int]:
        """Return the number of images of each class."""
        return class_totals(self.report)

    @cached_property
    def training(self) -> int:
        """Return the number of training images, about."""
        splits = {name: sum(counts.values()) for name, counts in self.report.splits.items()}
        held_out = splits.get("holdout", 0)
        undecided = splits.get("undecided", 0)
        return max(1, self.report.count - held_out - round(0.1 * undecided))

    @cached_property
    def gray(self) -> bool:
        """Return whether the images of the sample have no colors."""
        squares = self.report.squares
        return bool(len(squares)) and bool((squares == squares[..., :1]).all())


@dataclass(frozen=True)
class Plan:
    """A network for the images, measured on this machine, and the time for the run.

    Attributes:
        given: The settings that the user fixed, by dotted name.
        time: Seconds for the whole run; None: as many as the network takes.
        memory, gpus: Free bytes of the device, and the number of GPUs.
        classifier: Seconds to train evaluate's classifier on one image.
        larger, wider: Why the next larger size and the next wider network were not chosen.
    """

    facts: Facts
    size: int
    network: Network
    measured: Measured
    time: float | None = None
    memory: float = math.inf
    gpus: int = 0
    device: str = "cpu"
    classifier: float = 0.0
    larger: str = ""
    wider: str = ""
    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        """Return the images per step."""
        chosen = min(self.network.batch, max(1, self.facts.training // 4))
        return int(self.given.get("train.batch_size", chosen))

    @property
    def microbatches(self) -> int:
        """Return the parts in which a batch fits in the memory."""
        return self.measured.microbatches(self.batch, self.memory) or self.batch

    # Time

    @property
    def other_seconds(self) -> float:
        """Return the time of all that is neither training nor sampling."""
        training, count = self.facts.training, self.facts.report.count
        learned = steps_for(training) * BATCH
        return START + self.facts.seconds + self.classifier * (learned + FEATURES * count)

    @property
    def available(self) -> float:
        """Return the time for training, if sampling takes all of its share."""
        if self.time is None:
            return self.network.enough / self.batch * self.measured.step * BESIDE_STEPS
        return (1 - SAMPLING) * (self.time - self.other_seconds)

    def seconds_for(self, images: int) -> float:
        """Return the time to train on `images` images."""
        return images / self.batch * self.measured.step * BESIDE_STEPS

    @property
    def fits(self) -> bool:
        """Return whether the network fits in the memory, and its training in the time."""
        if self.measured.microbatches(self.batch, self.memory) is None:
            return False
        if self.time is None:
            return self.available <= NIGHT
        return self.seconds_for(self.network.least) <= self.available

    @property
    def times(self) -> dict[str, float]:
        """Return the estimated seconds of each verb."""
        checkpoints, count = self.samples
        scored = checkpoints * count * FEATURES * self.classifier
        previews = checkpoints * self.grid * self.seconds_of_sample
        return {
            "prepare": self.facts.seconds,
            "train": self.steps * self.measured.step * BESIDE_STEPS + previews,
            "sample": checkpoints * count * self.seconds_of_sample,
            "evaluate": self.other_seconds - self.facts.seconds - START + scored,
            "start and register": START,
        }

    # Steps and samples

    @property
    def grid(self) -> int:
        """Return the images in the preview of a checkpoint."""
        return int(self.given.get("train.grid", Train().grid))

    @property
    def seconds_of_sample(self) -> float:
        """Return the time to draw an image."""
        return self.measured.evaluation * int(self.given.get("sample.steps", Sample().steps))

    @property
    def samples(self) -> tuple[int, int]:
        """Return the number of checkpoints, and the images of each, that sampling has time for."""
        seconds = SAMPLING / (1 - SAMPLING) * self.available
        each = self.seconds_of_sample + FEATURES * self.classifier
        total = seconds / each if each else math.inf
        fitting = [n for n, least in CHECKPOINTS if total >= n * (least + self.grid)]
        checkpoints = fitting[0] if fitting else 1
        most = min(total / checkpoints - self.grid, self.facts.training)
        count = max([n for n in COUNTS if n <= most], default=FEWEST_SAMPLES)
        return checkpoints, int(self.given.get("sample.count", count))

    @property
    def steps(self) -> int:
        """Return the number of steps that the time allows, a multiple of the checkpoints."""
        return int(self.given.get("train.steps", self.milestone * self.samples[0]))

    @property
    def milestone(self) -> int:
        """Return the steps between two checkpoints, rounded down to three digits."""
        steps = self.given.get("train.steps", min(self.possible_steps, self.most_steps))
        every = max(1, int(steps / self.samples[0]))
        unit = int(10 ** max(0, len(str(every)) - 3))
        return every // unit * unit

    @property
    def possible_steps(self) -> float:
        """Return the steps that the time allows or, without a time, that are enough."""
        if self.time is None or not self.measured.step:
            return self.network.enough / self.batch
        checkpoints, count = self.samples
        scored = checkpoints * count * FEATURES * self.classifier
        drawn = checkpoints * (count + self.grid) * self.seconds_of_sample
        seconds = self.time - self.other_seconds - drawn - scored
        return max(1.0, seconds / (self.measured.step * BESIDE_STEPS))

    @property
    def most_steps(self) -> int:
        """Return the steps of PASSES passes over the training images."""
        return max(1, PASSES * self.facts.training // self.batch)

    @property
    def passes(self) -> float:
        """Return how often training sees each image."""
        return self.steps * self.batch / self.facts.training
