"""What check-data found: as plain data, and as a person reads it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rich.cells import cell_len

from ddpm_core.config import yaml_text
from ddpm_core.data.names import one_line
from ddpm_core.data.rejected import SHOWN
from ddpm_core.data.sources.base import Rejection
from ddpm_core.text import counted

SIDES = (8, 16, 32, 64, 128, 256, 512, 1024)
_BAR = 40  # characters
_COPIES = 5  # of one picture whose names are shown
_HEADINGS = {"train": "train", "holdout": "held out", "undecided": "pictures"}


@dataclass(slots=True)
class DataReport:
    """What `check_data` found. Counts are of usable pictures; sizes are pixels after EXIF turning.

    `splits` maps train, holdout or undecided (prepare will split it) to counts by class;
    `sides` maps the lower end of a range to how many shorter sides lie in it; `copies` lists
    groups of pictures with the same content; `suggested` is a start for params.yaml.
    """

    source: str
    count: int = 0
    splits: dict[str, dict[str, int]] = field(default_factory=dict)
    sides: dict[int, int] = field(default_factory=dict)
    smallest: tuple[int, int] = (0, 0)
    largest: tuple[int, int] = (0, 0)
    median_side: int = 0
    far_from_square: int = 0
    stored: dict[str, int] = field(default_factory=dict)
    rejected: list[Rejection] = field(default_factory=list)
    copies: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    suggested: dict[str, Any] = field(default_factory=dict)


def class_totals(report: DataReport) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for counts in report.splits.values():
        totals.update({name: n for name, n in counts.items() if name})
    return dict(totals)


def lines(report: DataReport) -> list[str]:
    """The report as a person reads it."""
    classes = class_totals(report)
    text = [
        f"{report.source}: {counted(report.count, 'picture')}, {counted(len(classes), 'class')}"
    ]
    text += _class_table(report)
    if report.count:
        text += _sizes(report)
        text.append("stored as: " + ", ".join(f"{k} {n:,}" for k, n in report.stored.items()))
    text += _listed("unusable", [f"{r.name}: {r.reason}" for r in report.rejected])
    text += _listed("exact copies", [_equal(group) for group in report.copies])
    text += [f"note: {note}" for note in report.notes]
    suggested = [
        f"  {section}: {{{', '.join(f'{key}: {_yaml(value)}' for key, value in values.items())}}}"
        for section, values in report.suggested.items()
    ]
    return [*map(one_line, text), "params to start from:", *suggested]


def _equal(group: Sequence[str]) -> str:
    more = f" and {len(group) - _COPIES:,} more" if len(group) > _COPIES else ""
    return " = ".join(group[:_COPIES]) + more


def _yaml(value: Any) -> str:
    """A text in quotes where it would be read as something else."""
    if not isinstance(value, str):
        return str(value)
    with suppress(ValueError):
        if yaml_text.value(f"[{value}]") == [value]:
            return value
    return json.dumps(value, ensure_ascii=False)


def _class_table(report: DataReport) -> list[str]:
    splits = list(report.splits)
    width = max([cell_len(name) for name in class_totals(report)] + [8])
    table = ["  " + " " * width + "".join(f"{_HEADINGS[split]:>11}" for split in splits)]
    for name in sorted({name for counts in report.splits.values() for name in counts}):
        cells = "".join(f"{report.splits[split].get(name, 0):>11,}" for split in splits)
        shown = name or "(none)"
        table.append(f"  {shown}{' ' * (width - cell_len(shown))}{cells}")
    return table


def _sizes(report: DataReport) -> list[str]:
    most = max(report.sides.values())
    text = [
        f"sizes: {report.smallest[0]} x {report.smallest[1]} to {report.largest[0]} x "
        f"{report.largest[1]}, median of the shorter side {report.median_side}; shorter sides:"
    ]
    for low, count in report.sides.items():
        high = next((side - 1 for side in SIDES if side > low), None)
        label = f"{low}-{high}" if high is not None else f"{low} and more"
        text.append(f"  {label:>13} {count:>9,} {'#' * max(1, count * _BAR // most)}")
    return text


def _listed(title: str, items: list[str]) -> list[str]:
    if not items:
        return [f"{title}: none"]
    more = [f"  and {len(items) - SHOWN:,} more"] if len(items) > SHOWN else []
    return [f"{title}: {len(items):,}", *(f"  {item}" for item in items[:SHOWN]), *more]
