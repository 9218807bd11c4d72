"""The layout of a curve as a small SVG chart; the template draws it in the colours of the page."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ddpm_core.evaluation.curves import Curve, Line, is_wide, label, log_ticks, tick_labels, ticks

WIDTH, HEIGHT = 420, 230
LEFT, RIGHT, TOP, BOTTOM = 44, 14, 10, 28  # margins; the left one grows with its labels
CHARACTER = 9.2  # width of a character of 14.5 px in the widest common font


@dataclass(frozen=True)
class Dot:
    """A point, and its tooltip."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Path:
    """A line as an SVG path and dots."""

    name: str
    path: str
    dots: list[Dot]
    dashed: bool
    band: str  # the area of the deviations, "" without any


@dataclass(frozen=True)
class Chart:
    """Everything that the template needs, in units of the view box WIDTH x HEIGHT."""

    title: str
    remark: str
    lines: list[Path]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    references: list[tuple[str, float, str]]  # name, y, value
    mark: Dot | None
    description: str
    edges: dict[str, int]  # left, right, top, bottom
    width: int = WIDTH
    height: int = HEIGHT


def chart(curve: Curve) -> Chart:
    """Lay out a curve with at least one line.

    The y axis starts at 0, or at the lowest value below 0, or with `close` near the lowest value.
    Without a fixed limit, positive values that span more than a factor of 20 get a logarithmic
    axis; with `close`, a factor of 3.
    """
    lines = [*curve.lines, *([curve.equal_count] if curve.equal_count else [])]
    logarithmic, y_ticks = _y_axis(curve)
    scale = math.log if logarithmic else float
    low, high = scale(y_ticks[0]), scale(y_ticks[-1])
    steps = [step for line in lines for step, _ in line.points]
    first, last = min(steps), max(steps)
    y_labels = tick_labels(y_ticks)
    # The page may use any font, so the margin fits the labels in the widest one.
    left = max(LEFT, 8 + math.ceil(CHARACTER * max(map(len, y_labels))))

    def x(step: float) -> float:
        share = (step - first) / (last - first) if last > first else 0.5
        return round(left + 8 + share * (WIDTH - left - RIGHT - 16), 1)

    def y(value: float) -> float:
        share = max(0.0, (scale(value) - low) / (high - low))
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

    def path(line: Line) -> Path:
        several = f"{line.name}, " if len(curve.lines) > 2 else ""
        dots = [
            Dot(x(s), y(v), f"{several}{curve.axis.removeprefix('training ')} {s:,.6g}: {label(v)}")
            for s, v in line.points
        ]
        return Path(line.name, _path([(d.x, d.y) for d in dots]), dots, line.dashed, band(line))

    def band(line: Line) -> str:
        found = _with_deviations(line)
        upper = [(x(s), y(v + d)) for (s, v), d in found]
        lower = [(x(s), y(max(v - d, y_ticks[0]))) for (s, v), d in reversed(found)]
        return _path(upper + lower) if len(found) > 1 else ""

    x_ticks = [step for step in ticks(first, last) if first <= step <= last]
    x_ticks = x_ticks if first < last else [float(first)]
    mark = curve.mark
    return Chart(
        title=curve.title,
        remark=curve.direction + (", logarithmic" if logarithmic else ""),
        lines=list(map(path, lines)),
        x_ticks=list(zip(map(x, x_ticks), tick_labels(x_ticks), strict=True)),
        y_ticks=list(zip(map(y, y_ticks), y_labels, strict=True)),
        references=[(r.name, y(r.value), label(r.value)) for r in curve.references],
        mark=Dot(x(mark[0]), y(mark[1]), label(mark[1])) if mark else None,
        description=_describe(curve),
        edges={"left": left, "right": WIDTH - RIGHT, "top": TOP, "bottom": HEIGHT - BOTTOM},
    )


def _y_axis(curve: Curve) -> tuple[bool, list[float]]:
    """Return whether the y axis is logarithmic, and its ticks."""
    deviations = [v + d for line in curve.lines for (_, v), d in _with_deviations(line)]
    values = curve.values + deviations
    if curve.limit is None and is_wide(values, curve.factor):
        return True, log_ticks(min(values), max(values))
    lowest = min(values)  # KID may be slightly below 0, which needs no room
    fits = curve.close or lowest < -0.05 * max(values)
    return False, ticks(lowest if fits else 0.0, curve.limit or max(values))


def _with_deviations(line: Line) -> list[tuple[tuple[float, float], float]]:
    return list(zip(line.points, line.deviations, strict=True)) if line.deviations else []


def _path(points: list[tuple[float, float]]) -> str:
    return "M" + " L".join(f"{x} {y}" for x, y in points)


def _describe(curve: Curve) -> str:
    (first, begin), (last, end) = curve.lines[0].points[0], curve.lines[0].points[-1]
    at = curve.axis.removeprefix("training ")
    return f"{curve.title}: {label(begin)} at {at} {first:,.6g}, {label(end)} at {at} {last:,.6g}."
