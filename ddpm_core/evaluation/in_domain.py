"""A small classifier of the prepared images: the feature extractor without Inception weights.

It learns the classes or, if there are fewer than two, by which of four right angles an image was
rotated. The features come from the middle of the network, because its last layer keeps little
more than the class.

On disk it is a folder with the weights and extractor.json, which contains their checksum.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import ConfigDict, Field
from torch import Tensor, nn

from ddpm_core import rng
from ddpm_core.console import progress
from ddpm_core.data.dataset import Indices, PackedDataset
from ddpm_core.errors import Corrupt, UserError
from ddpm_core.evaluation.features import Extractor
from ddpm_core.models.layers import Conv2d, Linear
from ddpm_core.rng import Key, Purpose
from ddpm_core.runtime.adam import Adam
from ddpm_core.sampling.images import to_model
from ddpm_core.storage import sha256_of
from ddpm_core.storage.files import (
    Count,
    Schema,
    as_model,
    read_object,
    read_tensors,
    save_tensors,
)

RECIPE = 1  # increase it when a change gives a different extractor for the same images
LARGEST = 64  # pixels per side; larger images are averaged down to it
BATCH = 64
EPOCHS = 10
STEPS = (250, 600)  # minimum and maximum, for at least 400 images
PASSES = 40  # epochs over fewer images; more took minutes and gave no better distances
FEWEST = 25  # steps; batch norm needs as many for its statistics
LEARNING_RATE = 3e-3
SPREAD = 100.0  # total variance of the features on the training set
FLAT = 1e-10  # a total variance below it is rounding noise
ROTATIONS = 4
MEASURED_ON = 2000  # images
_WEIGHTS_STREAM = 1  # random stream of the initial weights; stream 0 orders the images

WEIGHTS = "extractor.safetensors"
FACTS = "extractor.json"

_SAME = (
    "The training images are all the same, or a network cannot distinguish them. Scores require "
    "images that differ. Look at the prepared images (data/contact.png), and set another "
    "prepare.source."
)


class Facts(Schema):
    """The content of extractor.json. Earlier versions wrote fewer fields."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    sha256: str = ""  # of the weights; "": not saved yet
    recipe: Count | None = None
    steps: Count | None = None
    channels: Literal[1, 3]
    image_size: Annotated[int, Field(ge=4, le=2**16)]
    outputs: Annotated[int, Field(ge=1, le=2**20)]
    task: Literal["classes", "rotations"]
    accuracy: float | None
    holdout_count: Count | None = None
    holdout_fingerprint: str | None = None
    data_fingerprint: str | None = None

    def plain(self) -> dict[str, Any]:
        """Return the fields that were given, without the checksum of the weights."""
        return self.model_dump(exclude_unset=True, exclude={"sha256"})


class Network(nn.Module):
    """A convolutional network with batch norm, from about 16x16 down to 4x4 pixels.

    GroupNorm would remove the contrast of each image from the features.
    """

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
        """Map float (B, C, H, W) in [-1, 1] to features (B, 128) and logits (B, K).

        Features are the spatial means of two layers, 64 channels each, shifted and scaled by
        `_standardise`.
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
    """A trained network, and its shape, task, accuracy and data."""

    network: Network
    facts: Facts

    def extractor(self, fingerprint: str, device: torch.device) -> Extractor:
        """Return the network as an extractor on a device."""
        network = self.network.to(device).eval().requires_grad_(False)

        def run(pixels: Tensor) -> tuple[Tensor, Tensor | None]:
            with torch.no_grad():
                features, logits = network(to_model(pixels.to(device)))
            # The inception score is about classes, so rotations give it no logits.
            return features.cpu(), logits.cpu() if self.facts.task == "classes" else None

        return Extractor(
            "in_domain", "in_domain", fingerprint, run, self.facts.accuracy, self.facts.plain()
        )


def train_extractor(
    train: PackedDataset, holdout: PackedDataset, seed: int = 0, steps: int | None = None
) -> InDomain:
    """Train on the CPU and measure the accuracy on held-out images.

    Every random draw depends on `seed`. It is not the seed of the run, so that a data set has one
    extractor.

    Raises:
        UserError: the training images are all the same.
    """
    _must_differ(train)
    rotated = len(train.classes) < 2
    network = Network(
        train.channels, train.image_size, ROTATIONS if rotated else len(train.classes)
    )
    key = rng.key(Purpose.EVALUATE, seed)
    _initialise(network, key)
    steps = steps or steps_for(len(train))
    # The CPU, even if there is a GPU: the same data give the same weights on every machine.
    with _one_thread():
        _fit(network, train, rotated, steps, key)
        _standardise(network, train, key)
    facts = Facts(
        recipe=RECIPE,
        task="rotations" if rotated else "classes",
        outputs=network.head.out_features,
        channels=train.manifest.channels,
        image_size=train.image_size,
        steps=steps,
        accuracy=accuracy(network, holdout, rotated),
        holdout_count=len(holdout),
        holdout_fingerprint=holdout.fingerprint,
        data_fingerprint=train.fingerprint,
    )
    return InDomain(network, facts)


def steps_for(count: int) -> int:
    """Return the number of training steps, with 64 images each, for `count` images.

    10 epochs, but at least 250 and at most 600 steps. Fewer than 400 images get 40 epochs
    instead, in at least 25 steps.
    """
    epochs = min(max(EPOCHS * count // BATCH, STEPS[0]), STEPS[1])
    return min(epochs, max(PASSES * count // BATCH, FEWEST))


def _must_differ(data: PackedDataset) -> None:
    """Raise UserError if all images are the same; stops reading at the first that differs."""
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
    """Use one thread: sums over several threads round differently, and so would the weights."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
def _initialise(network: Network, key: Key) -> None:
    """Draw weights uniformly with variance 2 / fan-in, He et al. (2015)."""
    for index, (name, weight) in enumerate(network.named_parameters()):
        if weight.dim() > 1:
            limit = math.sqrt(6 / weight[0].numel())
            numbers = rng.uniform(key, torch.tensor([index]), weight.shape, stream=_WEIGHTS_STREAM)[
                0
            ]
            weight.copy_((2 * numbers - 1) * limit)
        elif name == "head.bias":
            weight.zero_()


def _fit(network: Network, data: PackedDataset, rotated: bool, steps: int, key: Key) -> None:
    """Train with Adam and a learning rate that falls from LEARNING_RATE to 0 along a cosine."""
    optimizer = Adam(network.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    order = _order(len(data), BATCH // ROTATIONS if rotated else BATCH, key)
    network.train()
    with torch.enable_grad(), progress("evaluate: in-domain classifier", steps, "steps") as advance:
        for _ in range(steps):
            x, labels = _examples(data, next(order), rotated)
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(network(x)[1], labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            advance()
    network.eval()


def _order(count: int, size: int, key: Key) -> Iterator[Indices]:
    """Yield `size` indices at a time, without end; each image comes once per epoch."""
    rest = np.empty(0, np.int64)
    for epoch in itertools.count():
        rest = np.concatenate([rest, rng.permutation(key, count, epoch).numpy()])
        while len(rest) >= size:
            yield rest[:size]
            rest = rest[size:]


def _examples(data: PackedDataset, indices: Indices, rotated: bool) -> tuple[Tensor, Tensor]:
    """Return images and their classes, or each image at four angles and the angles' numbers."""
    x = to_model(torch.from_numpy(data.take(indices)))
    if not rotated:
        return x, torch.from_numpy(data.labels[indices].astype(np.int64))
    angles = torch.cat([torch.rot90(x, turn, (2, 3)) for turn in range(ROTATIONS)])
    return angles, torch.arange(ROTATIONS).repeat_interleave(len(x))


@torch.no_grad()
def _standardise(network: Network, data: PackedDataset, key: Key) -> None:
    """Scale the features to mean 0 and, for each of the two layers, a variance of SPREAD / 2.

    The layers' own scales are accidents of training. Raises UserError for features without
    variance.
    """
    indices = rng.permutation(key, len(data), epoch=0)[:MEASURED_ON].numpy()
    rows = torch.cat([network(_examples(data, some, False)[0])[0] for some in _batches(indices)])
    spreads = rows.var(0).nan_to_num().view(2, -1).sum(1)
    if spreads.min() < FLAT:
        raise UserError(_SAME)
    network.offset.copy_(rows.mean(0))
    network.scale.copy_((SPREAD / 2 / spreads).sqrt().repeat_interleave(len(network.scale) // 2))


@torch.no_grad()
def accuracy(network: Network, holdout: PackedDataset, rotated: bool) -> float | None:
    """Return the share of held-out images that are classified correctly; None without images."""
    right = total = 0
    for indices in _batches(np.arange(len(holdout))):
        x, labels = _examples(holdout, indices, rotated)
        right += int((network(x)[1].argmax(1) == labels).sum())
        total += len(labels)
    return right / total if total else None


def _batches(indices: Indices) -> list[Indices]:
    return [indices[start : start + BATCH] for start in range(0, len(indices), BATCH)]


def save_extractor(trained: InDomain, folder: Path) -> None:
    """Write weights and facts into an existing folder."""
    save_tensors(trained.network.state_dict(), folder / WEIGHTS)
    facts = {**trained.facts.plain(), "sha256": sha256_of(folder / WEIGHTS)}
    (folder / FACTS).write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n", "utf-8")


def read_facts(folder: Path) -> Facts:
    """Return the facts of a saved extractor. Raises Corrupt if its weights have changed."""
    try:
        facts = as_model(read_object(folder / FACTS, FACTS), Facts, FACTS)
        unchanged = sha256_of(folder / WEIGHTS) == facts.sha256
    except (OSError, Corrupt) as error:
        raise Corrupt(f"The in-domain extractor in {folder} is corrupt: {error!r}.") from error
    if not unchanged:
        raise Corrupt(f"{folder / WEIGHTS} is corrupt: its checksum does not match {FACTS}.")
    return facts


def load_extractor(folder: Path) -> tuple[InDomain, str]:
    """Return a saved network with its facts, and its fingerprint. Raises Corrupt."""
    facts = read_facts(folder)
    tensors = read_tensors(folder / WEIGHTS)
    head = tensors.get("head.weight")
    if head is None or len(head.shape) != 2 or len(head) != facts.outputs:
        raise Corrupt(f"The in-domain extractor in {folder} is corrupt: its head does not match.")
    network = Network(facts.channels, facts.image_size, facts.outputs)
    try:
        network.load_state_dict(tensors)
    except RuntimeError as error:
        raise Corrupt(f"The in-domain extractor in {folder} is corrupt: {error}.") from error
    return InDomain(network.eval(), facts), facts.sha256[:16]
