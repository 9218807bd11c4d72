"""A small classifier of the prepared images: features where no Inception weights are at hand.

It learns the classes, or, where there is one or none, by which of four right angles an image was
turned. Its features come from the middle: the last layer keeps of an image little but its class.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpm_core import rng
from ddpm_core.console import progress
from ddpm_core.data.dataset import Indices, PackedDataset
from ddpm_core.errors import UserError
from ddpm_core.evaluation.features import Extractor
from ddpm_core.models.layers import Conv2d, Linear
from ddpm_core.rng import Key, Purpose
from ddpm_core.runtime.adam import Adam
from ddpm_core.sampling.images import to_model

RECIPE = 1  # raised when the same images would give another extractor
LARGEST = 64  # pixels a side; larger images are averaged down to it
BATCH = 64
EPOCHS = 10
STEPS = (250, 600)  # the fewest and the most, of at least 400 images
PASSES = 40  # over fewer images than that; more made the distances no better, and took minutes
FEWEST = 25  # steps; the statistics of batch norm need as many
RATE = 3e-3
SPREAD = 100.0  # total variance of the features on the training set
FLAT = 1e-10  # a total variance below it is that of rounding
TURNS = 4
MEASURED_ON = 2000  # images
_WEIGHTS = 1  # stream of the initial weights; stream 0 orders the images
_SAME = (
    "The training images don't differ, or no network can tell them apart. Scores need images that "
    "differ. Look at the prepared images (data/contact.png), and choose another prepare.source."
)


class Network(nn.Module):
    """Convolutions with batch norm, from about 16x16 down to 4x4. GroupNorm would hide contrast."""

    offset: Tensor
    scale: Tensor

    def __init__(self, channels: int, image_size: int, outputs: int) -> None:
        super().__init__()
        halvings = max(0, round(math.log2(min(image_size, LARGEST) / 16)))
        strides = [2] * halvings or [1]
        widths = [channels] + [32] * len(strides)
        self.stem = nn.Sequential(
            *(_block(*pair) for pair in zip(widths, widths[1:], strides, strict=False))
        )
        self.middle = nn.Sequential(_block(32, 64, 2), _block(64, 64, 1))
        self.late = _block(64, 64, 2)
        self.last = _block(64, 96, 1)
        self.head = Linear(96, outputs)
        self.register_buffer("offset", torch.zeros(128))
        self.register_buffer("scale", torch.ones(128))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """float (B, C, H, W) in [-1, 1] to features (B, 128) and logits (B, K).

        Features are the means over the image of two layers, 64 channels each, shifted and scaled
        as `_standardise` has set.
        """
        if max(x.shape[2:]) > LARGEST:
            x = F.adaptive_avg_pool2d(x, LARGEST)
        middle = self.middle(self.stem(x))
        late = self.late(middle)
        logits = self.head(self.last(late).mean((2, 3)))
        features = torch.cat([middle.mean((2, 3)), late.mean((2, 3))], dim=1)
        return (features - self.offset) * self.scale, logits


@dataclass(frozen=True)
class InDomain:
    """A trained network and the facts that make it again: shape, task, accuracy, data."""

    network: Network
    facts: dict[str, Any]

    def extractor(self, fingerprint: str, device: torch.device) -> Extractor:
        network = self.network.to(device).eval().requires_grad_(False)

        def run(pixels: Tensor) -> tuple[Tensor, Tensor | None]:
            with torch.no_grad():
                features, logits = network(to_model(pixels.to(device)))
            # Which way up a sample is says nothing of its class.
            return features.cpu(), logits.cpu() if self.facts["task"] == "classes" else None

        return Extractor(
            "in_domain", "in_domain", fingerprint, run, self.facts["accuracy"], self.facts
        )


def train_extractor(
    train: PackedDataset, holdout: PackedDataset, seed: int = 0, steps: int | None = None
) -> InDomain:
    """Train on the CPU and measure the accuracy on held-out images.

    Every draw is keyed by `seed`, which is not the run's: one data set has one extractor.

    Raises:
        UserError: the training images don't differ.
    """
    _must_differ(train)
    turned = len(train.classes) < 2
    network = Network(train.channels, train.image_size, TURNS if turned else len(train.classes))
    key = rng.key(Purpose.EVALUATE, seed)
    _initialise(network, key)
    steps = steps or steps_for(len(train))
    with _one_thread():
        _fit(network, train, turned, steps, key)
        _standardise(network, train, key)
    return InDomain(
        network,
        {
            "recipe": RECIPE,
            "task": "rotations" if turned else "classes",
            "outputs": network.head.out_features,
            "channels": train.channels,
            "image_size": train.image_size,
            "steps": steps,
            "accuracy": accuracy(network, holdout, turned),
            "holdout_count": len(holdout),
            "holdout_fingerprint": holdout.fingerprint,
            "data_fingerprint": train.fingerprint,
        },
    )


def steps_for(count: int) -> int:
    """Return how many steps of 64 to train on `count` images: 10 epochs, within 250 to 600 steps.

    Fewer than 400 images are seen 40 times each instead, in at least 25 steps.
    """
    epochs = min(max(EPOCHS * count // BATCH, STEPS[0]), STEPS[1])
    return min(epochs, max(PASSES * count // BATCH, FEWEST))


def _must_differ(data: PackedDataset) -> None:
    """Raise UserError if all images are the same; reads as far as the first that is not."""
    first = data.images[0]
    batches = (data.images[start : start + BATCH] for start in range(0, len(data), BATCH))
    if all((images == first).all() for images in batches):
        raise UserError(_SAME)


def _block(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """So that the weights don't depend on the number of cores: sums in parts round differently."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
def _initialise(network: Network, key: Key) -> None:
    """He et al. (2015) for weights, uniform with variance 2 / fan-in; norms are the identity."""
    for index, (name, weight) in enumerate(network.named_parameters()):
        if weight.dim() > 1:
            limit = math.sqrt(6 / weight[0].numel())
            numbers = rng.uniform(key, torch.tensor([index]), weight.shape, stream=_WEIGHTS)[0]
            weight.copy_((2 * numbers - 1) * limit)
        elif name == "head.bias":
            weight.zero_()


def _fit(network: Network, data: PackedDataset, turned: bool, steps: int, key: Key) -> None:
    """Adam under one cosine from RATE to 0."""
    optimizer = Adam(network.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    order = _order(len(data), BATCH // TURNS if turned else BATCH, key)
    network.train()
    with torch.enable_grad(), progress("evaluate: in-domain classifier", steps, "steps") as advance:
        for _ in range(steps):
            x, labels = _examples(data, next(order), turned)
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(network(x)[1], labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            advance()
    network.eval()


def _order(count: int, size: int, key: Key) -> Iterator[Indices]:
    """Without end, `size` indices at a time, each image once an epoch."""
    rest = np.empty(0, np.int64)
    for epoch in itertools.count():
        rest = np.concatenate([rest, rng.permutation(key, count, epoch).numpy()])
        while len(rest) >= size:
            yield rest[:size]
            rest = rest[size:]


def _examples(data: PackedDataset, indices: Indices, turned: bool) -> tuple[Tensor, Tensor]:
    """Images and their classes, or each image at four angles and which."""
    x = to_model(torch.from_numpy(data.take(indices)))
    if not turned:
        return x, torch.from_numpy(data.labels[indices].astype(np.int64))
    angles = torch.cat([torch.rot90(x, turn, (2, 3)) for turn in range(TURNS)])
    return angles, torch.arange(TURNS).repeat_interleave(len(x))


@torch.no_grad()
def _standardise(network: Network, data: PackedDataset, key: Key) -> None:
    """Mean 0, and half of SPREAD for each layer: their own scales are accidents of training.

    Raises UserError where there is no spread to scale.
    """
    indices = rng.permutation(key, len(data), epoch=0)[:MEASURED_ON].numpy()
    rows = torch.cat([network(_examples(data, some, False)[0])[0] for some in _cut(indices)])
    spreads = rows.var(0).nan_to_num().view(2, -1).sum(1)
    if spreads.min() < FLAT:
        raise UserError(_SAME)
    network.offset.copy_(rows.mean(0))
    network.scale.copy_((SPREAD / 2 / spreads).sqrt().repeat_interleave(len(network.scale) // 2))


@torch.no_grad()
def accuracy(network: Network, holdout: PackedDataset, turned: bool) -> float | None:
    """The share of held-out images that are told right; None where there are none."""
    right = total = 0
    for indices in _cut(np.arange(len(holdout))):
        x, labels = _examples(holdout, indices, turned)
        right += int((network(x)[1].argmax(1) == labels).sum())
        total += len(labels)
    return right / total if total else None


def _cut(indices: Indices) -> list[Indices]:
    return [indices[start : start + BATCH] for start in range(0, len(indices), BATCH)]
