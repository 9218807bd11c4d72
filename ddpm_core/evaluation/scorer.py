"""All scores of one set of images against one data set, and the same of held-out images."""

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
from ddpm_core.evaluation import collapse, memorisation, metrics, pixel_pca
from ddpm_core.evaluation.features import Extractor, chosen
from ddpm_core.evaluation.held_out import open_held_out
from ddpm_core.evaluation.inception import open_inception
from ddpm_core.evaluation.memorisation import Neighbours
from ddpm_core.evaluation.metrics import metric_name
from ddpm_core.evaluation.reference import Reference, open_reference
from ddpm_core.evaluation.rows import COUNTS, MEASURES
from ddpm_core.evaluation.shared import open_in_domain
from ddpm_core.evaluation.statistics import KEPT, Features, batches, extract, shuffled
from ddpm_core.evaluation.weights import locate
from ddpm_core.runtime.device import choose_device
from ddpm_core.sampling.images import Pixels
from ddpm_core.storage.workspace import Workspace

Scores = dict[str, Any]  # metric -> number, or None where it is not measured


class Scorer:
    """The data set, the extractor and the references; each is opened when first needed."""

    def __init__(self, config: Config, workspace: Workspace) -> None:
        self.settings: Evaluate = config.evaluate
        self.device = choose_device(config.device)
        self.train: PackedDataset = open_dataset(workspace)
        self.holdout: PackedDataset = open_dataset(workspace, "holdout")
        if len(self.train) < 2:
            raise UserError(f"Scores need 2 training images; there are {len(self.train)}.")
        self._config, self._workspace = config, workspace
        self._floors: dict[int, Scores] = {}
        self._apart: dict[tuple[int | str, ...], NDArray[np.float64]] = {}

    @property
    def remembers(self) -> bool:
        """Whether memorisation and collapse are looked at."""
        return "memorisation" in self.settings.metrics

    @cached_property
    def extractor(self) -> Extractor:
        if chosen(self.settings) == "in_domain":
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
        some = self.train.take(shuffled(len(self.train), pixel_pca.IMAGES))
        space = pixel_pca.fit(torch.from_numpy(some)).extractor()
        return open_reference(self._workspace, space, self.train, self.holdout)

    @cached_property
    def held_out(self) -> tuple[Pixels, Neighbours]:
        """Held-out images, at most 2,000, and their nearest training images."""
        return open_held_out(self._workspace, self.train, self.holdout, self.device)

    @property
    def _is_frechet(self) -> bool:
        return "fid" in self.settings.metrics

    def score_name(self, count: int) -> str:
        """Of the score that counts: the Fréchet distance, without it the kernel distance."""
        if self._is_frechet:
            return metric_name("fd", self.extractor.space, count)
        return metric_name("kid", self.extractor.space, min(count, KEPT))

    def score(self, arrays: Sequence[Pixels], name: str = "samples") -> Scores:
        """Scores of at least 2 images, uint8 arrays (n, H, W, C) one after the other.

        `score` is the one that `score_name` names. `floor` are the scores of held-out images, as
        many as `floor_count`, and `at_floor` those of as many of the images given: only equal
        numbers compare.
        """
        count = sum(len(array) for array in arrays)
        spaces = [self.reference.extractor, self.pixels.extractor]
        with progress(f"evaluate: {name}", len(spaces) * count, "images") as advance:
            features, plain = [extract(space, batches(arrays), advance) for space in spaces]
        n = min(count, len(self.reference.holdout.kept), KEPT)
        scores = self._measure(features, plain)
        return {
            "score_name": self.score_name(count),
            "score": scores["fd" if self._is_frechet else "kid_mean"],
            **scores,
            "floor_count": n if n > 1 else 0,
            "floor": self.floor(n) if n > 1 else None,
            "at_floor": self._at(n, features, plain, scores) if n > 1 else None,
        }

    def _at(self, count: int, features: Features, plain: Features, scores: Scores) -> Scores:
        if features.moments and features.moments.count == count:
            return scores
        return self._measure(features.first(count), plain.first(count))

    def floor(self, count: int) -> Scores:
        """Scores of the first `count` held-out images: what a perfect generator would get."""
        if count not in self._floors:
            self._floors[count] = self._measure(
                self.reference.holdout.first(count), self.pixels.holdout.first(count)
            )
        return self._floors[count]

    def memorisation(self, images: Pixels) -> tuple[Scores, Neighbours]:
        """Facts about images, at most 2,000, against all held-out ones that are looked at."""
        _, held = self.held_out
        found = memorisation.nearest(images[: memorisation.EXAMINED], self.train, self.device)
        return memorisation.compare(found.distance, held.distance), found

    def collapse(self, images: Pixels, sampler: Mapping[str, Any]) -> Scores:
        """Compare images, at most 2,000, with as many training images of the classes drawn.

        `sampler` are the settings that drew them. Of chosen prompts no training images are known.
        """
        order, drawn = shuffled(len(self.train)), tuple(sampler.get("classes") or ())
        if drawn:
            kinds = [i for i, name in enumerate(self.train.classes) if name in drawn]
            order = order[np.isin(self.train.labels[order], kinds)]
        count = min(len(images), len(order), memorisation.EXAMINED)
        if count < collapse.FEWEST or sampler.get("prompts"):
            return {"count": count, "verdict": "unknown"}
        if (count, *drawn) not in self._apart:
            real = self.train.take(order[:count])
            self._apart[count, *drawn] = memorisation.nearest_other(real, self.device).distance
        found = memorisation.nearest_other(images[:count], self.device)
        return collapse.compare(found.distance, self._apart[count, *drawn])

    def _measure(self, features: Features, plain: Features) -> Scores:
        wanted, k = self.settings.metrics, self.settings.neighbours
        train = self.reference.train
        scores: Scores = dict.fromkeys((*MEASURES, *COUNTS.values()))
        if features.moments and plain.moments and "fid" in wanted:
            scores["fd"] = metrics.frechet_distance(features.moments, _moments(train))
            if plain.kept.shape[1]:  # no component is in images that are all the same
                pixels = _moments(self.pixels.train)
                scores["fd_pixel_pca"] = metrics.frechet_distance(plain.moments, pixels)
        if "kid" in wanted:
            pair = metrics.kernel_distance(features.kept, train.kept)
            scores["kid_mean"], scores["kid_std"] = pair
            scores["kid_count"] = len(features.kept)
        logits = features.logits
        if "is" in wanted and logits is not None and len(logits) >= metrics.FEWEST_FOR_IS:
            scores["is_mean"], scores["is_std"] = metrics.inception_score(logits)
        # Equal numbers of samples and real images: all four depend on both.
        n = min(len(features.kept), len(train.kept))
        if "prdc" in wanted and n > k:
            sets = (features.kept[:n], train.kept[:n])
            scores["prdc_count"] = n
            scores["precision"], scores["recall"] = metrics.precision_recall(*sets, k)
            scores["density"], scores["coverage"] = metrics.density_coverage(*sets, k)
        return scores


def _moments(features: Features) -> metrics.Moments:
    if features.moments is None:
        raise ValueError("a reference of fewer than two images")
    return features.moments
