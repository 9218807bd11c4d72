"""Which methods differ from the baseline by more than chance: paired statistics over seeds.

Within a seed all methods start from the same weights and see the same images in the same order. So
the difference within a seed has much less noise than the difference of the means.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ERRORS = 2.0  # standard errors that a difference must exceed
SPACES = 2  # feature spaces in which it must do so

# Scores of an arm by seed, then by name.
BySeed = Mapping[int, Mapping[str, float]]


@dataclass(frozen=True)
class Difference:
    """A mean difference over paired seeds, method - baseline, and its standard error.

    `error` is None with fewer than two seeds.
    """

    mean: float
    error: float | None
    seeds: int

    @property
    def is_clear(self) -> bool:
        """Return whether the difference exceeds two standard errors."""
        return self.error is not None and abs(self.mean) > ERRORS * self.error


def paired(method: Mapping[int, float], baseline: Mapping[int, float]) -> Difference | None:
    """Return the difference of two arms in one score over the seeds that both have.

    The standard error is that of the mean of the differences, s / sqrt(n) with the sample standard
    deviation s. None if they have no seed in common.
    """
    differences = [method[seed] - baseline[seed] for seed in sorted(method) if seed in baseline]
    if not differences:
        return None
    count = len(differences)
    deviation = statistics.stdev(differences) / math.sqrt(count) if count > 1 else None
    return Difference(statistics.fmean(differences), deviation, count)


@dataclass(frozen=True)
class Contest:
    """The differences of an arm from another one by Fréchet distance; lower is better."""

    differences: dict[str, Difference]

    @property
    def better(self) -> list[str]:
        """The spaces in which the arm is clearly better."""
        return [name for name, d in self.differences.items() if d.is_clear and d.mean < 0]

    @property
    def worse(self) -> list[str]:
        """The spaces in which the arm is clearly worse."""
        return [name for name, d in self.differences.items() if d.is_clear and d.mean > 0]

    @property
    def sign(self) -> int:
        """1 if the arm wins, -1 if it loses: in two spaces or more, and in none the opposite."""
        if len(self.better) >= SPACES and not self.worse:
            return 1
        return -1 if len(self.worse) >= SPACES and not self.better else 0


def contest(arm: BySeed, other: BySeed, distances: Sequence[str]) -> Contest:
    """Compare two arms in each distance that both have."""

    def column(scores: BySeed, name: str) -> dict[int, float]:
        return {seed: found[name] for seed, found in scores.items() if name in found}

    pairs = {name: paired(column(arm, name), column(other, name)) for name in distances}
    return Contest({name: pair for name, pair in pairs.items() if pair})


@dataclass(frozen=True)
class Finding:
    """The verdict on one arm: a word, a sentence, and the level that sets its color."""

    name: str
    word: str
    detail: str
    level: str  # good, caution, bad or unknown
    contest: Contest


def judge(
    name: str,
    scores: Mapping[str, BySeed],
    baseline: str,
    controls: Sequence[str],
    distances: Sequence[str],
) -> Finding:
    """Return the verdict on an arm against the baseline.

    A win counts only if the arm also wins against each of its controls, which replay its noise
    levels without feedback.
    """
    against = contest(scores.get(name, {}), scores.get(baseline, {}), distances)
    seeds = max((d.seeds for d in against.differences.values()), default=0)
    spaces = len(against.differences)
    if seeds < 2:
        detail = "A verdict requires at least two seeds that both have finished."
        return Finding(name, "unknown", detail, "unknown", against)
    if against.sign < 0:
        detail = f"Clearly worse than {baseline} in {len(against.worse)} of {spaces} spaces."
        return Finding(name, "worse", detail, "bad", against)
    if against.sign == 0:
        clear = len(against.better), len(against.worse)
        detail = f"Clearly better in {clear[0]} and clearly worse in {clear[1]} of {spaces} spaces."
        return Finding(name, "no clear difference", detail, "unknown", against)
    detail = f"Clearly better than {baseline} in {len(against.better)} of {spaces} spaces"
    equal = [
        control
        for control in controls
        if contest(scores[name], scores.get(control, {}), distances).sign <= 0
    ]
    if equal:
        detail += f", but not clearly better than its controls: {', '.join(equal)}."
        return Finding(name, "no win", detail, "caution", against)
    detail += ", and than all of its controls." if controls else "."
    return Finding(name, "better", detail, "good", against)


def best_rate(final: Mapping[float | None, BySeed], distances: Sequence[str]) -> float | None:
    """Return the learning rate with the lowest geometric mean of all distances over its seeds.

    A rate without scores, or with fewer seeds than another one, is not chosen.
    """
    most = max(len(found) for found in final.values())

    def level(scores: BySeed) -> float:
        values = [found[name] for found in scores.values() for name in distances if name in found]
        complete = len(scores) == most and values
        return statistics.fmean(math.log(max(v, 1e-12)) for v in values) if complete else math.inf

    return min(final, key=lambda rate: level(final[rate]))
