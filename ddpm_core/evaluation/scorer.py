"""All scores of one set of images against one data set, and the same scores of held-out images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ddpm_core.config import Config, Evaluate
from ddpm_core.console import progress
from ddpm_core.data.dataset import PackedDataset, open_dataset
from ddpm_core.errors import UserError
from ddpm_core.evaluation import memorisation, metrics
from ddpm_core.evaluation.features import (
    KEPT,
    PCA_IMAGES,
    Extractor,
    Features,
    PixelPCA,
    extract,
    in_batches,
    shuffled,
)
from ddpm_core.evaluation.inception import open_inception
from ddpm_core.evaluation.memorisation import Neighbours
from ddpm_core.evaluation.reference import Reference, open_neighbours, open_reference
from ddpm_core.evaluation.shared import open_in_domain
from ddpm_core.evaluation.weights import extractor_name, locate
from ddpm_core.runtime.device import choose_device
from ddpm_core.sampling.images import Pixels
from ddpm_core.scores import (
    COUNTS,
    MEASURES,
    Collapse,
    Measurement,
    Memorisation,
    Scores,
    metric_name,
)
from ddpm_core.storage.workspace import Workspace


class Scorer:
    """Data set, extractor and references, each opened on first use."""

    def __init__(self, config: Config, workspace: Workspace) -> None:
        self.settings: Evaluate = config.evaluate
        self.device = choose_device(config.device)
        self.train: PackedDataset = open_dataset(workspace)
        self.holdout: PackedDataset = open_dataset(workspace, "holdout")
        if len(self.train) < 2:
            raise UserError(
                f"The data set has {len(self.train)} training images; scores require at least 2. "
                "Prepare more images."
            )
        self._config, self._workspace = config, workspace
        self._floors: dict[int, Scores] = {}
        self._real_distances: dict[tuple[int | str, ...], NDArray[np.float64]] = {}

    @property
    def checks_memorisation(self) -> bool:
        """Whether memorisation and collapse are measured."""
        return "memorisation" in self.settings.metrics

    @cached_property
    def extractor(self) -> Extractor:
        if extractor_name(self.settings) == "in_domain":
            return open_in_domain(
                self._config, self._workspace, self.train, self.holdout, self.device
            )
        weights = locate(self.settings.inception_weights or "", self._workspace)
        return open_inception(weights, self.device)

    @cached_property
    def reference(self) -> Reference:
        return open_reference(self._workspace, self.extractor, self.train, self.holdout)

    @cached_property
    def pixels(self) -> Reference:
        """The reference in a second, untrained feature space."""
        images = self.train.take(shuffled(len(self.train), PCA_IMAGES))
        space = PixelPCA.fit(torch.from_numpy(images)).extractor()
        return open_reference(self._workspace, space, self.train, self.holdout)

    @cached_property
    def held_out(self) -> tuple[Pixels, Neighbours]:
        """At most 2,000 held-out images, and their nearest training images."""
        return open_neighbours(self._workspace, self.train, self.holdout, self.device)

    @property
    def _has_frechet(self) -> bool:
        return "fid" in self.settings.metrics

    def score_name(self, count: int) -> str:
        """Return the name of the score that ranks: the Fréchet, otherwise the kernel distance."""
        if self._has_frechet:
            return metric_name("fd", self.extractor.space, count)
        return metric_name("kid", self.extractor.space, min(count, KEPT))

    def score(self, arrays: Sequence[Pixels], name: str = "samples") -> Measurement:
        """Measure at least 2 images, given as uint8 arrays (n, H, W, C).

        In the result, `floor` has the scores of `floor_count` held-out images, and `at_floor` those
        of as many of the given images: only scores of equally many images can be compared.
        """
        count = sum(len(array) for array in arrays)
        spaces = [self.reference.extractor, self.pixels.extractor]
        with progress(f"evaluate: {name}", len(spaces) * count, "images") as advance:
            features, pixels = [extract(space, in_batches(arrays), advance) for space in spaces]
        # The bias of most scores depends on the count, so samples and held-out images are also
        # compared at the count that both have.
        n = min(count, len(self.reference.holdout.kept), KEPT)
        scores = self._measure(features, pixels)
        return Measurement(
            **scores,
            score_name=self.score_name(count),
            score=scores["fd" if self._has_frechet else "kid_mean"],
            floor_count=n if n > 1 else 0,
            floor=self.floor(n) if n > 1 else None,
            at_floor=self._first(n, features, pixels, scores) if n > 1 else None,
        )

    def _first(self, count: int, features: Features, pixels: Features, scores: Scores) -> Scores:
        """Return the scores of the first `count` images; `scores` are those of all images."""
        if features.moments and features.moments.count == count:
            return scores
        return self._measure(features.first(count), pixels.first(count))

    def floor(self, count: int) -> Scores:
        """Return the scores of the first `count` held-out images: those of a perfect generator."""
        if count not in self._floors:
            self._floors[count] = self._measure(
                self.reference.holdout.first(count), self.pixels.holdout.first(count)
            )
        return self._floors[count]

    def memorisation(self, images: Pixels) -> tuple[Memorisation, Neighbours]:
        """Compare at most 2,000 images with the held-out images; see `memorisation.compare`."""
        _, held = self.held_out
        found = memorisation.nearest(images[: memorisation.EXAMINED], self.train, self.device)
        return memorisation.compare(found.distance, held.distance), found

    def collapse(self, images: Pixels, sampler: Mapping[str, Any]) -> Collapse:
        """Compare at most 2,000 images with as many training images of the same classes.

        `sampler` has the settings that the images were drawn with. With chosen prompts the verdict
        is `unknown`: no training images belong to them.
        """
        order, classes = shuffled(len(self.train)), tuple(sampler.get("classes") or ())
        if classes:
            labels = [i for i, name in enumerate(self.train.classes) if name in classes]
            order = order[np.isin(self.train.labels[order], labels)]
        count = min(len(images), len(order), memorisation.EXAMINED)
        if count < memorisation.FEWEST or sampler.get("prompts"):
            return Collapse(count=count, verdict="unknown")
        key = (count, *classes)
        if key not in self._real_distances:
            real = self.train.take(order[:count])
            self._real_distances[key] = memorisation.nearest_other(real, self.device).distance
        found = memorisation.nearest_other(images[:count], self.device)
        return memorisation.compare_repeats(found.distance, self._real_distances[key])

    def _measure(self, features: Features, pixels: Features) -> Scores:
        wanted, k = self.settings.metrics, self.settings.neighbours
        train = self.reference.train
        scores: dict[str, Any] = dict.fromkeys((*MEASURES, *COUNTS.values()))
        if features.moments and pixels.moments and "fid" in wanted:
            scores["fd"] = metrics.frechet_distance(features.moments, _moments(train))
            if pixels.kept.shape[1]:  # images that are all the same have no components
                real = _moments(self.pixels.train)
                scores["fd_pixel_pca"] = metrics.frechet_distance(pixels.moments, real)
        if "kid" in wanted:
            pair = metrics.kernel_distance(features.kept, train.kept)
            scores["kid_mean"], scores["kid_std"] = pair
            scores["kid_count"] = len(features.kept)
        logits = features.logits
        if "is" in wanted and logits is not None and len(logits) >= metrics.FEWEST_FOR_IS:
            scores["is_mean"], scores["is_std"] = metrics.inception_score(logits)
        # All four depend on both counts, so use as many samples as real images.
        n = min(len(features.kept), len(train.kept))
        if "prdc" in wanted and n > k:
            sets = (features.kept[:n], train.kept[:n])
            scores["prdc_count"] = n
            scores["precision"], scores["recall"] = metrics.precision_recall(*sets, k)
            scores["density"], scores["coverage"] = metrics.density_coverage(*sets, k)
        return Scores(**scores)


def _moments(features: Features) -> metrics.Moments:
    if features.moments is None:
        raise ValueError("the reference has fewer than two images")
    return features.moments
