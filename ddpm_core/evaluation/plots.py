"""Scores against training steps as PNG files, a picture a score."""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from typing import Any

from ddpm_core.errors import require
from ddpm_core.evaluation.chart import label, log_ticks, spans
from ddpm_core.evaluation.metrics import count_label, metric_name
from ddpm_core.evaluation.rows import samples_of
from ddpm_core.scores import Row, best, best_inception

# Its notes are about its cache folders.
logging.getLogger("matplotlib").setLevel(logging.ERROR)

FIRST = 25  # checkpoints in the pictures of the beginning
SIZE = (8.0, 4.8)  # inches
DPI = 120
MARGINS = {"left": 0.1, "right": 0.98, "top": 0.92, "bottom": 0.11}  # shares of the figure
DASH = 4  # line widths: of the level lines
BLUE, ORANGE, GRAY = "#1f5fa8", "#c2541b", "#6b6b6b"

Style = str | tuple[int, tuple[int, ...]]


def draw(ranked: Sequence[Row]) -> dict[str, bytes]:
    """PNG files by name, of rows that compare. Where a score was not measured they say so."""
    pictures = {}
    for suffix, some in (("", ranked), ("_First25", ranked[:FIRST])):
        pictures[f"FID_vs_TrainingSteps{suffix}.png"] = _distance(some, suffix)
        pictures[f"IS_vs_TrainingSteps{suffix}.png"] = _inception(some, suffix)
    pictures["KID_vs_TrainingSteps.png"] = _kernel(ranked)
    pictures["PrecisionRecall_vs_TrainingSteps.png"] = _shares(ranked)
    return pictures


def _distance(rows: Sequence[Row], suffix: str) -> bytes:
    figure, axes = _figure(rows, "fd", suffix)
    if _line(axes, rows, "fd", BLUE, _samples(rows)):
        _mark(axes, best(rows), "fd", "best")
        _floor(axes, rows, "fd")
        _from_zero(axes, [row["fd"] for row in rows if row["fd"] is not None])
    return _png(figure, axes, "lower is better")


def _inception(rows: Sequence[Row], suffix: str) -> bytes:
    figure, axes = _figure(rows, "is", suffix)
    if _line(axes, rows, "is_mean", BLUE, deviation="is_std"):
        _mark(axes, best_inception(rows), "is_mean", "best")
        _floor(axes, rows, "is_mean")
    return _png(figure, axes, "higher is better; mean and deviation of 10 splits")


def _kernel(rows: Sequence[Row]) -> bytes:
    figure, axes = _figure(rows, "kid")
    measured = [row for row in rows if row.get("kid_mean") is not None]
    spread = all(row.get("kid_std") is not None for row in measured)
    if _line(axes, rows, "kid_mean", BLUE, deviation="kid_std" if spread else None):
        _floor(axes, rows, "kid_mean")
        _from_zero(axes, [row["kid_mean"] for row in rows if row["kid_mean"] is not None])
    told = "mean and deviation of 100 subsets" if spread else "of too few images for a deviation"
    return _png(figure, axes, f"lower is better; {told}")


def _shares(rows: Sequence[Row]) -> bytes:
    figure, axes = _figure(rows, "precision and recall")
    shown = _line(axes, rows, "precision", BLUE, "precision (fidelity)")
    if _line(axes, rows, "recall", ORANGE, "recall (diversity)", style="--") and shown:
        axes.set_ylim(-0.02, 1.02)
        # Where both are of one height, the dashes of one fill the gaps of the other.
        for key, color, gap in (("precision", BLUE, 0), ("recall", ORANGE, DASH)):
            _level(axes, rows, key, color, (gap, (DASH, DASH)), f", {key}")
    return _png(figure, axes, "higher is better")


def _figure(rows: Sequence[Row], metric: str, suffix: str = "") -> tuple[Any, Any]:
    figure = require("matplotlib.figure", "eval").Figure(figsize=SIZE, dpi=DPI)
    axes = figure.subplots(gridspec_kw=MARGINS)
    axes.set_title(_title(rows, metric) + (f", first {FIRST} checkpoints" if suffix else ""))
    axes.set_xlabel("training step")
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _title(rows: Sequence[Row], metric: str) -> str:
    if not rows:
        return metric
    measure = {"kid": "kid_mean", "precision and recall": "precision"}.get(metric, metric)
    space, count = rows[0]["evidence"]["space"], samples_of(rows[0], measure)
    if " " in metric:
        features = space.replace("_", "-") or "Inception"
        return f"{metric}, {features} features, {count_label(count)} images"
    return metric_name(metric, space, count)


def _samples(rows: Sequence[Row]) -> str | None:
    return f"{count_label(rows[0]['evidence']['count'])} samples" if rows else None


def _line(
    axes: Any,
    rows: Sequence[Row],
    key: str,
    color: str,
    name: str | None = None,
    deviation: str | None = None,
    style: Style = "-",
) -> bool:
    """One score against the step; False, and a remark in the picture, where it is nowhere."""
    there = [row for row in rows if row.get(key) is not None]
    if not there:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=GRAY)
        axes.set_yticks([])
        return False
    steps, values = [row["step"] for row in there], [row[key] for row in there]
    look = {"color": color, "linestyle": style, "linewidth": 1.6, "marker": "o", "markersize": 4}
    axes.plot(steps, values, label=name, **look)
    if deviation is not None:
        low = [row[key] - row[deviation] for row in there]
        high = [row[key] + row[deviation] for row in there]
        if len(there) > 1:
            axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
        else:
            axes.vlines(steps, low, high, color=color, alpha=0.5)
    return True


def _mark(axes: Any, row: Row | None, key: str, word: str) -> None:
    if row is None or row.get(key) is None:
        return
    text = f"{word}: {row[key]:.4g} at step {row['step']:,}"
    axes.plot(
        [row["step"]],
        [row[key]],
        marker="o",
        markersize=11,
        markerfacecolor="none",
        markeredgewidth=2,
        color=ORANGE,
        linestyle="none",
        label=text,
    )


def _from_zero(axes: Any, values: Sequence[float]) -> None:
    """An axis from 0 (or the least value below); logarithmic where that would hide the small."""
    if not spans(values):
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0] if min(values) < 0 else 0.0))
        return
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    marks = [mark for mark in log_ticks(low, high) if low <= mark <= high]
    axes.set_yticks(marks, [label(mark) for mark in marks])
    axes.minorticks_off()


def _level(
    axes: Any,
    rows: Sequence[Row],
    key: str,
    color: str = GRAY,
    style: Style = "--",
    of: str = "",
) -> bool:
    """The same score of held-out real images, where it was measured."""
    value, count = (rows[0].get("floor") or {}).get(key), rows[0]["floor_count"]
    if value is None:
        return False
    text = f"{count_label(count)} held-out real images{of}: {value:.4g}"
    axes.axhline(value, color=color, linestyle=style, linewidth=1.2, label=text)
    return True


def _floor(axes: Any, rows: Sequence[Row], key: str) -> None:
    """The same score of held-out real images; where they are fewer, of as few samples too."""
    count = rows[0]["floor_count"]
    if _level(axes, rows, key) and count < rows[0]["evidence"]["count"] and key != "kid_mean":
        steps, values = [row["step"] for row in rows], [row["at_floor"][key] for row in rows]
        text = f"{count_label(count)} samples, to compare with that line"
        axes.plot(steps, values, color=GRAY, marker=".", linewidth=1, label=text)


def _png(figure: Any, axes: Any, remark: str) -> bytes:
    axes.set_ylabel(remark, color=GRAY, fontsize=9)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False)
    stream = io.BytesIO()
    # Without the program's name and version the same scores give the same bytes.
    figure.savefig(stream, format="png", metadata={"Software": None})
    return stream.getvalue()
