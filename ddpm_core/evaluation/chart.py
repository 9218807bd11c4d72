"""The geometry of a small line chart; the template draws it as SVG in the page's own colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 420, 230
LEFT, RIGHT, TOP, BOTTOM = 44, 14, 10, 28  # margins; the left one at least
CHARACTER = 9.2  # how wide one of a label is at most: of 14.5 px, in the widest usual font


@dataclass(frozen=True)
class Line:
    """A named series of (step, value)."""

    name: str
    points: list[tuple[int, float]]
    dashed: bool = False


@dataclass(frozen=True)
class Dot:
    """A point in the picture, and what it says when pointed at."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Drawn:
    """A series as a path and dots."""

    name: str
    path: str
    dots: list[Dot]
    dashed: bool


@dataclass(frozen=True)
class Chart:
    """All that a template needs, in units of the view box WIDTH x HEIGHT."""

    title: str
    remark: str
    lines: list[Drawn]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    floors: list[tuple[str, float, str]]  # name, height, value
    mark: Dot | None
    description: str
    edges: dict[str, int]  # left, right, top, bottom
    width: int = WIDTH
    height: int = HEIGHT


def chart(
    title: str,
    remark: str,
    lines: Sequence[Line],
    floors: Sequence[tuple[str, float]],
    best: int | None,
    top: float | None = None,
) -> Chart:
    """Lines over steps, from 0 on the y axis (or from below, for negative values) to `top`.

    `floors` are names and values of level lines: one for all lines, or one for each of them.
    Without a `top`, positive values that span more than a factor of 20 are drawn on a logarithmic
    axis. `best` is the step of the first line that is marked.
    """
    steps = [step for line in lines for step, _ in line.points]
    values = [value for line in lines for _, value in line.points]
    values += [value for _, value in floors]
    logarithmic = top is None and spans(values)
    if logarithmic:
        y_ticks = log_ticks(min(values), max(values))
    else:
        lowest = min(values)  # a little below 0, as KID may be, needs no room
        y_ticks = ticks(lowest if lowest < -0.05 * max(values) else 0.0, top or max(values))
    scale = math.log if logarithmic else float
    low, high = scale(y_ticks[0]), scale(y_ticks[-1])
    first, last = min(steps), max(steps)
    y_labels = tick_labels(y_ticks)
    left = max(LEFT, 8 + math.ceil(CHARACTER * max(map(len, y_labels))))

    def x(step: float) -> float:
        share = (step - first) / (last - first) if last > first else 0.5
        return round(left + 8 + share * (WIDTH - left - RIGHT - 16), 1)

    def y(value: float) -> float:
        share = max(0.0, (scale(value) - low) / (high - low))
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

    def drawn(line: Line) -> Drawn:
        dots = [Dot(x(s), y(v), f"step {s:,}: {label(v)}") for s, v in line.points]
        return Drawn(line.name, "M" + " L".join(f"{d.x} {d.y}" for d in dots), dots, line.dashed)

    x_ticks = _step_ticks(first, last)
    marked = [(s, v) for s, v in lines[0].points if s == best]
    return Chart(
        title=title,
        remark=remark + (", logarithmic" if logarithmic else ""),
        lines=[drawn(line) for line in lines],
        x_ticks=list(zip(map(x, x_ticks), tick_labels(x_ticks), strict=True)),
        y_ticks=list(zip(map(y, y_ticks), y_labels, strict=True)),
        floors=[(name, y(value), label(value)) for name, value in floors],
        mark=Dot(x(marked[0][0]), y(marked[0][1]), label(marked[0][1])) if marked else None,
        description=_describe(title, lines[0]),
        edges={"left": left, "right": WIDTH - RIGHT, "top": TOP, "bottom": HEIGHT - BOTTOM},
    )


def ticks(low: float, high: float) -> list[float]:
    """Round numbers, evenly spaced, from at most `low` to at least `high`."""
    span = max(high - low, 1e-9 * max(1.0, abs(high)))
    power = 10.0 ** math.floor(math.log10(span / 4))
    step = next(power * m for m in (1, 2, 2.5, 5, 10, 20) if span / (power * m) <= 4)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def spans(values: Sequence[float]) -> bool:
    """Whether values are all positive and so far apart that a linear axis would hide the small."""
    return min(values) > 0 and max(values) / min(values) > 20


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten (of many, the powers alone) around 0 < low < high."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1,) if len(powers) > 4 else (1, 2, 5)
    values = [float(f"{m}e{p}") for p in powers for m in factors]
    below = max((v for v in values if v <= low * (1 + 1e-9)), default=values[0])
    above = min((v for v in values if v >= high * (1 - 1e-9)), default=values[-1])
    return [v for v in values if below <= v <= above]


def _step_ticks(first: int, last: int) -> list[float]:
    if first == last:
        return [float(first)]
    return [step for step in ticks(first, last) if first <= step <= last]


def label(value: float) -> str:
    """Short: 0, 0.25, 12.5, 3,000."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def tick_labels(values: Sequence[float]) -> list[str]:
    """Those of an axis, in thousands (k) and millions (M) where it goes to 10,000 or beyond."""
    if max(map(abs, values)) < 10_000:
        return [label(value) for value in values]
    return [_in_thousands(value) for value in values]


def _in_thousands(value: float) -> str:
    for power, sign in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= power:
            return f"{value / power:.6g}{sign}"
    return label(value)


def _describe(title: str, line: Line) -> str:
    (first, begin), (last, end) = line.points[0], line.points[-1]
    return f"{title}: {label(begin)} at step {first:,}, {label(end)} at step {last:,}."
