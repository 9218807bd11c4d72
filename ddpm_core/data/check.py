"""The verb check-data: report what a source contains, and its problems."""

from __future__ import annotations

import shlex
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len

from ddpm_core import console
from ddpm_core.config import Config, Prepare
from ddpm_core.data import names
from ddpm_core.data.captions import add_class_captions, read_captions
from ddpm_core.data.layout import Layout, find_layout
from ddpm_core.data.rejected import SHOWN, require_images, sorted_by_name
from ddpm_core.data.sources.base import Entry, Listing, Rejection, Source
from ddpm_core.data.sources.download import KNOWN
from ddpm_core.data.sources.open import open_source, recognise
from ddpm_core.data.split import untrainable
from ddpm_core.data.workers import (
    SAMPLE_SIZE,
    Inspected,
    chunked,
    inspect_images,
    map_chunks,
    workers_for,
)
from ddpm_core.errors import UserError
from ddpm_core.text import counted

IMBALANCE = 3.0  # ratio of the largest class to the smallest above which the report mentions it
SIDES = (8, 16, 32, 64, 128, 256, 512, 1024)  # pixels; bins for the shorter sides
_BAR = 40  # characters
_COPIES = 5  # names shown of a group of copies
_HEADINGS = {"train": "train", "holdout": "held out", "undecided": "images"}


@dataclass(slots=True)
class DataReport:
    """What `inspect` found. Counts are of usable images; sizes are pixels of upright images.

    `splits` maps train, holdout or undecided (prepare will split them) to counts by class.
    `sides` maps the lower end of a bin to the number of shorter sides in it. `cropped` is the share
    of the median image that prepare.resize=crop removes. `copies` lists groups of images with the
    same content. `failures` are the reasons why prepare would fail. `squares` are distinct images
    of the sample, uint8 (n, 32, 32, 3).
    """

    source: str
    count: int = 0
    splits: dict[str, dict[str, int]] = field(default_factory=dict)
    sides: dict[int, int] = field(default_factory=dict)
    smallest: tuple[int, int] = (0, 0)
    largest: tuple[int, int] = (0, 0)
    median_side: int = 0
    cropped: float = 0.0
    far_from_square: int = 0
    stored: dict[str, int] = field(default_factory=dict)
    rejected: list[Rejection] = field(default_factory=list)
    copies: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    captioned: bool = False  # every image has its own caption
    squares: NDArray[np.uint8] = field(
        default_factory=lambda: np.zeros((0, SAMPLE_SIZE, SAMPLE_SIZE, 3), np.uint8)
    )


def check_data(source: str | Path, settings: Prepare | None = None) -> DataReport:
    """Inspect every image of a source, print a report to stdout, and return it.

    The arguments and errors are those of `inspect`.
    """
    report = inspect(source, settings)
    print(console.printable("\n".join(format_report(report))))
    return report


def inspect(source: str | Path, settings: Prepare | None = None, sample: int = 0) -> DataReport:
    """Inspect every image of a source, and return a report.

    `source` may be anything that prepare.source may be. `settings` are the other settings of
    prepare. `sample` is the largest number of images in `squares`, evenly spaced in the source.

    Raises:
        UserError: the source cannot be read or contains no images.
    """
    # A Path is a file or folder, even if it is called digits.
    source = source if isinstance(source, str) else str(source.absolute())
    settings = (settings or Prepare()).model_copy(update={"source": source})
    # Read a known archive from where prepare stores it; nothing is written there.
    downloads = Path(Config().workspace) if source in KNOWN else None
    with (
        tempfile.TemporaryDirectory(prefix="ddpm-check-data-") as scratch,
        open_source(settings, downloads or Path(scratch)) as opened,
    ):
        recognised, listing = recognise(opened, settings)
        require_images(listing, settings)
        layout = find_layout(listing)
        failures: list[str] = []
        texts = _read_captions(listing, layout, settings, failures)
        inspected = _inspect_all(recognised, listing.images, sample)
    report = build_report(source, listing, layout, inspected)
    report.failures += failures
    used = [item for item in inspected if not item.reason]
    report.captioned = bool(used) and all(texts[item.position] for item in used)
    return report


def _read_captions(
    listing: Listing, layout: Layout, settings: Prepare, failures: list[str]
) -> list[str | None]:
    """Return the captions in the source; add what prepare would report about them to the notes."""
    try:
        texts = read_captions(listing, settings.caption_column, layout.notes)
    except UserError as error:
        failures.append(str(error))
        return [None] * len(listing.images)
    add_class_captions(texts, layout.classes, settings.caption, layout.notes)
    return texts


def _inspect_all(source: Source, entries: Sequence[Entry], sample: int) -> list[Inspected]:
    """Inspect all images, in one or several processes; returns them in the order of `entries`."""
    found: list[Inspected] = []
    every = -(-len(entries) // sample) if sample else 0
    workers = workers_for(entries, "auto")
    with console.progress("check", len(entries), "images") as advance:
        for done in map_chunks(inspect_images, (every,), chunked(source.read(entries), 0), workers):
            found += done
            advance(len(done))
    return sorted(found, key=lambda item: item.position)


def build_report(
    source: str, listing: Listing, layout: Layout, inspected: Sequence[Inspected]
) -> DataReport:
    """Return the report on a source from the facts of each image."""
    report = DataReport(source, notes=list(layout.notes))
    used = [item for item in inspected if not item.reason]
    report.count = len(used)
    report.rejected = sorted_by_name(
        listing.rejected
        + [Rejection(listing.images[i.position].name, i.reason) for i in inspected if i.reason]
    )
    if used:
        _measure(report, np.array([(item.width, item.height) for item in used]))
    report.stored = dict(Counter(item.stored for item in used).most_common())
    report.splits = _count_splits(layout, used)
    report.copies = _group_copies(listing, used)
    reason = untrainable([layout.held_out[item.position] for item in used])
    report.failures += [f"{reason}."] if reason else []
    report.failures += _rejected_share(report)
    report.notes += _advice(report, listing)
    # Copies are left out: tests that compare images with each other would find them too easily.
    squares = {item.digest: item.square for item in used if item.square is not None}
    if squares:
        report.squares = np.stack(list(squares.values()))
    return report


def _rejected_share(report: DataReport) -> list[str]:
    """Return the failure of prepare if too many images are unusable."""
    share = len(report.rejected) / max(1, report.count + len(report.rejected))
    if share <= (limit := Prepare().max_rejected):
        return []
    return [f"{share:.1%} of the images are unusable, more than prepare.max_rejected={limit:g}."]


def _measure(report: DataReport, sizes: NDArray[np.int64]) -> None:
    """Fill in the facts about sizes (N, 2): width and height."""
    sides = sizes.min(axis=1)
    bins = Counter(max((s for s in SIDES if s <= side), default=0) for side in sides.tolist())
    report.sides = dict(sorted(bins.items()))
    order = np.argsort(sizes.prod(axis=1), kind="stable")
    report.smallest = (int(sizes[order[0], 0]), int(sizes[order[0], 1]))
    report.largest = (int(sizes[order[-1], 0]), int(sizes[order[-1], 1]))
    report.median_side = int(np.median(sides))
    report.far_from_square = int((sizes.max(axis=1) > 2 * sides).sum())
    report.cropped = float(np.median(1 - sides / sizes.max(axis=1)))


def _count_splits(layout: Layout, used: Sequence[Inspected]) -> dict[str, dict[str, int]]:
    label = {False: "train", True: "holdout", None: "undecided"}
    splits: dict[str, Counter[str]] = {}
    for item in used:
        split = label[layout.held_out[item.position]]
        splits.setdefault(split, Counter())[layout.classes[item.position] or ""] += 1
    return {
        split: dict(sorted(splits[split].items())) for split in label.values() if split in splits
    }


def _group_copies(listing: Listing, used: Sequence[Inspected]) -> list[list[str]]:
    groups: dict[bytes, list[str]] = {}
    for item in used:
        groups.setdefault(item.digest, []).append(names.shown(listing.images[item.position].name))
    return [group for group in groups.values() if len(group) > 1]


def class_totals(report: DataReport) -> dict[str, int]:
    """Return the number of images of each class in all splits."""
    totals: Counter[str] = Counter()
    for counts in report.splits.values():
        totals.update({name: n for name, n in counts.items() if name})
    return dict(totals)


def _advice(report: DataReport, listing: Listing) -> list[str]:
    """Return messages about imbalance, shapes and ignored files."""
    advice = []
    totals = class_totals(report)
    if len(totals) > 1 and max(totals.values()) > IMBALANCE * min(totals.values()):
        most, least = max(totals, key=totals.__getitem__), min(totals, key=totals.__getitem__)
        advice.append(
            f"Unbalanced classes: {totals[most]:,} images of {most}, {totals[least]:,} of {least}."
        )
    if report.far_from_square > report.count / 10:
        advice.append(
            f"{report.far_from_square:,} images are more than twice as long as wide: "
            "prepare.resize=crop loses at least half of each, pad keeps everything."
        )
    if listing.ignored:
        kinds = ", ".join(f"{n:,} .{kind}" for kind, n in listing.ignored.most_common(5))
        advice.append(f"Ignored files that are not images: {kinds}.")
    return advice


def format_report(report: DataReport) -> list[str]:
    """Return the lines of a report to print."""
    classes = class_totals(report)
    text = [f"{report.source}: {counted(report.count, 'image')}, {counted(len(classes), 'class')}"]
    text += _class_table(report)
    if report.count:
        text += _size_histogram(report)
        text.append("stored as: " + ", ".join(f"{k} {n:,}" for k, n in report.stored.items()))
    text += _section("unusable", [f"{r.name}: {r.reason}" for r in report.rejected])
    text += _section("exact copies", [_format_copies(group) for group in report.copies])
    text += [f"note: {note}" for note in report.notes]
    text += [f"prepare would fail: {reason}" for reason in report.failures]
    text.append(f"To write settings for these images: ddpm init {shlex.quote(report.source)}")
    return [*map(names.one_line, text)]


def _format_copies(group: Sequence[str]) -> str:
    more = f" and {len(group) - _COPIES:,} more" if len(group) > _COPIES else ""
    return " = ".join(group[:_COPIES]) + more


def _class_table(report: DataReport) -> list[str]:
    """Return a table of classes and splits, aligned for scripts with wide letters too.

    rich.Table would need as many lines, and breaks long names at the width of the terminal.
    """
    splits = list(report.splits)
    width = max([cell_len(name) for name in class_totals(report)] + [8])
    table = ["  " + " " * width + "".join(f"{_HEADINGS[split]:>11}" for split in splits)]
    for name in sorted({name for counts in report.splits.values() for name in counts}):
        cells = "".join(f"{report.splits[split].get(name, 0):>11,}" for split in splits)
        shown = name or "(none)"
        table.append(f"  {shown}{' ' * (width - cell_len(shown))}{cells}")
    return table


def _size_histogram(report: DataReport) -> list[str]:
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


def _section(title: str, items: list[str]) -> list[str]:
    """Return a title with the number of items, and the first of them."""
    if not items:
        return [f"{title}: none"]
    more = [f"  and {len(items) - SHOWN:,} more"] if len(items) > SHOWN else []
    return [f"{title}: {len(items):,}", *(f"  {item}" for item in items[:SHOWN]), *more]
