"""The curves of an evaluation: what they show, and their axes. Plots and report draw the same ones.

A curve has one or two lines over training steps, the values of held-out real images as horizontal
reference lines, and the best checkpoint as a mark.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ddpm_core.scores import Row, best, best_inception, count_label, metric_name
from ddpm_core.tracking.validation import BINS, key, line, trend

# Deviations, by metric, and what they are taken over.
_DEVIATIONS = {"kid_mean": ("kid_std", "100 subsets"), "is_mean": ("is_std", "10 splits")}


@dataclass(frozen=True)
class Line:
    """A named line through (x, value), with the deviation of each value if it has one."""

    name: str
    points: list[tuple[float, float]]
    deviations: list[float] = field(default_factory=list)
    dashed: bool = False


@dataclass(frozen=True)
class Reference:
    """A horizontal line: the value of held-out real images."""

    name: str
    value: float


@dataclass(frozen=True)
class Curve:
    """What one chart shows. Without lines, its scores were not measured."""

    title: str
    direction: str  # `lower is better` or `higher is better`
    lines: list[Line] = field(default_factory=list)
    references: list[Reference] = field(default_factory=list)  # one, or one per line
    equal_count: Line | None = None  # scores of as few samples as there are held-out images
    mark: tuple[float, float] | None = None  # the best checkpoint, on the first line
    note: str = ""  # what the deviations are
    limit: float | None = None  # the end of the y axis, if it is fixed
    axis: str = "training step"  # what x is
    close: bool = False  # fit the y axis to the lines, to tell them apart

    @property
    def factor(self) -> float:
        """Values that span more than this factor get a logarithmic axis."""
        return 3.0 if self.close else 20.0

    @property
    def values(self) -> list[float]:
        """All values of lines and references."""
        lines = [*self.lines, *([self.equal_count] if self.equal_count else [])]
        return [v for line in lines for _, v in line.points] + [r.value for r in self.references]


def curves(rows: Sequence[Row]) -> dict[str, Curve]:
    """Return the curves of rows whose scores can be compared, by metric."""
    return {
        "fd": _score(rows, "fd", "fd", "lower is better", best(rows)),
        "kid": _score(rows, "kid", "kid_mean", "lower is better", best(rows)),
        "precision_recall": _precision_recall(rows),
        "is": _score(rows, "is", "is_mean", "higher is better", best_inception(rows)),
    }


def loss_curves(rows: Sequence[Mapping[str, float]]) -> list[Curve]:
    """Return the losses on held-out and training images: by step, and by noise level at the end.

    `rows` are those of tracking.validation.measurements; without any there are no curves.
    """
    if not rows:
        return []
    last, parts = rows[-1], range(1, BINS + 1)
    average = "ema" if key("held_out", "ema") in last else ""
    by_step, by_level = [], []
    for split, name, dashed in (
        ("held_out", "held-out images", False),
        ("train", "training images", True),
    ):
        by_step.append(Line(name, line(rows, split), dashed=dashed))
        points = [(float(i), last[key(split, average, i)]) for i in parts]
        by_level.append(Line(name, points, dashed=dashed))
    found = trend(rows)
    mark = (float(found.lowest_step), found.lowest) if found else None
    axis = f"noise level, 1 (little) to {BINS} (much)"
    of_step = f"loss at step {last['step']:,.0f} by {axis}"
    return [
        Curve("loss on fixed images", "lower is better", by_step, mark=mark, close=True),
        Curve(of_step, "lower is better", by_level, axis=axis),
    ]


def _score(rows: Sequence[Row], metric: str, key: str, direction: str, best: Row | None) -> Curve:
    points = _points(rows, key)
    if not points:
        return Curve(metric, direction)
    count, held_out = rows[0].samples_of(key), rows[0].floor_count or 0
    deviation, parts = _DEVIATIONS.get(key, ("", ""))
    deviations = [value for _, value in _points(rows, deviation)]
    complete = len(deviations) == len(points)
    note = f"mean and deviation of {parts}" if complete else "too few images for a deviation"
    references = _references(rows, key)
    equal_count = None
    # The kernel distance is unbiased, so different counts can be compared.
    if references and held_out < count and key != "kid_mean":
        same: list[tuple[float, float]] = [
            (row.step, row.at_floor[key]) for row in rows if row.at_floor
        ]
        equal_count = Line(f"{held_out:,} samples, as many as held out", same)
    return Curve(
        title=metric_name(metric, rows[0].evidence.space, count),
        direction=direction,
        lines=[Line(f"{count:,} samples", points, deviations if complete else [])],
        references=references,
        equal_count=equal_count,
        mark=next(((s, v) for s, v in points if best and s == best.step), None),
        note=note if deviation else "",
    )


def _precision_recall(rows: Sequence[Row]) -> Curve:
    names = ("precision", "recall")
    lines = [
        Line("precision (fidelity)", _points(rows, "precision")),
        # Dashed, so that precision stays visible where both are equal.
        Line("recall (diversity)", _points(rows, "recall"), dashed=True),
    ]
    if not all(line.points for line in lines):
        return Curve("precision and recall", "higher is better")
    space = rows[0].evidence.space.replace("_", "-") or "Inception"
    count = count_label(rows[0].samples_of("precision"))
    return Curve(
        title=f"precision and recall, {space} features, {count} images",
        direction="higher is better",
        lines=lines,
        references=[r for name in names for r in _references(rows, name, f", {name}")],
        limit=1.0,
    )


def _points(rows: Sequence[Row], key: str) -> list[tuple[float, float]]:
    return [(row.step, float(row[key])) for row in rows if row.get(key) is not None]


def _references(rows: Sequence[Row], key: str, suffix: str = "") -> list[Reference]:
    floor = rows[0].floor
    if floor is None or floor[key] is None:
        return []
    return [Reference(f"{rows[0].floor_count:,} held-out real images{suffix}", float(floor[key]))]


def is_wide(values: Sequence[float], factor: float) -> bool:
    """Return whether values are positive and so wide apart that a linear axis hides the small."""
    return min(values) > 0 and max(values) / min(values) > factor


def ticks(low: float, high: float) -> list[float]:
    """Return evenly spaced round numbers, from at most `low` to at least `high`."""
    span = max(high - low, 1e-9 * max(1.0, abs(high)))
    power = 10.0 ** math.floor(math.log10(span / 4))
    # The smallest round step that divides the span into at most four parts.
    step = next(power * m for m in (1, 2, 2.5, 5, 10, 20) if span / (power * m) <= 4)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten around 0 < low < high; of many, only the powers."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1,) if len(powers) > 4 else (1, 2, 5)
    values = [float(f"{m}e{p}") for p in powers for m in factors]
    below = max((v for v in values if v <= low * (1 + 1e-9)), default=values[0])
    above = min((v for v in values if v >= high * (1 - 1e-9)), default=values[-1])
    return [v for v in values if below <= v <= above]


def label(value: float) -> str:
    """Return a short number: 0, 0.25, 12.5, 3,000."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def tick_labels(values: Sequence[float]) -> list[str]:
    """Return the labels of an axis; thousands (k) and millions (M) if it reaches 10,000."""
    if max(map(abs, values)) < 10_000:
        return [label(value) for value in values]
    return [_with_prefix(value) for value in values]


def _with_prefix(value: float) -> str:
    for power, prefix in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= power:
            return f"{value / power:.6g}{prefix}"
    return label(value)
