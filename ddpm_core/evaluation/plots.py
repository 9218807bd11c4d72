"""The curves of an evaluation as PNG files."""

from __future__ import annotations

import io
import itertools
import logging
from collections.abc import Sequence
from typing import Any

from ddpm_core.errors import require
from ddpm_core.evaluation.curves import Curve, curves, is_wide, label, log_ticks
from ddpm_core.scores import Row

logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it logs about its cache folders

FIRST = 25  # checkpoints in the plots of the first ones
SIZE = (8.0, 4.8)  # inches
DPI = 120
MARGINS = {"left": 0.1, "right": 0.98, "top": 0.92, "bottom": 0.11}  # shares of the figure
DASH = 4  # line widths
BLUE, ORANGE, GRAY = "#1f5fa8", "#c2541b", "#6b6b6b"
COLORS = (
    *(BLUE, ORANGE, "#2c8a57", "#8a4fbf", "#b8860b", "#0f8b9d"),
    *("#c2417c", "#7a5a3a", "#5b6b8c", "#7d8b2b", "#d0402b", "#4b4b4b"),
)


def draw(ranked: Sequence[Row]) -> dict[str, bytes]:
    """Return PNG files by name, for rows whose scores can be compared."""
    images = {}
    every, first = curves(ranked), curves(ranked[:FIRST])
    for metric, name in (("fd", "FID"), ("is", "IS")):
        images[f"{name}_vs_TrainingSteps.png"] = plot(every[metric])
        suffix = f", first {FIRST} checkpoints"
        images[f"{name}_vs_TrainingSteps_First{FIRST}.png"] = plot(first[metric], suffix)
    images["KID_vs_TrainingSteps.png"] = plot(every["kid"])
    images["PrecisionRecall_vs_TrainingSteps.png"] = plot(every["precision_recall"])
    return images


def plot(curve: Curve, suffix: str = "") -> bytes:
    """Return a curve as a PNG file."""
    figure = require("matplotlib.figure", "eval").Figure(figsize=SIZE, dpi=DPI)
    axes = figure.subplots(gridspec_kw=MARGINS)
    axes.set_title(curve.title + suffix)
    axes.set_xlabel(curve.axis)
    axes.set_ylabel("; ".join(filter(None, (curve.direction, curve.note))), color=GRAY, fontsize=9)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if curve.lines:
        _draw_lines(axes, curve)
        _set_limits(axes, curve)
        axes.legend(frameon=False)
    else:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=GRAY)
        axes.set_yticks([])
    return saved(figure)


def saved(figure: Any) -> bytes:
    """Return a figure as a PNG file."""
    stream = io.BytesIO()
    # Without the program's name and version, equal scores give equal bytes.
    figure.savefig(stream, format="png", metadata={"Software": None})
    return stream.getvalue()


def _draw_lines(axes: Any, curve: Curve) -> None:
    for line, color in zip(curve.lines, itertools.cycle(COLORS), strict=False):
        steps, values = zip(*line.points, strict=True)
        style = "--" if line.dashed else "-"
        look = {"linestyle": style, "linewidth": 1.6, "marker": "o", "markersize": 4}
        axes.plot(steps, values, label=line.name, color=color, **look)
        if line.deviations:
            low = [v - d for v, d in zip(values, line.deviations, strict=True)]
            high = [v + d for v, d in zip(values, line.deviations, strict=True)]
            if len(steps) > 1:
                axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
            else:
                axes.vlines(steps, low, high, color=color, alpha=0.5)
    if curve.mark:
        step, value = curve.mark
        look = {"marker": "o", "markersize": 11, "markerfacecolor": "none", "markeredgewidth": 2}
        text = f"best: {label(value)} at step {step:,}"
        axes.plot([step], [value], color=ORANGE, linestyle="none", label=text, **look)
    # If two references are equal, the dashes of one fill the gaps of the other.
    paired = len(curve.references) > 1
    for i, reference in enumerate(curve.references):
        color = COLORS[i] if paired else GRAY
        dashes = (i * DASH, (DASH, DASH)) if paired else "--"
        text = f"{reference.name}: {label(reference.value)}"
        axes.axhline(reference.value, color=color, linestyle=dashes, linewidth=1.2, label=text)
    if curve.equal_count:
        steps, values = zip(*curve.equal_count.points, strict=True)
        look = {"marker": ".", "linewidth": 1, "label": curve.equal_count.name}
        axes.plot(steps, values, color=GRAY, **look)


def _set_limits(axes: Any, curve: Curve) -> None:
    """Choose the y axis as `chart.chart` does."""
    if curve.limit is not None:
        axes.set_ylim(-0.02, curve.limit + 0.02)
    elif not is_wide(curve.values, curve.factor):
        if curve.close:
            return
        axes.set_ylim(bottom=axes.get_ylim()[0] if min(curve.values) < 0 else 0.0)
    else:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        marks = log_ticks(low, high)
        if curve.close:  # few ticks: end the axis at the outer ones
            axes.set_ylim(marks[0], marks[-1])
        else:
            marks = [mark for mark in marks if low <= mark <= high]
        axes.set_yticks(marks, [label(mark) for mark in marks])
        axes.minorticks_off()
