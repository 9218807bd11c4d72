"""Score images in several feature spaces: three classifiers, pixels, and Inception with weights.

A difference between methods counts if it appears in more than one space. So the in-domain
classifier is trained with three seeds, and pixels need no training at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from ddpm_core.config import Config
from ddpm_core.console import say
from ddpm_core.data.dataset import PackedDataset, open_dataset
from ddpm_core.errors import UserError
from ddpm_core.evaluation import in_domain, metrics
from ddpm_core.evaluation.features import (
    PCA_IMAGES,
    Extractor,
    Features,
    PixelPCA,
    extract,
    in_batches,
    shuffled,
)
from ddpm_core.evaluation.inception import open_inception
from ddpm_core.evaluation.reference import open_reference
from ddpm_core.evaluation.weights import locate
from ddpm_core.runtime.device import choose_device
from ddpm_core.sampling.images import Pixels
from ddpm_core.storage.workspace import EVALUATION, Workspace, fingerprint

CLASSIFIERS = ("a", "b", "c")  # in-domain classifiers; their seeds are 0, 1, 2
FIRST = f"in_domain_{CLASSIFIERS[0]}"  # the space of KID, precision and recall
KID, PRECISION, RECALL = (f"{name}_{FIRST}" for name in ("kid", "precision", "recall"))
HIGHER_IS_BETTER = (PRECISION, RECALL)

Scores = dict[str, float]


class Spaces:
    """The feature spaces of a comparison, with the features of the real images."""

    def __init__(self, config: Config, workspace: Workspace) -> None:
        """Open the spaces; trains the classifiers that are missing. Raises UserError."""
        self.train, self.holdout = open_dataset(workspace), open_dataset(workspace, "holdout")
        if len(self.train) < 2:
            raise UserError("The data has fewer than 2 training images; scores require 2.")
        self._neighbours = config.evaluate.neighbours
        self._spaces = [
            open_reference(workspace, extractor, self.train, self.holdout)
            for extractor in _extractors(config, workspace, self.train, self.holdout)
        ]
        self._floors: dict[int, Scores] = {}

    @property
    def distances(self) -> list[str]:
        """The names of the Fréchet distances, one for each space."""
        return [_distance(space.extractor) for space in self._spaces]

    @property
    def fingerprint(self) -> str:
        """The fingerprint of everything that scores depend on apart from the images."""
        spaces = {space.extractor.name: space.extractor.fingerprint for space in self._spaces}
        data = [self.train.fingerprint, self.holdout.fingerprint]
        return fingerprint({"spaces": spaces, "data": data, "neighbours": self._neighbours})

    def score(self, arrays: Sequence[Pixels]) -> Scores:
        """Return the scores of at least 2 images by name, given as uint8 arrays (n, H, W, C)."""
        return self._measure([extract(s.extractor, in_batches(arrays)) for s in self._spaces])

    def floor(self, count: int) -> tuple[Scores, int]:
        """Return the scores of at most `count` held-out images, and how many there are.

        They are those of a perfect generator. {} if there are fewer than 2 held-out images.
        """
        count = min(count, *(len(space.holdout.kept) for space in self._spaces))
        if count < 2:
            return {}, 0
        if count not in self._floors:
            self._floors[count] = self._measure([s.holdout.first(count) for s in self._spaces])
        return self._floors[count], count

    def _measure(self, features: Sequence[Features]) -> Scores:
        scores: Scores = {}
        for space, found in zip(self._spaces, features, strict=True):
            real = space.train
            if found.moments and real.moments and found.kept.shape[1]:
                name = _distance(space.extractor)
                scores[name] = metrics.frechet_distance(found.moments, real.moments)
        rows, train = features[0].kept, self._spaces[0].train.kept
        scores[KID], _ = metrics.kernel_distance(rows, train)
        # Both depend on both counts, so use as many samples as real images.
        n, k = min(len(rows), len(train)), self._neighbours
        if n > k:
            pair = metrics.precision_recall(rows[:n], train[:n], k)
            scores[PRECISION], scores[RECALL] = pair
        return scores


def _distance(extractor: Extractor) -> str:
    return f"fd_{extractor.space}" if extractor.space else "fid"


def _extractors(
    config: Config, workspace: Workspace, train: PackedDataset, holdout: PackedDataset
) -> Iterator[Extractor]:
    device = choose_device(config.device)
    for seed, letter in enumerate(CLASSIFIERS):
        key = f"{EVALUATION}/classifier-{letter}-{train.fingerprint}"
        if not workspace.storage.exists(key):
            say(f"compare: training classifier {letter} of {len(CLASSIFIERS)} for the scores.")
            with workspace.storage.new_folder(key) as folder:
                trained = in_domain.train_extractor(train, holdout, seed)
                in_domain.save_extractor(trained, folder)
        trained, digest = in_domain.load_extractor(workspace.path(key))
        name = f"in_domain_{letter}"
        yield replace(trained.extractor(digest, device), name=name, space=name)
    pixels = torch.from_numpy(train.take(shuffled(len(train), PCA_IMAGES)))
    yield PixelPCA.fit(pixels).extractor()
    if config.evaluate.inception_weights:
        yield open_inception(locate(config.evaluate.inception_weights, workspace), device)
